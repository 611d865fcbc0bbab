"""The index says which objects there are and in which slots: the shared rows, as one opener works with them.

A row is one slot. Its object lives while its key finds it; afterwards the row stays until nobody reads it
and the catalog has forgotten it, and only then may its slot be written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.keys import OBJECT_KEY_BYTES
from kvlinker.store import ObjectKey
from kvlinker_file.buckets import ABSENT, distinct, find_rows, insert_rows, key_words, remove_rows
from kvlinker_file.marks import Marks
from kvlinker_file.segments import Segment, SlotKind
from kvlinker_file.space import SlabSpace, Taken
from kvlinker_file.table_layout import RowState, Word
from kvlinker_file.tables import SharedTables

__all__ = ["ABSENT", "NewObjects", "ObjectIndex"]

_SCAN = 4096
"""Rows that are looked at for free slots at a time."""
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewObjects:
    """Objects that are whole and that the catalog names: one taken row each."""

    keys: Sequence[ObjectKey]
    rows: IndexArray
    layouts: IndexArray
    ticks: IndexArray


class ObjectIndex:
    """Rows of objects; not locked, the store's lock guards every call but `contains`."""

    def __init__(self, tables: SharedTables, space: SlabSpace, marks: Marks) -> None:
        """Take the shared tables."""
        self._tables = tables
        self._space = space
        self._marks = marks
        self._leaving: list[int] = []
        """Rows that this opener removed, and those of openers that died."""
        self._cursors: dict[int, tuple[int, int]] = {}
        """By number of a segment: its incarnation, and where to look for free slots of that."""

    def __len__(self) -> int:
        return int(self._tables.words[Word.OBJECTS])

    # ---- looking ------------------------------------------------------------------------------

    def contains(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...] | None:
        """Return which keys find an object, without any lock; None while somebody changes the tables."""
        words = self._tables.words
        for _ in range(_TRIES):
            before = int(words[Word.TABLES_MARK])
            if before % 2 or not self._tables.is_current:
                continue
            found = self.find(keys) != ABSENT
            if int(words[Word.TABLES_MARK]) == before:
                return tuple(found.tolist())
        return None

    def find(self, keys: Sequence[ObjectKey]) -> IndexArray:
        """Return the row of each key; ABSENT where there is none."""
        if set(map(len, keys)) <= {OBJECT_KEY_BYTES}:
            return self._find(keys)
        rows = np.full(len(keys), ABSENT, dtype=np.int64)
        good = [i for i, key in enumerate(keys) if len(key) == OBJECT_KEY_BYTES]
        rows[good] = self._find([keys[i] for i in good])
        return rows

    def _find(self, keys: Sequence[ObjectKey]) -> IndexArray:
        table = self._tables.rows
        rows = find_rows(self._tables.buckets, table.key, key_words(keys))
        if not len(table):
            return rows
        rows[table.state[rows] != RowState.LIVING] = ABSENT
        return rows

    def keys_of(self, rows: IndexArray) -> list[ObjectKey]:
        """Return the keys of rows."""
        raw = self._tables.rows.key[rows].tobytes()
        return [
            raw[start : start + OBJECT_KEY_BYTES] for start in range(0, len(raw), OBJECT_KEY_BYTES)
        ]

    def matches(self, rows: IndexArray, *, payload_bytes: int, layout: int) -> NDArray[np.bool_]:
        """Return which rows, ABSENT ones among them, are of one length and of the layout."""
        fits = rows != ABSENT
        found = rows[fits]
        is_long = self._space.payloads_of(found) == payload_bytes
        fits[fits] = is_long & (self._tables.rows.layout[found] == layout)
        return np.asarray(fits, dtype=np.bool_)

    def living(self, rows: IndexArray) -> IndexArray:
        """Return those of the rows, each once, whose key still finds them."""
        once = distinct(rows)
        is_living = self._tables.rows.state[once] == RowState.LIVING
        return np.asarray(once[is_living], dtype=np.int64)

    def rows_in(self, segment: Segment) -> IndexArray:
        """Return the rows of the living objects of a segment."""
        states = self._tables.rows.state[segment.rows]
        return segment.first_row + np.flatnonzero(states == RowState.LIVING)

    def all_rows(self) -> IndexArray:
        """Return the rows of all living objects."""
        return np.concatenate([np.empty(0, dtype=np.int64), *map(self.rows_in, self._space)])

    def payload_bytes_of(self, namespace: bytes) -> int:
        """Return the payload bytes of the living objects whose keys begin with a namespace."""
        rows = self.all_rows()
        keys = self._tables.rows.key[rows].view(np.uint8).reshape(len(rows), OBJECT_KEY_BYTES)
        is_own = (keys[:, : len(namespace)] == np.frombuffer(namespace, np.uint8)).all(axis=1)
        return int(self._space.payloads_of(rows[is_own]).sum())

    # ---- slots --------------------------------------------------------------------------------

    def take(self, kind: SlotKind, count: int) -> list[Taken]:
        """Take up to so many free slots of a kind."""
        found = []
        for segment in self._space.with_free_slots(kind):
            slots = self._take_from(segment, count)
            if len(slots):
                found.append(Taken(segment=segment, slots=slots))
                count -= len(slots)
            if not count:
                break
        return found

    def _take_from(self, segment: Segment, count: int) -> IndexArray:
        free = segment.slots - self._space.counted(segment, "used")
        slots = self._free_slots(segment, min(free, count))
        rows, table = segment.first_row + slots, self._tables.rows
        table.pins[rows] = self._marks.bit
        table.holds[rows] = 0
        table.is_saved[rows] = False
        table.state[rows] = RowState.TAKEN
        self._space.count(rows, used=1)
        return slots

    def _free_slots(self, segment: Segment, count: int) -> IndexArray:
        """Return free slots from where the last search ended, around the segment's end."""
        states = self._tables.rows.state[segment.rows]
        start = self._cursor(segment)
        found: list[IndexArray] = []
        for at in (*range(start, segment.slots, _SCAN), *range(0, start, _SCAN)):
            end = min(at + _SCAN, segment.slots if at >= start else start)
            free = at + np.flatnonzero(states[at:end] == RowState.FREE)[:count]
            found.append(free)
            count -= len(free)
            if not count:
                self._set_cursor(segment, int(free[-1]) + 1 if len(free) else start)
                break
        return np.concatenate([np.empty(0, dtype=np.int64), *found])

    def _cursor(self, segment: Segment) -> int:
        incarnation, start = self._cursors.get(segment.number, (0, 0))
        return start if incarnation == segment.incarnation else 0

    def _set_cursor(self, segment: Segment, start: int) -> None:
        self._cursors[segment.number] = (segment.incarnation, start)

    def give(self, taken: Sequence[Taken]) -> None:
        """Give back slots that never held a visible object."""
        for part in taken:
            self.free(part.rows[self._is_mine(part.rows)])

    def _is_mine(self, rows: IndexArray) -> NDArray[np.bool_]:
        """Return which rows this opener took and nobody else has."""
        table = self._tables.rows
        is_taken = table.state[rows] == RowState.TAKEN
        return np.asarray(is_taken & (table.pins[rows] == self._marks.bit), dtype=np.bool_)

    def free(self, rows: IndexArray) -> None:
        """Let the slots of distinct rows be taken again."""
        table = self._tables.rows
        table.state[rows] = RowState.FREE
        table.pins[rows] = table.holds[rows] = 0
        table.is_saved[rows] = False
        self._space.count(rows, used=-1)
        for segment, positions in self._space.segments_of(rows):
            first = int(rows[positions].min()) - segment.first_row
            self._set_cursor(segment, min(first, self._cursor(segment)))

    # ---- coming and going ---------------------------------------------------------------------

    def add(self, new: NewObjects) -> None:
        """Make objects visible under their keys, which find nothing yet, in rows that were taken for them.

        Rows that are not this opener's any more stay as they are: the tables were made again from the catalog
        meanwhile, and with that the objects visible; some may be gone again.
        """
        table, words = self._tables.rows, self._tables.words
        fresh = np.flatnonzero(self._is_mine(new.rows))
        rows = new.rows[fresh]
        if not len(rows):
            return
        keys = key_words(new.keys)[fresh]
        table.key[rows], table.layout[rows] = keys, new.layouts[fresh]
        table.tick[rows] = table.saved_tick[rows] = new.ticks[fresh]
        table.pins[rows] = table.holds[rows] = 0
        table.is_saved[rows] = True
        table.state[rows] = RowState.LIVING
        self._insert(keys, rows)
        self._space.count(rows, objects=1)
        self._space.count_ticks(rows, new.ticks[fresh])
        words[Word.LAST_TICK] = max(int(words[Word.LAST_TICK]), int(new.ticks.max()))

    def _insert(self, keys: NDArray[np.uint64], rows: IndexArray) -> None:
        words, buckets = self._tables.words, self._tables.buckets
        self._tables.count_on(Word.OBJECTS, len(rows))
        if int(words[Word.BUCKETS_USED]) + len(rows) > len(buckets) * 3 // 4:
            self.fill_buckets()
            return
        self._tables.count_on(Word.BUCKETS_USED, insert_rows(buckets, keys, rows))

    def fill_buckets(self) -> None:
        """Enter all living rows into empty buckets."""
        rows, buckets = self.all_rows(), self._tables.buckets
        buckets[:] = 0
        self._tables.words[Word.BUCKETS_USED] = insert_rows(
            buckets, self._tables.rows.key[rows], rows
        )

    def remove(self, rows: IndexArray) -> None:
        """Let keys find distinct living objects no longer; their slots stay taken until `settle` frees them."""
        if not len(rows):
            return
        table = self._tables.rows
        freed = remove_rows(self._tables.buckets, table.key[rows], rows)
        self._tables.count_on(Word.BUCKETS_USED, -freed)
        self._tables.count_on(Word.OBJECTS, -len(rows))
        self._space.count(rows, objects=-1)
        self._space.count_ticks(rows, -table.tick[rows])
        table.state[rows] = RowState.LEAVING
        self._marks.end_holds(rows)
        self._leaving.extend(rows.tolist())

    def restore(self, rows: IndexArray) -> None:
        """Let keys find removed objects again that the catalog still names, where nothing came in their place."""
        table = self._tables.rows
        left = rows[(table.state[rows] == RowState.LEAVING) & table.is_saved[rows]]
        back = left[self.find(self.keys_of(left)) == ABSENT]
        restored = set(back.tolist())
        self._leaving = [row for row in self._leaving if row not in restored]
        table.state[back] = RowState.LIVING
        self._insert(table.key[back], back)
        self._space.count(back, objects=1)
        self._space.count_ticks(back, table.tick[back])

    def adopt_leaving(self) -> None:
        """Take over the removed rows of openers that died."""
        for segment in self._space:
            states = self._tables.rows.state[segment.rows]
            found = segment.first_row + np.flatnonzero(states == RowState.LEAVING)
            self._leaving = sorted({*self._leaving, *found.tolist()})

    def leaving(self) -> IndexArray:
        """Return the removed rows that the catalog still names."""
        rows = self._removed()
        return np.asarray(rows[self._tables.rows.is_saved[rows]], dtype=np.int64)

    def _removed(self) -> IndexArray:
        rows = np.array(self._leaving, dtype=np.int64)
        return np.asarray(rows[self._tables.rows.state[rows] == RowState.LEAVING], dtype=np.int64)

    def forget(self, rows: IndexArray) -> None:
        """Note that the catalog names these removed rows no longer."""
        self._tables.rows.is_saved[rows] = False

    def settle(self) -> None:
        """Free the removed rows that nobody reads and nothing names."""
        rows = self._removed()
        self._leaving = rows[self._tables.rows.is_saved[rows]].tolist()
        self.free_unread(rows)

    def free_unread(self, rows: IndexArray) -> None:
        """Free those of distinct rows that were removed, that nobody reads and that nothing names."""
        table = self._tables.rows
        is_done = (
            (table.state[rows] == RowState.LEAVING)
            & ~table.is_saved[rows]
            & (table.pins[rows] == 0)
        )
        self.free(rows[is_done])
