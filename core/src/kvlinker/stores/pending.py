"""Pending objects are near and not far yet: held by the near tier, in the order in which they are to be copied."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvlinker.errors import KVLinkerError
from kvlinker.store import Hold, ObjectKey, ReadRequest, WriteBatch
from kvlinker.stores.host_pages import ObjectRanges

__all__ = ["LEASE_SECONDS", "Lease", "PendingObject", "PendingObjects", "request_of"]

LEASE_SECONDS = 300.0
"""How long the near tier is asked to hold what is pending; asked again when half of it is over."""


class Lease:
    """The near tier's hold on objects of one write, until the last one is far."""

    def __init__(self, hold: Hold, count: int) -> None:
        """Keep a hold on so many pending objects."""
        self._lock = threading.Lock()
        self._hold = hold
        self._count = count
        self._renew_at = time.monotonic() + LEASE_SECONDS / 2

    @property
    def is_due(self) -> bool:
        """Whether the near tier is to be asked again."""
        return time.monotonic() >= self._renew_at

    def let_go(self) -> None:
        """Note that one object needs no hold any more; the last one releases it."""
        with self._lock:
            self._count -= 1
            if not self._count:
                _release(self._hold)

    def renew(self, hold: Hold) -> None:
        """Hold by another hold from now on."""
        with self._lock:
            _release(self._hold if self._count else hold)
            self._hold = hold
            self._renew_at = time.monotonic() + LEASE_SECONDS / 2


def _release(hold: Hold) -> None:
    with suppress(KVLinkerError):  # of a store that is down: the hold ends by itself
        hold.release()


@dataclass(slots=True, kw_only=True, eq=False)
class PendingObject:
    """One object that the far tier does not have yet."""

    key: ObjectKey
    fingerprint: bytes
    ranges: ObjectRanges
    lease: Lease
    tries: int = 0
    """Copies that the far tier has refused so far."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the object."""
        return self.ranges.object_bytes

    def is_like(self, other: PendingObject) -> bool:
        """Whether one call can copy both."""
        return self.fingerprint == other.fingerprint and (
            self.ranges is other.ranges or self.ranges.is_equal(other.ranges)
        )


class PendingObjects:
    """All pending objects, the oldest first; their bytes and number, with what is reserved, are bounded."""

    def __init__(self, *, max_bytes: int, max_objects: int) -> None:
        """Begin with none."""
        self._max_bytes, self._max_objects = max_bytes, max_objects
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        """Notified when there are fewer or more of them."""
        self._objects: OrderedDict[ObjectKey, PendingObject] = OrderedDict()
        self._bytes = self._reserved_bytes = self._reserved_objects = 0

    def __len__(self) -> int:
        return len(self._objects)

    def bytes_of(self, namespace: bytes) -> int:
        """Return the bytes of a namespace's objects."""
        with self._lock:
            return sum(
                item.size_bytes for key, item in self._objects.items() if key.startswith(namespace)
            )

    def reserve(self, batches: Sequence[WriteBatch]) -> bool:
        """Reserve room for every object of a call; False where there is not enough."""
        size, count = _room(batches)
        with self._lock:
            is_free = (
                self._bytes + self._reserved_bytes + size <= self._max_bytes
                and len(self._objects) + self._reserved_objects + count <= self._max_objects
            )
            if is_free:
                self._reserved_bytes += size
                self._reserved_objects += count
        return is_free

    def give_back(self, batches: Sequence[WriteBatch]) -> None:
        """Give back what was reserved for a call, whose objects were added by now."""
        size, count = _room(batches)
        with self._lock:
            self._reserved_bytes -= size
            self._reserved_objects -= count

    def add(self, items: Sequence[PendingObject]) -> None:
        """Put objects behind all others; one of the same key is replaced."""
        with self.changed:
            for item in items:
                self._drop(item.key)
                self._objects[item.key] = item
                self._bytes += item.size_bytes
            self.changed.notify_all()

    def oldest(self, room: Callable[[ObjectRanges], int]) -> Sequence[PendingObject]:
        """Return the oldest ones that one call can copy.

        Args:
            room: says how many objects of some ranges one call can copy, at least 1.
        """
        found: list[PendingObject] = []
        with self._lock:
            for item in self._objects.values():
                if found and (len(found) >= room(item.ranges) or not item.is_like(found[0])):
                    break
                found.append(item)
        return found

    def settle(self, items: Sequence[PendingObject]) -> int:
        """Let go of objects that need not be copied any more; return how many had not been let go of before."""
        with self.changed:
            own = [item for item in items if self._objects.get(item.key) is item]
            for item in own:
                self._drop(item.key)
            self.changed.notify_all()
        return len(own)

    def put_off(self, items: Sequence[PendingObject]) -> None:
        """Let all others be copied first."""
        with self._lock:
            for item in items:
                if self._objects.get(item.key) is item:
                    self._objects.move_to_end(item.key)

    def forget(self, is_removed: Callable[[ObjectKey], bool]) -> None:
        """Let go of objects that are removed from both tiers."""
        with self.changed:
            for key in [key for key in self._objects if is_removed(key)]:
                self._drop(key)
            self.changed.notify_all()

    def due(self) -> Sequence[tuple[Lease, Sequence[PendingObject]]]:
        """Return leases that are to be renewed, with their objects."""
        found: dict[Lease, list[PendingObject]] = {}
        with self._lock:
            for item in self._objects.values():
                if item.lease.is_due:
                    found.setdefault(item.lease, []).append(item)
        return [*found.items()]

    def wait_for_none(self, seconds: float, is_hopeless: Callable[[], bool]) -> bool:
        """Wait until none is pending; False when the time is over first, or there is no hope."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while self._objects and not is_hopeless():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self.changed.wait(left)
            return not self._objects

    def _drop(self, key: ObjectKey) -> None:
        item = self._objects.pop(key, None)
        if item is not None:
            self._bytes -= item.size_bytes
            item.lease.let_go()


def request_of(items: Sequence[PendingObject]) -> ReadRequest:
    """Return the request that reads objects which are alike."""
    return ReadRequest(
        keys=tuple(item.key for item in items),
        object_bytes=items[0].size_bytes,
        fingerprint=items[0].fingerprint,
    )


def _room(batches: Sequence[WriteBatch]) -> tuple[int, int]:
    size = sum(len(batch.keys) * batch.plan.object_bytes for batch in batches)
    return size, sum(len(batch.keys) for batch in batches)
