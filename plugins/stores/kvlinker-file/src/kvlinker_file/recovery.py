"""Recovery makes the shared tables again from the catalog, and keeps what openers that live have marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker_file.ages import now_micros
from kvlinker_file.buckets import KEY_WORDS, distinct, key_hashes
from kvlinker_file.catalog import Catalog, CatalogChange, SegmentRecord, split_places
from kvlinker_file.index import ObjectIndex
from kvlinker_file.space import SlabSpace
from kvlinker_file.table_layout import RowState, TableConfig, Word, table_bytes
from kvlinker_file.tables import SharedTables

__all__ = [
    "Saved",
    "clear_seats",
    "commits_of",
    "fill_tables",
    "make_again",
    "record_of",
    "sensible",
    "without",
]

_CLOCK_SLACK_MICROS = 86_400_000_000
"""A time of use further ahead than a day is no time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """The objects that the catalog names and that make sense, in columns."""

    keys: NDArray[np.uint64]
    """[objects, 4]"""
    places: IndexArray
    layouts: IndexArray
    ticks: IndexArray

    def select(self, mask: NDArray[np.bool_]) -> Saved:
        """Return some of them."""
        if mask.all():
            return self
        return Saved(
            keys=self.keys[mask],
            places=self.places[mask],
            layouts=self.layouts[mask],
            ticks=self.ticks[mask],
        )


def sensible(catalog: Catalog) -> tuple[Saved, IndexArray]:
    """Return what could be an object, of two under one key the one used last, and the places of all rows.

    There are two where one opener removed an object, and another one stored it again before that was saved.

    Raises:
        StoreError: the catalog cannot be read.
    """
    saved = _read(catalog)
    known = np.array(sorted(catalog.layouts()), dtype=np.int64)
    saved = saved.select(np.isin(saved.layouts, known))
    return saved.select(_is_last(saved.keys, saved.ticks)), catalog.places()


def _read(catalog: Catalog) -> Saved:
    latest = now_micros() + _CLOCK_SLACK_MICROS
    numbers, keys = [np.empty((0, 3), dtype=np.int64)], []
    for part in catalog.objects():
        *columns, names = zip(*part, strict=True)
        numbers.append(np.array(columns, dtype=np.int64).T)
        keys.append(b"".join(names))
    table = np.concatenate(numbers)
    used = table[:, 2]
    return Saved(
        keys=np.frombuffer(b"".join(keys), dtype="<u8").reshape(len(table), KEY_WORDS),
        places=table[:, 0],
        layouts=table[:, 1],
        ticks=np.where((used >= 0) & (used <= latest), used, 0),
    )


def _is_last(keys: NDArray[np.uint64], ticks: IndexArray) -> NDArray[np.bool_]:
    """[keys] whether no object under the same key was used later."""
    is_last = np.ones(len(keys), dtype=np.bool_)
    if len(distinct(key_hashes(keys))) < len(keys):
        order = np.argsort(-ticks, kind="stable")
        names = np.ascontiguousarray(keys[order]).view(f"V{8 * KEY_WORDS}").reshape(-1)
        is_last[:] = False
        is_last[order[np.unique(names, return_index=True)[1]]] = True
    return is_last


def record_of(places: IndexArray, records: Sequence[SegmentRecord]) -> IndexArray:
    """[places] which of the segments a place is a slot of; -1 for none."""
    segments, slots = split_places(places)
    numbers = np.array([record.number for record in records], dtype=np.int64)
    order = np.argsort(numbers)
    found = np.searchsorted(numbers[order], segments)
    found = order[np.minimum(found, len(records) - 1)] if len(records) else found
    limits = np.array([record.slots for record in records], dtype=np.int64)
    chosen = np.full(len(places), -1, dtype=np.int64)
    if len(records):
        fits = (numbers[found] == segments) & (slots < limits[found])
        chosen[fits] = found[fits]
    return chosen


def make_again(
    catalog: Catalog, tables: SharedTables, space: SlabSpace, index: ObjectIndex, *, living: int
) -> CatalogChange:
    """Make the tables again beside openers that live; return what the catalog names in vain.

    Args:
        catalog: says what is whole.
        tables: of whatever content.
        space: takes over the segments.
        index: fills the buckets.
        living: mask of the openers that live.

    Raises:
        StoreError: the catalog cannot be read.
        OSError: there is no space for the tables.
    """
    saved, places = sensible(catalog)
    records = _apart(catalog.segments(), tables.config)
    objects = saved.select(record_of(saved.places, records) >= 0)
    tables.restore_header(max([0, *(record.end_row for record in records)]))
    tables.words[Word.COMMITS] = commits_of(catalog.facts())
    tables.words[Word.SEATS] = living
    fill_tables(tables, space, index, records=records, saved=objects, living=living)
    numbers = {record.number for record in records}
    return CatalogChange(
        removed=without(places, objects.places),
        removed_segments=[n for n in catalog.segment_numbers() if n not in numbers],
    )


def without(places: IndexArray, kept: IndexArray) -> list[int]:
    """Return the places, each named once, that are not among the kept ones, which all are among them."""
    if len(places) == len(kept):
        return []
    found: list[int] = np.setdiff1d(places, kept, assume_unique=True).tolist()
    return found


def commits_of(facts: Mapping[str, object]) -> int:
    """Return how many transactions a catalog has seen, as it says itself."""
    found = facts.get("commits")
    return found if isinstance(found, int) and 0 <= found < 1 << 62 else 0


def _apart(records: Sequence[SegmentRecord], config: TableConfig) -> tuple[SegmentRecord, ...]:
    """Return the segments whose rows no other one has, and that have room in the tables."""
    kept: list[SegmentRecord] = []
    for record in sorted(records, key=lambda record: record.first_row):
        is_apart = not kept or record.first_row >= kept[-1].end_row
        fits = len(kept) < config.segment_limit
        if is_apart and fits and table_bytes(config, record.end_row) <= config.capacity:
            kept.append(record)
    return tuple(kept)


def fill_tables(
    tables: SharedTables,
    space: SlabSpace,
    index: ObjectIndex,
    *,
    records: Sequence[SegmentRecord],
    saved: Saved,
    living: int,
) -> None:
    """Fill the tables with what the catalog names; the tables are large enough, and both locks are held.

    Args:
        tables: with room for all rows.
        space: takes over the segments.
        index: fills the buckets.
        records: the segments.
        saved: the objects in them.
        living: mask of the openers whose marks stay.
    """
    words = tables.words
    version = int(words[Word.SEGMENTS_VERSION]) & (1 << 62) - 1  # whatever was written over it
    words[Word.SEGMENTS_VERSION] = max(version + 1, now_micros())
    tables.segments[:] = np.zeros((), dtype=tables.segments.dtype)
    for entry, record in enumerate(records):
        kind = record.kind
        sizes = record.number, record.first_row, record.slots, record.file_bytes
        tables.segments[entry] = (
            *sizes,
            kind.payload_bytes,
            kind.ranges,
            record.incarnation,
            *(0, 0, 0, 0, 0.0),
        )
    last = max([0, *(record.incarnation for record in records)])
    words[Word.LAST_INCARNATION] = max(last, int(words[Word.LAST_INCARNATION]) & (1 << 62) - 1)
    space.refresh()
    space.retire_again()
    _fill_rows(tables, records, saved, living)
    recount(tables, space)
    latest = int(saved.ticks.max(initial=0))
    words[Word.LAST_TICK] = min(
        max(latest, int(words[Word.LAST_TICK])), now_micros() + _CLOCK_SLACK_MICROS
    )
    index.fill_buckets()
    index.adopt_leaving()


def _fill_rows(
    tables: SharedTables, records: Sequence[SegmentRecord], saved: Saved, living: int
) -> None:
    table = tables.rows
    starts = np.array([record.first_row for record in records], dtype=np.int64)
    rows = starts[record_of(saved.places, records)] + split_places(saved.places)[1]
    keys = saved.keys
    before = table.state.copy()
    table.pins[:] &= np.uint64(living)
    table.holds[:] &= np.uint64(living)
    state = np.zeros(len(table), dtype=np.uint8)
    for record in records:
        own = slice(record.first_row, record.end_row)
        is_kept = table.pins[own] != 0
        is_taken = is_kept & (before[own] == RowState.TAKEN)
        state[own][is_kept] = RowState.LEAVING
        state[own][is_taken] = RowState.TAKEN
    has_key = np.all(table.key[rows] == keys, axis=1)
    is_leaving = (before[rows] == RowState.LEAVING) & has_key
    state[rows] = np.where(
        is_leaving, RowState.LEAVING, RowState.LIVING
    )  # a removal that was not saved
    is_same = (before[rows] == RowState.LIVING) & has_key
    changed = np.ones(len(table), dtype=np.bool_)
    changed[rows[is_same]] = False
    table.holds[changed] = 0
    table.generation[changed] += np.uint32(1)
    new = rows[~is_same]
    table.pins[new[before[new] == RowState.TAKEN]] = 0
    table.pins[state == RowState.FREE] = 0
    table.key[new], table.layout[rows] = keys[~is_same], saved.layouts
    table.tick[new] = saved.ticks[~is_same]
    table.saved_tick[rows] = saved.ticks
    table.is_saved[:] = False
    table.is_saved[rows] = True
    table.state[:] = state


def recount(tables: SharedTables, space: SlabSpace) -> None:
    """Count again what the rows of each segment are."""
    table, records, objects = tables.rows, tables.segments, 0
    for segment in space:
        entry, own = space.entry_of(segment), segment.rows
        state = table.state[own]
        is_living = state == RowState.LIVING
        is_marked = (table.pins[own] | table.holds[own]) != 0
        records["used"][entry] = np.count_nonzero(state)
        records["objects"][entry] = np.count_nonzero(is_living)
        records["busy"][entry] = np.count_nonzero(is_marked & (state >= RowState.LIVING))
        records["ticks"][entry] = table.tick[own][is_living].sum(dtype=np.float64)
        objects += int(records["objects"][entry])
    tables.words[Word.OBJECTS] = objects


def clear_seats(tables: SharedTables, space: SlabSpace, index: ObjectIndex, mask: int) -> None:
    """Take all marks and taken slots back from openers that are gone; the lock of the tables is held."""
    table, stays = tables.rows, ~np.uint64(mask)
    table.pins[:] &= stays
    table.holds[:] &= stays
    is_idle = table.pins[:] == 0
    is_taken = is_idle & (table.state == RowState.TAKEN)
    is_done = is_idle & (table.state == RowState.LEAVING) & ~table.is_saved
    table.state[is_taken | is_done] = RowState.FREE
    recount(tables, space)
    index.adopt_leaving()
    tables.words[Word.SEATS] &= stays
