"""Holds keep objects from eviction until they are released or expire, whoever forgets to release them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from kvlinker.description import IndexArray
from kvlinker.store import Hold
from kvlinker_file.ages import Ages
from kvlinker_file.marks import Marks

__all__ = ["FileHold", "HoldTable"]


class FileHold(Hold):
    """A hold on some rows; it knows no store, only how to end."""

    def __init__(self, present: tuple[bool, ...], release: Callable[[], None]) -> None:
        """Keep what was found; `release` must be idempotent."""
        self._present = present
        self._release = release

    @property
    def present(self) -> tuple[bool, ...]:
        """See Hold."""
        return self._present

    def release(self) -> None:
        """See Hold."""
        self._release()


class HoldTable:
    """This opener's holds by number and by expiry; the store's lock guards every call."""

    def __init__(self, marks: Marks, ages: Ages, clock: Callable[[], float]) -> None:
        """Make a table without holds; `clock` gives seconds."""
        self._marks = marks
        self._ages = ages
        self._clock = clock
        self._numbers = itertools.count()
        self._holds: dict[int, tuple[IndexArray, IndexArray]] = {}
        self._expiries: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, rows: IndexArray, seconds: float) -> int:
        """Hold rows and return the hold's number."""
        number = next(self._numbers)
        until = self._ages.deadline(seconds)
        self._holds[number] = (rows, self._marks.hold(rows, until=until))
        heapq.heappush(self._expiries, (self._clock() + seconds, number))
        return number

    def remove(self, number: int) -> None:
        """End a hold, if it has not ended."""
        hold = self._holds.pop(number, None)
        if hold is not None:
            self._marks.unhold(*hold)
        if len(self._expiries) > 2 * len(self._holds) + 64:
            self._expiries = [item for item in self._expiries if item[1] in self._holds]
            heapq.heapify(self._expiries)

    def expire(self) -> None:
        """End the holds whose time is over."""
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            self.remove(heapq.heappop(self._expiries)[1])
