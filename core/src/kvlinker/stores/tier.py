"""A tier is one of several stores: what it cannot do, another one may, so its errors are counted and answered for."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from kvlinker.errors import StoreError, StoreTimeoutError
from kvlinker.guard import Breaker
from kvlinker.store import Store

__all__ = ["EventCounts", "Tier"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class EventCounts:
    """Counters of events that any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, event: str, count: int = 1) -> None:
        """Count an event so many times; none is no event."""
        if count:
            with self._lock:
                self._counts[event] += count

    def snapshot(self) -> Mapping[str, int]:
        """Return the counts at this moment."""
        with self._lock:
            return dict(self._counts)


class Tier:
    """A store behind a breaker of its own: while it is down, the others are asked without it."""

    def __init__(
        self, name: str, store: Store, counts: EventCounts, *, pause_seconds: float
    ) -> None:
        """Keep a store.

        Args:
            name: in counters and messages.
            store: open.
            counts: where failures are counted, as `NAME_failed` and `NAME_skipped`.
            pause_seconds: how long the store is not asked once it is down.
        """
        self.name = name
        self.store = store
        self._counts = counts
        self._breaker = Breaker(pause_seconds=pause_seconds)
        self._is_failing = False

    def ask(self, call: Callable[[Store], _T], *, otherwise: _T) -> _T:
        """Return what the store answers, or `otherwise` where it is down or raises a StoreError.

        Anything else that it raises is the caller's: memory that was taken back, or a plugin at fault.
        """
        breaker = self._breaker
        if not breaker.allow():
            self._counts.add(f"{self.name}_skipped")
            return otherwise
        timeouts = breaker.timeouts
        try:
            answer = call(self.store)
        except StoreError as error:
            self._note(error)
            return otherwise
        breaker.succeed(timeouts=timeouts)
        self._is_failing = False
        return answer

    def _note(self, error: StoreError) -> None:
        if isinstance(error, StoreTimeoutError):
            self._breaker.trip()
        else:
            self._breaker.fail()
        self._counts.add(f"{self.name}_failed")
        if not self._is_failing:  # once, until it answers again
            logger.warning("kvlinker: tier %s: %s: %s", self.name, type(error).__name__, error)
        self._is_failing = True
