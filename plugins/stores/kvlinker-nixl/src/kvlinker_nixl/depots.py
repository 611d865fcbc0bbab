"""A depot says where objects lie and where new ones go; it never touches their bytes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.errors import StoreError
from kvlinker.frames import MAX_RANGES, header_bytes
from kvlinker.store import ObjectKey, StoreStats
from kvlinker_nixl.moving import Target
from kvlinker_nixl.space import Entry, Space

__all__ = ["ABSENT", "EXISTS", "FULL", "Depot", "LocalDepot", "Pins", "Reservation", "UsedBytes"]

ABSENT = -1
"""In place of an offset: there is no such object."""
EXISTS = -1
"""In place of an offset: the object is there already."""
FULL = -2
"""In place of an offset: there is no room for it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reservation:
    """Room for objects that are being written; nobody finds them."""

    number: int
    offsets: IndexArray
    """[keys] where each frame goes, or EXISTS or FULL."""
    target: Target


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pins:
    """Objects whose bytes stay where they are."""

    number: int
    offsets: IndexArray
    """[keys] where each frame begins, or ABSENT."""
    header_bytes: IndexArray
    """[keys] bytes of header and payload, less those of the payload that was asked for."""
    target: Target


class Depot(ABC):
    """Where objects are, for a store whose objects lie in slots; every method may be called from any thread."""

    @property
    @abstractmethod
    def max_frame_bytes(self) -> int:
        """Header and payload of the longest object that there is room for."""

    @abstractmethod
    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Return which objects there are, in order."""

    @abstractmethod
    def reserve(self, keys: Sequence[ObjectKey], frame_bytes: int) -> Reservation:
        """Find room for objects, each key named once."""

    @abstractmethod
    def publish(self, reservation: Reservation) -> tuple[bool, ...]:
        """Let the objects that found room be found; [keys] False where another writer was faster, or none was asked.

        Raises:
            StoreError: the room was given back, or the depot cannot be asked.
        """

    @abstractmethod
    def discard(self, reservation: Reservation) -> None:
        """Give room back. Nothing happens where it was published or discarded."""

    @abstractmethod
    def pin(self, keys: Sequence[ObjectKey], object_bytes: int) -> Pins:
        """Keep objects that may have payloads of a length where they are."""

    @abstractmethod
    def unpin(self, pins: Pins) -> None:
        """Let them go. Idempotent."""

    @abstractmethod
    def is_current(self, pins: Pins) -> bool:
        """Whether pins are those of the space that is there now: another one may have other objects in their places."""

    def find_current(self, pins: Pins) -> bool:
        """Find out whether they are, behind a transfer that failed; True where nobody can say."""
        return self.is_current(pins)

    @abstractmethod
    def drop(self, pins: Pins, keys: Sequence[ObjectKey], positions: Sequence[int]) -> None:
        """Remove pinned objects that are not what was written, unless others have their keys by now."""

    @abstractmethod
    def hold(self, keys: Sequence[ObjectKey], seconds: float) -> tuple[int, tuple[bool, ...]]:
        """Keep objects from eviction; return a number to release them by, and which there are."""

    @abstractmethod
    def release(self, number: int) -> None:
        """Let held objects be evicted. Idempotent."""

    @abstractmethod
    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Remove objects; True where there was one."""

    @abstractmethod
    def clear(self, namespace: bytes) -> int:
        """Remove the objects of a namespace, and return how many."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return what there is."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Idempotent."""


class UsedBytes(ABC):
    """How much room a space takes."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes that count against the capacity."""

    @abstractmethod
    def close(self) -> None:
        """Give up the room. Idempotent."""


class LocalDepot(Depot):
    """A depot over a space of this process."""

    def __init__(self, space: Space, room: UsedBytes, *, capacity: int, target: Target) -> None:
        """Take over a space.

        Args:
            space: where objects are.
            room: what it lies in; closed with the depot.
            capacity: bytes that the room never exceeds.
            target: where offset 0 of the space is.
        """
        self._space = space
        self._room = room
        self._capacity = capacity
        self._target = target
        self._lock = threading.Lock()
        self._numbers = 0
        self._reserved: dict[int, list[Entry | None]] = {}
        self._pinned: dict[int, list[Entry | None]] = {}
        self._is_closed = False

    @property
    def max_frame_bytes(self) -> int:
        """See Depot."""
        return self._space.layout.longest_slot

    @property
    def is_busy(self) -> bool:
        """Whether objects are being read or written."""
        return bool(self._reserved or self._pinned)

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Depot."""
        with self._lock:
            return tuple(self._space.find(key) is not None for key in keys)

    # ---- writing --------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[ObjectKey], frame_bytes: int) -> Reservation:
        """See Depot."""
        offsets = np.full(len(keys), FULL, dtype=np.int64)
        taken: list[Entry | None] = []
        with self._lock:
            for at, key in enumerate(keys):
                there = self._space.find(key)
                if there is not None and there.frame_bytes == frame_bytes:
                    self._space.use(there)
                    offsets[at] = EXISTS
                    taken.append(None)
                    continue
                entry = self._space.take(key, frame_bytes)
                taken.append(entry)
                if entry is not None:
                    offsets[at] = entry.offset
            number = self._next_number()
            self._reserved[number] = taken
        return Reservation(number=number, offsets=offsets, target=self._target)

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def publish(self, reservation: Reservation) -> tuple[bool, ...]:
        """See Depot."""
        with self._lock:
            taken = self._reserved.pop(reservation.number, None)
            if taken is None:
                msg = "room that was given back cannot be published"
                raise StoreError(msg)
            return tuple(entry is not None and self._space.publish(entry) for entry in taken)

    def discard(self, reservation: Reservation) -> None:
        """See Depot."""
        with self._lock:
            for entry in self._reserved.pop(reservation.number, []):
                if entry is not None:
                    self._space.unpin(entry)

    # ---- reading --------------------------------------------------------------------------------

    def pin(self, keys: Sequence[ObjectKey], object_bytes: int) -> Pins:
        """See Depot."""
        offsets = np.full(len(keys), ABSENT, dtype=np.int64)
        headers = np.zeros(len(keys), dtype=np.int64)
        pinned: list[Entry | None] = []
        with self._lock:
            for at, key in enumerate(keys):
                entry = self._space.find(key)
                if entry is not None and not _may_hold(entry, object_bytes):
                    entry = None
                pinned.append(entry)
                if entry is not None:
                    self._space.pin(entry)
                    offsets[at], headers[at] = entry.offset, entry.frame_bytes - object_bytes
            number = self._next_number()
            self._pinned[number] = pinned
        return Pins(number=number, offsets=offsets, header_bytes=headers, target=self._target)

    def unpin(self, pins: Pins) -> None:
        """See Depot."""
        with self._lock:
            for entry in self._pinned.pop(pins.number, []):
                if entry is not None:
                    self._space.unpin(entry)

    def is_current(self, pins: Pins) -> bool:
        """See Depot."""
        return pins.target == self._target

    def drop(self, pins: Pins, keys: Sequence[ObjectKey], positions: Sequence[int]) -> None:
        """See Depot."""
        del keys  # the entries say it
        with self._lock:
            pinned = self._pinned.get(pins.number, [])
            for at in positions:
                entry = pinned[at] if at < len(pinned) else None
                if entry is not None:
                    self._space.remove(entry)

    def hold(self, keys: Sequence[ObjectKey], seconds: float) -> tuple[int, tuple[bool, ...]]:
        """See Depot."""
        with self._lock:
            found = [self._space.find(key) for key in keys]
            number = self._space.hold([entry for entry in found if entry is not None], seconds)
        return number, tuple(entry is not None for entry in found)

    def release(self, number: int) -> None:
        """See Depot."""
        with self._lock:
            self._space.release(number)

    # ---- removing -------------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Depot."""
        with self._lock:
            return tuple(self._remove(key) for key in keys)

    def _remove(self, key: ObjectKey) -> bool:
        entry = self._space.find(key)
        if entry is not None:
            self._space.remove(entry)
        return entry is not None

    def clear(self, namespace: bytes) -> int:
        """See Depot."""
        with self._lock:
            return sum(self._remove(key) for key in self._space.keys_of(namespace))

    def stats(self) -> StoreStats:
        """See Depot."""
        with self._lock:
            counters: Mapping[str, int] = dict(self._space.counters)
            return StoreStats(
                objects=len(self._space),
                used_bytes=0 if self._is_closed else self._room.used_bytes,
                capacity_bytes=self._capacity,
                counters=counters,
            )

    def close(self) -> None:
        """See Depot."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._room.close()


def _may_hold(entry: Entry, object_bytes: int) -> bool:
    return header_bytes(1) <= entry.frame_bytes - object_bytes <= header_bytes(MAX_RANGES)
