"""Pins keep objects from eviction for as long as their process lives, by leases that are renewed in time."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence

from kvlinker.event_counts import EventCounts
from kvlinker.guard import checked_hold
from kvlinker.store import Hold, ObjectKey, Store

__all__ = ["Pins"]

logger = logging.getLogger(__name__)

_KEYS_AT_ONCE = 4096
_RENEWALS = 3
"""Times that a lease is renewed before it would end."""
_CLOSE_SECONDS = 10.0


class Pins:
    """Objects that are held in a store, and their bytes."""

    def __init__(
        self, store: Store, counts: EventCounts, *, max_bytes: int, lease_seconds: float
    ) -> None:
        """Hold nothing yet; the thread that renews begins with the first pin.

        Args:
            store: with leases.
            counts: `pinned`, `unpinned`, `pin_refused` for want of room, `pin_failed` and `pin_lost` objects.
            max_bytes: of all objects together.
            lease_seconds: how long they are held once this process is gone.
        """
        self._store, self._counts = store, counts
        self._max_bytes, self._lease_seconds = max_bytes, lease_seconds
        self._lock = threading.Lock()
        self._sizes: dict[ObjectKey, int] = {}
        self._bytes = 0
        """Of what is pinned, and of what is about to be."""
        self._holds: list[Hold] = []
        self._is_failing = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._ended.set).atexit = False

    @property
    def used_bytes(self) -> int:
        """Bytes that are pinned."""
        return self._bytes

    def unknown(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Return those of the keys that are not pinned, each once."""
        with self._lock:
            return [key for key in dict.fromkeys(keys) if key not in self._sizes]

    def add(self, keys: Sequence[ObjectKey], size: int) -> int:
        """Pin objects of so many bytes each as far as there is room and the store has them; return how many."""
        wanted = self.unknown(keys)
        with self._lock:
            room = max(0, self._max_bytes - self._bytes) // max(1, size)
            chosen = wanted[:room]
            self._bytes += size * len(chosen)
        self._counts.add("pin_refused", len(wanted) - len(chosen))
        held: Sequence[ObjectKey] = ()
        try:
            if chosen and not self._ended.is_set():
                held = self._hold(chosen, size)
        except Exception as error:  # noqa: BLE001  # a read or write goes on, whatever a plugin raises at a pin
            self._fail(error, len(chosen))
        with self._lock:
            self._bytes -= size * (len(chosen) - len(held))
        self._counts.add("pinned", len(held))
        return len(held)

    def _hold(self, keys: Sequence[ObjectKey], size: int) -> Sequence[ObjectKey]:
        """Hold objects and note which there are, but for what somebody else has pinned meanwhile."""
        hold = self._store.hold(keys, seconds=self._lease_seconds)
        present = checked_hold(type(self._store).__name__, hold, len(keys))
        self._is_failing = False
        with self._lock:
            found = zip(keys, present, strict=True)
            held = [key for key, is_there in found if is_there and key not in self._sizes]
            is_open = not self._ended.is_set()
            if is_open:
                self._sizes.update(dict.fromkeys(held, size))
                self._holds.append(hold)
                self._thread = self._thread or self._start()
        if not is_open:
            hold.release()
        return held if is_open else ()

    def _fail(self, error: Exception, count: int) -> None:
        """Count objects that cannot be held now; they are tried again when they are used, or with the next renewal."""
        self._counts.add("pin_failed", count)
        if not self._is_failing:  # once, until the store holds again
            name = type(self._store).__name__
            logger.warning("kvlinker: pins in %s: %s: %s", name, type(error).__name__, error)
        self._is_failing = True

    def _start(self) -> threading.Thread:
        pause = self._lease_seconds / _RENEWALS
        arguments = (weakref.ref(self), self._ended, pause)
        thread = threading.Thread(
            target=_renew_until, args=arguments, name="kvlinker-pins", daemon=True
        )
        thread.start()
        return thread

    def drop(self, keys: Sequence[ObjectKey]) -> int:
        """Let go of objects with the next renewal; return how many were pinned."""
        with self._lock:
            dropped = sum(self._drop(key) for key in keys)
        self._counts.add("unpinned", dropped)
        return dropped

    def drop_namespace(self, namespace: bytes) -> None:
        """Let go of a namespace's objects with the next renewal."""
        with self._lock:
            keys = [key for key in self._sizes if key.startswith(namespace)]
        self.drop(keys)

    def _drop(self, key: ObjectKey) -> bool:
        size = self._sizes.pop(key, None)
        self._bytes -= size or 0
        return size is not None

    def renew(self) -> None:
        """Hold everything anew, and let go of the leases before; what is not there any more is lost."""
        with self._lock:
            keys, before = list(self._sizes), self._holds
            self._holds = []
        try:
            for first in range(0, len(keys), _KEYS_AT_ONCE):
                self._hold_again(keys[first : first + _KEYS_AT_ONCE])
        except Exception as error:  # noqa: BLE001  # the thread must live on, whatever a plugin raises
            self._fail(error, len(keys))
            with self._lock:
                self._holds += before
            return
        self._release(before)

    def _hold_again(self, keys: Sequence[ObjectKey]) -> None:
        hold = self._store.hold(keys, seconds=self._lease_seconds)
        present = checked_hold(type(self._store).__name__, hold, len(keys))
        self._is_failing = False
        with self._lock:
            self._holds.append(hold)
            found = zip(keys, present, strict=True)
            lost = sum(self._drop(key) for key, is_there in found if not is_there)
        self._counts.add("pin_lost", lost)

    def _release(self, holds: Sequence[Hold]) -> None:
        for hold in holds:
            try:
                hold.release()
            except Exception as error:  # noqa: BLE001  # the others are let go of all the same; this one expires
                self._fail(error, 1)

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        self._ended.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)  # it may be about to hold everything anew
        with self._lock:
            holds, self._holds = self._holds, []
            for key in list(self._sizes):  # and not what is being pinned: that is given back there
                self._drop(key)
        self._release(holds)


def _renew_until(pins: weakref.ref[Pins], ended: threading.Event, pause: float) -> None:
    """Renew every so many seconds; ends also when nobody refers to the pins any more."""
    while not ended.wait(pause):
        own = pins()
        if own is None:
            return
        own.renew()
        del own
