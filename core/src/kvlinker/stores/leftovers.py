"""Leftovers are names of objects that nobody looks for any more once their period is over; they are removed behind."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvlinker.errors import KVLinkerError
from kvlinker.event_counts import EventCounts
from kvlinker.lanes import Lane
from kvlinker.store import ObjectKey, Store

__all__ = ["Leftovers"]

_MAX_NAMES = 1 << 20
"""Names take about 100 B each; of more, those that come later are left to the store's own eviction."""
_NAMES_AT_ONCE = 1024
_CALL_SECONDS = 60.0
_CLOSE_SECONDS = 10.0


class Leftovers:
    """Names by period, and the thread that removes them."""

    def __init__(self, store: Store, counts: EventCounts) -> None:
        """Remember nothing yet.

        Args:
            store: which the objects are in.
            counts: where removed objects are counted, as `expired`, and failed removals, as `expiry_failed`.
        """
        self._store, self._counts = store, counts
        self._lock = threading.Lock()
        self._names: dict[int, set[ObjectKey]] = {}
        self._lane = Lane("expiry", task_seconds=_CALL_SECONDS)

    def note(self, period: int, names: Sequence[ObjectKey]) -> None:
        """Remember names whose objects were written in a period."""
        with self._lock:
            if sum(map(len, self._names.values())) + len(names) <= _MAX_NAMES:
                self._names.setdefault(period, set()).update(names)

    def remove_before(self, period: int) -> None:
        """Let objects of earlier periods be removed, by and by."""
        with self._lock:
            over = [number for number in self._names if number < period]
            names = [name for number in over for name in self._names.pop(number)]
        for first in range(0, len(names), _NAMES_AT_ONCE):
            self._submit(names[first : first + _NAMES_AT_ONCE])

    def _submit(self, names: Sequence[ObjectKey]) -> None:
        self._lane.submit(lambda: self._remove(names))

    def _remove(self, names: Sequence[ObjectKey]) -> None:
        try:
            removed = self._store.delete(names)
        except KVLinkerError:  # down: the store's own eviction is left
            self._counts.add("expiry_failed", len(names))
        else:
            self._counts.add("expired", sum(removed))

    def wait(self, seconds: float) -> bool:
        """Wait until everything is removed that was to be; False when the time is over first."""
        return self._lane.submit(lambda: None).wait(seconds)

    def close(self) -> None:
        """Remove nothing more."""
        self._lane.close(_CLOSE_SECONDS)
