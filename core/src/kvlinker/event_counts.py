"""Event counts are what `stats` of a store says that happened since it was opened; any thread may count."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

__all__ = ["EventCounts"]


class EventCounts:
    """Counters of events that any thread may count."""

    def __init__(self, events: Iterable[str] = ()) -> None:
        """Count these events, and others from the first one on.

        Args:
            events: are 0 from the start, so that a rate shows the first of a kind too.
        """
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(events, 0))

    def add(self, event: str, count: int = 1) -> None:
        """Count an event so many times; none is no event."""
        if count:
            with self._lock:
                self._counts[event] += count

    def snapshot(self) -> Mapping[str, int]:
        """Return the counts at this moment."""
        with self._lock:
            return dict(self._counts)
