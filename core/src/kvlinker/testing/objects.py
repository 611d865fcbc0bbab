"""Objects in memory under keys: who keeps them, which one goes first, and how many bytes they are."""

from __future__ import annotations

import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvlinker.store import ObjectKey

__all__ = ["Lease", "ObjectTable", "StoredObject"]


@dataclass(slots=True, eq=False)
class Lease:
    """Keeps objects from eviction until it is released or expires."""

    expires: float
    released: bool = False


@dataclass(slots=True, eq=False)
class StoredObject:
    """One object, and who keeps it from eviction."""

    payload: bytes
    fingerprint: bytes
    checksum: int
    readers: int = 0
    """Open sessions that may still read it."""
    leases: list[Lease] = field(default_factory=list)
    in_table: bool = False

    @classmethod
    def of(cls, payload: bytes, fingerprint: bytes) -> StoredObject:
        """Return an object whose checksum is that of its payload."""
        return cls(payload=payload, fingerprint=fingerprint, checksum=zlib.crc32(payload))

    @property
    def is_intact(self) -> bool:
        """Whether the payload is what the checksum was taken of."""
        return zlib.crc32(self.payload) == self.checksum

    def fits(self, size: int, fingerprint: bytes) -> bool:
        """Return whether length and layout are the given ones."""
        return len(self.payload) == size and self.fingerprint == fingerprint

    def is_kept(self, now: float) -> bool:
        """Return whether a session or a lease keeps it."""
        self.leases = [lease for lease in self.leases if not lease.released and lease.expires > now]
        return bool(self.readers or self.leases)


class ObjectTable:
    """All objects of a store, least recently used first; bytes never exceed the capacity.

    Methods that change several objects are called under `lock`; it is reentrant.
    """

    def __init__(self, *, capacity_bytes: int | None, clock: Callable[[], float]) -> None:
        """Make an empty table; without a capacity there is no limit."""
        self.lock = threading.RLock()
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._objects: OrderedDict[ObjectKey, StoredObject] = OrderedDict()

    def __len__(self) -> int:
        return len(self._objects)

    def keys(self) -> tuple[ObjectKey, ...]:
        """Return the keys, least recently used first."""
        with self.lock:
            return tuple(self._objects)

    def get(self, key: ObjectKey) -> StoredObject | None:
        """Return the object of a key, without using it."""
        return self._objects.get(key)

    def use(self, key: ObjectKey) -> StoredObject | None:
        """Return the object of a key and make it the most recently used one."""
        stored = self._objects.get(key)
        if stored is not None:
            self._objects.move_to_end(key)
        return stored

    def kept(self) -> int:
        """Return how many objects may not be evicted now."""
        with self.lock:
            now = self._clock()
            return sum(stored.is_kept(now) for stored in self._objects.values())

    def make_room(
        self, fresh: Mapping[ObjectKey, StoredObject], *, protected: set[ObjectKey]
    ) -> bool:
        """Evict until the fresh objects fit; evict nothing and return False where that cannot be."""
        if self.capacity_bytes is None:
            return True
        missing = self.used_bytes - self.capacity_bytes
        missing += sum(self._growth(key, stored) for key, stored in fresh.items())
        now, victims = self._clock(), []
        for key, stored in self._objects.items():
            if missing <= 0:
                break
            if key not in protected and not stored.is_kept(now):
                victims.append(key)
                missing -= len(stored.payload)
        if missing > 0:
            return False
        for key in victims:
            self.drop(key)
        self.counters["evicted"] += len(victims)
        return True

    def _growth(self, key: ObjectKey, stored: StoredObject) -> int:
        old = self._objects.get(key)
        freed = len(old.payload) if old is not None and not old.readers else 0
        return len(stored.payload) - freed

    def put(self, key: ObjectKey, stored: StoredObject) -> None:
        """Insert or replace an object; leases on the old one hold the new one."""
        old = self._objects.get(key)
        if old is not None:
            stored.leases = old.leases
            self.drop(key)
        self._objects[key] = stored
        stored.in_table = True
        self.used_bytes += len(stored.payload)
        self.counters["written"] += 1

    def drop(self, key: ObjectKey) -> bool:
        """Forget an object, if there is one; its bytes count until its last reader is gone."""
        stored = self._objects.pop(key, None)
        if stored is None:
            return False
        stored.in_table = False
        if not stored.readers:
            self.used_bytes -= len(stored.payload)
        return True

    def unpin(self, pinned: Sequence[StoredObject]) -> None:
        """Take back one reader of each object."""
        with self.lock:
            for stored in pinned:
                stored.readers -= 1
                if not stored.readers and not stored.in_table:
                    self.used_bytes -= len(stored.payload)

    def replace_payload(self, key: ObjectKey, payload: bytes) -> None:
        """Change an object's bytes and not its checksum; KeyError if absent."""
        with self.lock:
            stored = self._objects[key]
            self.used_bytes += len(payload) - len(stored.payload)
            stored.payload = payload
