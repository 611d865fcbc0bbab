"""Usage is how many bytes a namespace has in a store: as the store tells, or else as what passes by is counted."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from itertools import islice

from kvlinker.errors import StoreError
from kvlinker.guard import checked_flags
from kvlinker.store import ObjectKey, Store

__all__ = ["MAX_LOAD", "CountedUsage", "ToldUsage", "Usage", "usage_of"]

_KEYS_AT_ONCE = 4096
"""Keys that are asked for at a time, to see which of them the store has evicted."""
MAX_LOAD = 100
"""A store is asked what it holds again after so many times what it took to say."""


class Usage(ABC):
    """Bytes of one namespace, and those that writes under way have reserved."""

    @abstractmethod
    def reserve(self, key: ObjectKey, size: int, *, limit: int) -> bool:
        """Reserve the bytes of an object that is to be written; False where they would be over the limit."""

    @abstractmethod
    def settle(self, key: ObjectKey, size: int, *, is_new: bool, is_stored: bool) -> None:
        """Give a reservation back, and count the object where it is stored.

        Args:
            key: of the object.
            size: bytes that were reserved.
            is_new: whether it was written now.
            is_stored: whether the store holds it now.
        """

    @property
    @abstractmethod
    def writes(self) -> int:
        """Writes that were counted so far."""

    @abstractmethod
    def forget(self, key: ObjectKey, *, since: int) -> None:
        """Count an object no more that was removed, unless it was written again.

        Args:
            key: of the object.
            since: writes that were counted before it was removed.
        """

    @abstractmethod
    def refresh(self, seconds: float) -> None:
        """Ask a store that tells what it holds, if that was asked longer than so many seconds ago."""

    @abstractmethod
    def recount(self, *, everything: bool = False) -> None:
        """Look again what the store holds: some of the objects that are counted, or all of them."""


def usage_of(store: Store, namespace: bytes) -> Usage:
    """Return the usage of a namespace: told by the store where it can.

    Raises:
        StoreError: the store is down, and does not say whether it can.
    """
    told = store.namespace_bytes(namespace)
    return CountedUsage(store) if told is None else ToldUsage(store, namespace, told)


class ToldUsage(Usage):
    """What the store says, all of its processes together, and what was written since it was asked."""

    def __init__(self, store: Store, namespace: bytes, told: int) -> None:
        """Begin with what was told."""
        self._store, self._namespace = store, namespace
        self._lock = threading.Lock()
        self._used = told
        self._reserved = 0
        self._written = 0
        """Bytes of all objects so far that were written here."""
        self._asked, self._took = time.monotonic(), 0.0

    def reserve(self, key: ObjectKey, size: int, *, limit: int) -> bool:  # noqa: ARG002  # the store knows its keys
        """See Usage."""
        with self._lock:
            fits = self._used + self._reserved + size <= limit
            self._reserved += size * fits
            return fits

    def settle(self, key: ObjectKey, size: int, *, is_new: bool, is_stored: bool) -> None:  # noqa: ARG002  # the store knows both
        """See Usage."""
        with self._lock:
            self._reserved -= size
            self._used += size * is_new
            self._written += size * is_new

    @property
    def writes(self) -> int:
        """See Usage."""
        return 0

    def forget(self, key: ObjectKey, *, since: int) -> None:
        """See Usage; the store is asked when the room is needed."""

    def refresh(self, seconds: float) -> None:
        """See Usage; less often where the answer takes more than a hundredth of the time, and with 0 always."""
        pause = max(seconds, MAX_LOAD * self._took) if seconds else 0.0
        if time.monotonic() - self._asked >= pause:
            self.recount()

    def recount(self, *, everything: bool = False) -> None:  # noqa: ARG002  # it is one question
        """See Usage; what is written meanwhile counts twice until the next time, rather than never."""
        with self._lock:
            before = self._written
        began = time.monotonic()
        told = self._told()
        with self._lock:
            if told is not None:
                self._used = told + self._written - before
            self._asked = time.monotonic()
            self._took = self._asked - began

    def _told(self) -> int | None:
        try:
            return self._store.namespace_bytes(self._namespace)
        except StoreError:  # down: what it said last, and what was written here since, still counts
            return None


class CountedUsage(Usage):
    """What this process has written and not removed; some 150 B of memory for each object."""

    def __init__(self, store: Store) -> None:
        """Count from nothing: the store cannot say what lay there before."""
        self._store = store
        self._lock = threading.Lock()
        self._sizes: dict[ObjectKey, tuple[int, int]] = {}
        """Keys to bytes and the number of the write, those written first or looked at first in front."""
        self._used = 0
        self._reserved = 0
        self._writes = 0

    def reserve(self, key: ObjectKey, size: int, *, limit: int) -> bool:
        """See Usage; an object that is counted takes its own place."""
        with self._lock:
            counted, _ = self._sizes.get(key, (0, 0))
            fits = self._used - counted + self._reserved + size <= limit
            self._reserved += size * fits
            return fits

    def settle(self, key: ObjectKey, size: int, *, is_new: bool, is_stored: bool) -> None:
        """See Usage."""
        with self._lock:
            self._reserved -= size
            if is_stored and (is_new or key not in self._sizes):
                self._drop(key)
                self._writes += 1
                self._sizes[key] = size, self._writes
                self._used += size

    @property
    def writes(self) -> int:
        """See Usage."""
        return self._writes

    def forget(self, key: ObjectKey, *, since: int) -> None:
        """See Usage."""
        with self._lock:
            _, number = self._sizes.get(key, (0, 0))
            if number <= since:
                self._drop(key)

    def _drop(self, key: ObjectKey) -> None:
        size, _ = self._sizes.pop(key, (0, 0))
        self._used -= size

    def refresh(self, seconds: float) -> None:
        """See Usage; this one cannot."""

    def recount(self, *, everything: bool = False) -> None:
        """See Usage; some are a few thousand, those first that were not looked for for the longest time."""
        count = len(self._sizes) if everything else _KEYS_AT_ONCE
        for _ in range(0, count, _KEYS_AT_ONCE):
            self._look_for(_KEYS_AT_ONCE)

    def _look_for(self, count: int) -> None:
        with self._lock:
            asked = list(islice(self._sizes.items(), count))
        if not asked:
            return
        keys = [key for key, _ in asked]
        name = type(self._store).__name__
        found = checked_flags(name, "exists", self._store.exists(keys), len(keys))
        with self._lock:
            for (key, counted), is_there in zip(asked, found, strict=True):
                if self._sizes.get(key) != counted:
                    continue  # written or removed meanwhile
                if is_there:
                    self._sizes[key] = self._sizes.pop(key)
                else:
                    self._drop(key)
