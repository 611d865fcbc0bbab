"""Marks keep rows: a pin keeps a slot's bytes for a reader, a hold keeps an object from eviction.

A row has one bit for each seat; how often this opener pinned or held it is counted here, and the bit is
set while the count is not zero. The bits of a seat whose opener died are cleared by the next one who looks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker_file.buckets import distinct
from kvlinker_file.space import SlabSpace
from kvlinker_file.table_layout import RowState
from kvlinker_file.tables import SharedTables

__all__ = ["Marks"]

_NONE = np.uint64(0)


class Marks:
    """Pins and holds of one opener; not locked, the store's lock guards every call."""

    def __init__(self, tables: SharedTables, space: SlabSpace, *, seat: int) -> None:
        """Make marks of a seat that has none."""
        self._tables = tables
        self._space = space
        self.bit = np.uint64(1 << seat)
        self._pins: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._holds: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._held_generation: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)

    def fit(self) -> None:
        """Count as many rows as there are."""
        count = len(self._tables.rows)
        if count > len(self._pins):
            missing = (0, count - len(self._pins))
            self._pins = np.pad(self._pins, missing)
            self._holds = np.pad(self._holds, missing)
            self._held_generation = np.pad(self._held_generation, missing)

    def pin(self, rows: IndexArray) -> None:
        """Keep rows, dead or alive, with their bytes."""
        np.add.at(self._pins, rows, 1)
        self._mark(distinct(rows), self._tables.rows.pins)

    def unpin(self, rows: IndexArray) -> IndexArray:
        """Take back a pin on each row; return those that nobody pins any more."""
        np.add.at(self._pins, rows, -1)
        once = distinct(rows)
        gone = once[self._pins[once] == 0]
        pins = self._tables.rows.pins
        self._unmark(gone, pins)
        return np.asarray(gone[pins[gone] == _NONE], dtype=np.int64)

    def hold(self, rows: IndexArray, *, until: int) -> IndexArray:
        """Keep objects from eviction; return the generations that `unhold` needs.

        Args:
            rows: of living objects.
            until: when the hold ends whoever forgets it, in nanoseconds of the openers' clock.
        """
        table, once = self._tables.rows, distinct(rows)
        generations = table.generation[once]
        self._holds[once[self._held_generation[once] != generations]] = 0
        self._held_generation[once] = generations
        np.add.at(self._holds, rows, 1)
        before = np.where(table.holds[once] == _NONE, 0, table.held_until[once])
        table.held_until[once] = np.maximum(before, until)
        self._mark(once, table.holds)
        return table.generation[rows].astype(np.int64)

    def unhold(self, rows: IndexArray, generations: IndexArray) -> None:
        """Take back a hold on each row that is still the same object."""
        table = self._tables.rows
        same = rows[(table.generation[rows] == generations) & (self._holds[rows] > 0)]
        np.add.at(self._holds, same, -1)
        once = distinct(same)
        self._unmark(once[self._holds[once] <= 0], table.holds)

    def end_holds(self, rows: IndexArray) -> None:
        """End everybody's holds on distinct rows whose object goes."""
        table = self._tables.rows
        was_busy = (table.holds[rows] != _NONE) & (table.pins[rows] == _NONE)
        self._space.count(rows[was_busy], busy=-1)
        table.holds[rows] = 0
        table.generation[rows] += np.uint32(1)

    def _mark(self, once: IndexArray, column: NDArray[np.uint64]) -> None:
        was_idle = self._is_idle(once)
        column[once] |= self.bit
        self._space.count(once[was_idle], busy=1)

    def _unmark(self, once: IndexArray, column: NDArray[np.uint64]) -> None:
        column[once] &= ~self.bit
        self._space.count(once[self._is_idle(once)], busy=-1)

    def _is_idle(self, rows: IndexArray) -> NDArray[np.bool_]:
        table = self._tables.rows
        return np.asarray((table.pins[rows] | table.holds[rows]) == _NONE, dtype=np.bool_)

    def is_evictable(self, rows: IndexArray | slice, *, now: int) -> NDArray[np.bool_]:
        """Return which rows are objects that nobody pins, and nobody holds now."""
        table = self._tables.rows
        is_held = (table.holds[rows] != _NONE) & (table.held_until[rows] > now)
        is_living = table.state[rows] == RowState.LIVING
        return np.asarray(is_living & ~is_held & (table.pins[rows] == _NONE), dtype=np.bool_)
