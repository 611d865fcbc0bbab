"""Ages say which objects were used least recently: those are evicted first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvlinker.description import IndexArray
from kvlinker_file.buckets import distinct
from kvlinker_file.index import ObjectIndex
from kvlinker_file.marks import Marks
from kvlinker_file.segments import Segment, SlotKind
from kvlinker_file.space import SlabSpace
from kvlinker_file.table_layout import RowState, Word
from kvlinker_file.tables import SharedTables

__all__ = ["Ages", "now_micros"]

_QUEUE_SHARE = 8
"""An eighth of a kind's objects is sorted by age at a time."""
_MIN_QUEUE = 256
_DECADE_MICROS = 10 * 365 * 86_400_000_000
_NANOS = 1_000_000_000
_LATEST = float(1 << 62)
"""Nanoseconds of the latest end that a row can say: 146 years after the machine started."""


def now_micros() -> int:
    """Return the microseconds that times of use are measured in."""
    return time.time_ns() // 1000


class Ages:
    """Times of use, and who goes next; not locked, the store's lock guards every call."""

    def __init__(
        self,
        tables: SharedTables,
        space: SlabSpace,
        index: ObjectIndex,
        marks: Marks,
        clock: Callable[[], float],
    ) -> None:
        """Take the shared tables; `clock` gives the seconds that holds end by."""
        self._tables = tables
        self._space = space
        self._index = index
        self._marks = marks
        self._clock = clock
        self._queues: dict[SlotKind, deque[tuple[int, int]]] = {}

    def deadline(self, seconds: float) -> int:
        """Return when something ends that lasts so long: nanoseconds of the openers' clock."""
        return int(min((self._clock() + seconds) * _NANOS, _LATEST))

    # ---- use ----------------------------------------------------------------------------------

    def next_ticks(self, count: int) -> IndexArray:
        """Return microseconds of the clock, descending, later than all before: a prefix loses its end first.

        A clock that was set back does not disturb the order.
        """
        words, now = self._tables.words, now_micros()
        last = int(words[Word.LAST_TICK])
        first = (
            max(last + 1, now) if last < now + _DECADE_MICROS else now
        )  # no clock was ever there
        words[Word.LAST_TICK] = first + count - 1
        return np.arange(first, first + count, dtype=np.int64)[::-1]

    def touch(self, rows: IndexArray) -> None:
        """Note that objects were used."""
        order = distinct(rows)
        if len(order) == len(rows):
            order = rows
        else:
            names, first = np.unique(rows, return_index=True)
            order = names[np.argsort(first)]
        ticks, table = self.next_ticks(len(order)), self._tables.rows
        self._space.count_ticks(order, ticks - table.tick[order])
        table.tick[order] = ticks

    def older_than(self, tick: int) -> IndexArray:
        """Return the rows of the objects that were used before a tick, oldest first."""
        rows, ticks = self._index.all_rows(), self._tables.rows.tick
        rows = rows[ticks[rows] < tick]
        return rows[np.argsort(ticks[rows])]

    def of(self, rows: IndexArray) -> IndexArray:
        """Return when each row was used."""
        return self._tables.rows.tick[rows]

    # ---- eviction -----------------------------------------------------------------------------

    def evict(self, kind: SlotKind, count: int) -> IndexArray:
        """Remove up to so many of a kind's least recently used objects; held and read ones stay."""
        victims: list[int] = []
        now = self.deadline(0)
        for _ in range(2):
            queue = self._queues.setdefault(kind, deque())
            while queue and len(victims) < count:
                self._take_some(queue, victims, count, now)
            if len(victims) == count:
                break
            self._sort_oldest(kind, count, without=victims)
        rows = np.array(victims, dtype=np.int64)
        self._index.remove(rows)
        return rows

    def _take_some(
        self, queue: deque[tuple[int, int]], victims: list[int], count: int, now: int
    ) -> None:
        pairs = [queue.popleft() for _ in range(min(len(queue), count - len(victims)))]
        rows, ticks = np.array(pairs, dtype=np.int64).T
        good = (self._tables.rows.tick[rows] == ticks) & self._marks.is_evictable(rows, now=now)
        victims.extend(rows[good].tolist())

    def oldest_tick(self, kind: SlotKind) -> int | None:
        """Return when the object was used that `evict` would take first."""
        now, table = self.deadline(0), self._tables.rows
        for _ in range(2):
            queue = self._queues.setdefault(kind, deque())
            while queue:
                row, tick = queue[0]
                alone = np.array([row], dtype=np.int64)
                if table.tick[row] == tick and self._marks.is_evictable(alone, now=now)[0]:
                    return tick
                queue.popleft()
            self._sort_oldest(kind, 1, without=())
        return None

    def _evictable_rows(self, kind: SlotKind) -> IndexArray:
        now = self.deadline(0)
        found = [
            segment.first_row + np.flatnonzero(self._marks.is_evictable(segment.rows, now=now))
            for segment in self._space.of_kind(kind)
        ]
        return np.concatenate([np.empty(0, dtype=np.int64), *found])

    def evictable_in(self, segment: Segment) -> int:
        """Return how many objects of a segment nobody holds or reads."""
        return int(self._marks.is_evictable(segment.rows, now=self.deadline(0)).sum())

    def _sort_oldest(self, kind: SlotKind, count: int, *, without: Sequence[int]) -> None:
        rows = np.setdiff1d(self._evictable_rows(kind), np.array(without, dtype=np.int64))
        size, ticks = max(_MIN_QUEUE, 2 * count, len(rows) // _QUEUE_SHARE), self._tables.rows.tick
        if size < len(rows):
            rows = rows[np.argpartition(ticks[rows], size)[:size]]
        rows = rows[np.argsort(ticks[rows])]
        self._queues[kind] = deque(zip(rows.tolist(), ticks[rows].tolist(), strict=True))

    def has_evictable(self, kind: SlotKind, count: int) -> int:
        """Return how many objects of a kind `evict` could remove, at least; all of them if those are not enough."""
        sure = sum(
            max(0, self._space.counted(segment, "objects") - self._space.counted(segment, "busy"))
            for segment in self._space.of_kind(kind)
        )
        return sure if sure >= count else len(self._evictable_rows(kind))

    # ---- saving -------------------------------------------------------------------------------

    def unsaved_use(self, limit: int) -> IndexArray:
        """Return up to so many rows whose time of use the catalog does not know, segment by segment."""
        table = self._tables.rows
        found, left = [np.empty(0, dtype=np.int64)], limit
        for segment in self._space:
            is_other = table.tick[segment.rows] != table.saved_tick[segment.rows]
            is_living = table.state[segment.rows] == RowState.LIVING
            chosen = segment.first_row + np.flatnonzero(is_other & is_living)[:left]
            found.append(chosen)
            left -= len(chosen)
            if not left:
                break
        return np.concatenate(found)

    def note_saved(self, rows: IndexArray, ticks: IndexArray) -> None:
        """Note the times of use that the catalog knows now."""
        self._tables.rows.saved_tick[rows] = ticks
