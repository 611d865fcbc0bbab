"""The index says where each object lies and which was used least recently: in memory, in columns.

A row is one object. It lives while its key finds it; afterwards it stays until nobody reads it and the
catalog has forgotten it, and only then may its slot be written again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.store import ObjectKey

__all__ = ["ABSENT", "NewObjects", "ObjectIndex"]

ABSENT = -1
_NO_KEY = b""
_ROW = np.dtype(
    [
        ("tick", np.int64),
        ("saved_tick", np.int64),
        ("segment", np.int32),
        ("slot", np.int32),
        ("kind", np.int32),
        ("layout", np.int32),
        ("pins", np.int32),
        ("holds", np.int32),
        ("generation", np.int32),
        ("lives", np.bool_),
        ("is_saved", np.bool_),
    ]
)
_SEGMENT = np.dtype([("objects", np.int64), ("busy", np.int64), ("ticks", np.float64)])
_FIRST_ROWS = 64
_QUEUE_SHARE = 8
"""An eighth of a kind's objects is sorted by age at a time."""
_MIN_QUEUE = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewObjects:
    """Objects that are whole and that the catalog names: one row each."""

    keys: Sequence[ObjectKey]
    segments: IndexArray
    slots: IndexArray
    kinds: IndexArray
    layouts: IndexArray
    ticks: IndexArray


class ObjectIndex:
    """Rows of objects; not locked, the store's lock guards every call."""

    def __init__(self) -> None:
        """Make an empty index."""
        self._rows: dict[ObjectKey, int] = {}
        self._keys: list[ObjectKey] = []
        self._free: list[int] = []
        self._leaving: list[int] = []
        self._queues: dict[int, deque[tuple[int, int]]] = {}
        self._last_tick = 0
        self._segments = np.zeros(_FIRST_ROWS, dtype=_SEGMENT)
        self._adopt(np.zeros(0, dtype=_ROW))

    def _adopt(self, table: NDArray[np.void]) -> None:
        """Keep a table, and its columns as views, because a field look-up costs more than the work on it."""
        self._table = table
        self._tick, self._saved_tick = table["tick"], table["saved_tick"]
        self._segment, self._slot = table["segment"], table["slot"]
        self._kind, self._layout = table["kind"], table["layout"]
        self._pins, self._holds = table["pins"], table["holds"]
        self._generation, self._lives = table["generation"], table["lives"]
        self._is_saved = table["is_saved"]

    def __len__(self) -> int:
        return len(self._rows)

    # ---- looking ------------------------------------------------------------------------------

    def contains(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Return which keys find an object."""
        rows = self._rows
        return tuple(key in rows for key in keys)

    def find(self, keys: Sequence[ObjectKey]) -> IndexArray:
        """Return the row of each key; ABSENT where there is none."""
        get = self._rows.get
        return np.fromiter((get(key, ABSENT) for key in keys), dtype=np.int64, count=len(keys))

    def keys(self) -> list[ObjectKey]:
        """Return all keys that find an object."""
        return list(self._rows)

    def key_of(self, row: int) -> ObjectKey:
        """Return the key of a row."""
        return self._keys[row]

    def segments_of(self, rows: IndexArray) -> IndexArray:
        """Return the segment number of each row."""
        return self._segment[rows].astype(np.int64)

    def slots_of(self, rows: IndexArray) -> IndexArray:
        """Return the slot of each row."""
        return self._slot[rows].astype(np.int64)

    def matches(self, rows: IndexArray, *, kinds: Sequence[int], layout: int) -> NDArray[np.bool_]:
        """Return which rows, ABSENT ones among them, are of one of the kinds and of the layout."""
        fits = rows != ABSENT
        found = rows[fits]
        fits[fits] = np.isin(self._kind[found], kinds) & (self._layout[found] == layout)
        return np.asarray(fits, dtype=np.bool_)

    def living(self, rows: IndexArray) -> IndexArray:
        """Return those of the rows, each once, whose key still finds them."""
        distinct = np.unique(rows)
        return np.asarray(distinct[self._lives[distinct]], dtype=np.int64)

    def rows_in(self, segment: int) -> IndexArray:
        """Return the rows of the living objects of a segment."""
        return np.flatnonzero(self._lives & (self._segment == segment))

    def rows_of_layout(self, layout: int) -> IndexArray:
        """Return the rows of the living objects of a layout."""
        return np.flatnonzero(self._lives & (self._layout == layout))

    def rows_older_than(self, tick: int) -> IndexArray:
        """Return the rows of the living objects that were used before a tick, oldest first."""
        rows = np.flatnonzero(self._lives & (self._tick < tick))
        return rows[np.argsort(self._tick[rows])]

    def ticks_of(self, rows: IndexArray) -> IndexArray:
        """Return when each row was used."""
        return self._tick[rows]

    # ---- use ----------------------------------------------------------------------------------

    def next_ticks(self, count: int) -> IndexArray:
        """Return microseconds of the clock, descending, later than all before: a prefix loses its end first.

        A clock that was set back does not disturb the order.
        """
        first = max(self._last_tick + 1, time.time_ns() // 1000)
        self._last_tick = first + count - 1
        return np.arange(first, first + count, dtype=np.int64)[::-1]

    def touch(self, rows: IndexArray) -> None:
        """Note that objects were used."""
        distinct, first = np.unique(rows, return_index=True)
        order = distinct[np.argsort(first)]
        ticks = self.next_ticks(len(order))
        change = (ticks - self._tick[order]).astype(np.float64)
        np.add.at(self._segments["ticks"], self._segment[order], change)
        self._tick[order] = ticks

    def pin(self, rows: IndexArray) -> None:
        """Keep rows, dead or alive, with their bytes."""
        np.add.at(self._pins, rows, 1)
        np.add.at(self._segments["busy"], self._segment[rows], 1)

    def unpin(self, rows: IndexArray) -> None:
        """Take back a pin on each row."""
        np.add.at(self._pins, rows, -1)
        np.add.at(self._segments["busy"], self._segment[rows], -1)

    def hold(self, rows: IndexArray) -> IndexArray:
        """Keep objects from eviction; return the generations that `unhold` needs."""
        np.add.at(self._holds, rows, 1)
        np.add.at(self._segments["busy"], self._segment[rows], 1)
        return self._generation[rows].astype(np.int64)

    def unhold(self, rows: IndexArray, generations: IndexArray) -> None:
        """Take back a hold on each row that is still the same object."""
        same = rows[self._generation[rows] == generations]
        np.add.at(self._holds, same, -1)
        np.add.at(self._segments["busy"], self._segment[same], -1)

    # ---- coming and going ---------------------------------------------------------------------

    def add(self, new: NewObjects) -> IndexArray:
        """Make objects visible under their keys, which find nothing yet; return their rows."""
        count = len(new.keys)
        self._reserve(count)
        rows = np.array(self._free[len(self._free) - count :], dtype=np.int64)
        del self._free[len(self._free) - count :]
        self._segment[rows], self._slot[rows] = new.segments, new.slots
        self._kind[rows], self._layout[rows] = new.kinds, new.layouts
        self._tick[rows] = self._saved_tick[rows] = new.ticks
        self._pins[rows] = self._holds[rows] = 0
        self._lives[rows] = self._is_saved[rows] = True
        for key, row in zip(new.keys, rows.tolist(), strict=True):
            self._rows[key] = row
            self._keys[row] = key
        self._fit_segments(int(new.segments.max(initial=0)))
        self._count(rows, 1)
        self._last_tick = max(self._last_tick, int(new.ticks.max(initial=0)))
        return rows

    def _reserve(self, count: int) -> None:
        if len(self._free) >= count:
            return
        old = len(self._table)
        size = max(_FIRST_ROWS, 2 * old, old + count)
        table = np.zeros(size, dtype=_ROW)
        table[:old] = self._table
        self._adopt(table)
        self._keys.extend([_NO_KEY] * (size - old))
        self._free = [*range(size - 1, old - 1, -1), *self._free]

    def _fit_segments(self, number: int) -> None:
        if number >= len(self._segments):
            table = np.zeros(2 * number, dtype=_SEGMENT)
            table[: len(self._segments)] = self._segments
            self._segments = table

    def remove(self, rows: IndexArray) -> None:
        """Let keys find objects no longer; their slots stay taken until `settle` gives them."""
        for row in rows.tolist():
            del self._rows[self._keys[row]]
        np.add.at(self._segments["busy"], self._segment[rows], -self._holds[rows].astype(np.int64))
        self._count(rows, -1)
        self._holds[rows] = 0
        self._generation[rows] += 1
        self._lives[rows] = False
        self._leaving.extend(rows.tolist())

    def restore(self, rows: IndexArray) -> None:
        """Let keys find removed objects again that the catalog still names, where nothing came in their place."""
        left = set(self._leaving).intersection(rows.tolist())
        back = [row for row in left if self._is_saved[row] and self._keys[row] not in self._rows]
        self._leaving = [row for row in self._leaving if row not in back]
        for row in back:
            self._rows[self._keys[row]] = row
        found = np.array(back, dtype=np.int64)
        self._lives[found] = True
        self._count(found, 1)

    def _count(self, rows: IndexArray, sign: int) -> None:
        """Add rows to the figures of their segments, or take them off."""
        segments = self._segment[rows]
        np.add.at(self._segments["objects"], segments, sign)
        np.add.at(self._segments["ticks"], segments, sign * self._tick[rows].astype(np.float64))

    def leaving(self) -> IndexArray:
        """Return the removed rows that the catalog still names."""
        rows = np.array(self._leaving, dtype=np.int64)
        return np.asarray(rows[self._is_saved[rows]], dtype=np.int64)

    def forget(self, rows: IndexArray) -> None:
        """Note that the catalog names these removed rows no longer."""
        self._is_saved[rows] = False

    def settle(self) -> tuple[IndexArray, IndexArray]:
        """Free the removed rows that nobody reads and nothing names; return their segments and slots."""
        rows = np.array(self._leaving, dtype=np.int64)
        stays = self._is_saved[rows] | (self._pins[rows] > 0)
        self._leaving = rows[stays].tolist()
        done = rows[~stays]
        for row in done.tolist():
            self._keys[row] = _NO_KEY
            self._free.append(row)
        return self.segments_of(done), self.slots_of(done)

    # ---- age ----------------------------------------------------------------------------------

    def evict(self, kind: int, count: int) -> IndexArray:
        """Remove up to so many of a kind's least recently used objects; held and read ones stay."""
        victims: list[int] = []
        for _ in range(2):
            queue = self._queues.setdefault(kind, deque())
            while queue and len(victims) < count:
                row, tick = queue.popleft()
                if self._is_evictable(row, tick, kind):
                    victims.append(row)
            if len(victims) == count:
                break
            self._sort_oldest(kind, count, without=victims)
        rows = np.array(victims, dtype=np.int64)
        self.remove(rows)
        return rows

    def oldest_tick(self, kind: int) -> int | None:
        """Return when the object was used that `evict` would take first."""
        for _ in range(2):
            queue = self._queues.setdefault(kind, deque())
            while queue:
                if self._is_evictable(*queue[0], kind):
                    return queue[0][1]
                queue.popleft()
            self._sort_oldest(kind, 1, without=())
        return None

    def _is_evictable(self, row: int, tick: int, kind: int) -> bool:
        return bool(
            self._lives[row]
            and self._tick[row] == tick
            and self._kind[row] == kind
            and not self._pins[row]
            and not self._holds[row]
        )

    def _evictable_rows(self, kind: int) -> IndexArray:
        idle = self._lives & (self._pins == 0) & (self._holds == 0)
        return np.flatnonzero(idle & (self._kind == kind))

    def _sort_oldest(self, kind: int, count: int, *, without: Sequence[int]) -> None:
        rows = np.setdiff1d(self._evictable_rows(kind), np.array(without, dtype=np.int64))
        size = max(_MIN_QUEUE, 2 * count, len(rows) // _QUEUE_SHARE)
        if size < len(rows):
            rows = rows[np.argpartition(self._tick[rows], size)[:size]]
        rows = rows[np.argsort(self._tick[rows])]
        pairs = zip(rows.tolist(), self._tick[rows].tolist(), strict=True)
        self._queues[kind] = deque(pairs)

    def evictable(self, kind: int) -> int:
        """Return how many objects of a kind `evict` could remove."""
        return len(self._evictable_rows(kind))

    def objects_in(self, segment: int) -> int:
        """Return how many objects live in a segment."""
        return int(self._segments["objects"][segment]) if segment < len(self._segments) else 0

    def is_busy(self, segment: int) -> bool:
        """Return whether something in a segment is held or read."""
        return segment < len(self._segments) and bool(self._segments["busy"][segment])

    def mean_tick(self, segment: int) -> float:
        """Return when the objects of a segment were used on average; 0 for none."""
        count = self.objects_in(segment)
        return float(self._segments["ticks"][segment]) / count if count else 0.0

    # ---- saving -------------------------------------------------------------------------------

    def unsaved_use(self, limit: int) -> IndexArray:
        """Return up to so many rows whose time of use the catalog does not know, by place."""
        rows = np.flatnonzero(self._lives & (self._tick != self._saved_tick))
        order = np.lexsort((self._slot[rows], self._segment[rows]))
        return rows[order[:limit]]

    def note_saved(self, rows: IndexArray, ticks: IndexArray) -> None:
        """Note the times of use that the catalog knows now."""
        self._saved_tick[rows] = ticks
