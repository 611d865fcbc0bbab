"""Opening a store: what the catalog names and the files hold becomes the index, and everything else is swept."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.keys import OBJECT_KEY_BYTES
from kvlinker.store import ObjectKey
from kvlinker_file.catalog import (
    BASE_BYTES,
    Catalog,
    CatalogChange,
    DamagedCatalogError,
    SegmentRecord,
    split_places,
)
from kvlinker_file.directory import NO_SPACE, StoreDirectory, typed_os_errors
from kvlinker_file.index import NewObjects
from kvlinker_file.options import FileStoreOptions
from kvlinker_file.segments import Segment
from kvlinker_file.state import StoreState, now_micros

__all__ = ["open_state"]

_log = logging.getLogger(__name__)

_CLOCK_SLACK_MICROS = 86_400_000_000
"""A time of use further ahead than a day is no time."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def open_state(
    options: FileStoreOptions,
    *,
    create: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> StoreState:
    """Open a store and return its state.

    Args:
        options: where, and how much.
        create: make the store where there is none.
        clock: seconds, for the expiry of holds.

    Raises:
        StoreBusyError: another opener owns the directory.
        StoreFormatError: it holds no store of this version.
        StoreFullError: the disk is full.
        StoreError: it cannot be read or written.
    """
    directory = StoreDirectory(options.path, create=create)
    try:
        with typed_os_errors(f"file store {options.path}"):
            try:
                return _open_catalog(options, directory, clock)
            except DamagedCatalogError as error:
                _log.warning("%s: begins empty, its index is damaged: %s", options.path, error)
            directory.remove_index()
            state = _open_catalog(options, directory, clock)
            state.counters["index_lost"] += 1
            return state
    except BaseException:
        directory.close()
        raise


def _open_catalog(
    options: FileStoreOptions, directory: StoreDirectory, clock: Callable[[], float]
) -> StoreState:
    catalog = Catalog(directory.index_path, durability=options.durability)
    state = StoreState(options=options, directory=directory, catalog=catalog, clock=clock)
    try:
        _fill(state)
    except BaseException:
        for segment in state.space:
            segment.close()
        catalog.close()
        raise
    return state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Saved:
    """The objects that the catalog names and that make sense, in columns."""

    keys: Sequence[ObjectKey]
    places: IndexArray
    layouts: IndexArray
    ticks: IndexArray

    def select(self, mask: NDArray[np.bool_]) -> _Saved:
        """Return some of them."""
        if mask.all():
            return self
        return _Saved(
            keys=[self.keys[i] for i in np.flatnonzero(mask).tolist()],
            places=self.places[mask],
            layouts=self.layouts[mask],
            ticks=self.ticks[mask],
        )


def _fill(state: StoreState) -> None:
    """Make the index from the catalog and the files, and let the catalog forget the rest."""
    catalog, directory = state.catalog, state.directory
    facts, layouts, records = catalog.facts(), catalog.layouts(), catalog.segments()
    saved, places = _sensible(catalog.objects(), layouts)
    is_proven = _is_proven(facts) or state.options.verify
    kept = _within_capacity(records, saved, state.options.capacity) if is_proven else ()
    for number in directory.segment_numbers() - {record.number for record in kept}:
        directory.remove_segment(number)
    kept = tuple(record for record in kept if _map(state, record))
    objects = saved.select(_record_of(saved.places, kept) >= 0)
    _forget_the_rest(state, np.setdiff1d(places, objects.places), kept, facts)
    state.note_layouts(layouts)
    _index(state, objects, kept)
    state.counters["lost_at_open"] += len(places) - len(objects.keys)


def _sensible(
    rows: Iterator[tuple[object, ...]], layouts: Mapping[int, bytes]
) -> tuple[_Saved, IndexArray]:
    """Return what could be an object, the first of two under one key, and the places of all rows."""
    found: dict[ObjectKey, None] = {}
    every, columns = array("q"), array("q")
    latest = now_micros() + _CLOCK_SLACK_MICROS
    for place, layout, used, key in rows:
        if not isinstance(place, int):
            continue  # no database of ours: places are its row numbers
        every.append(place)
        if (
            isinstance(layout, int)
            and isinstance(used, int)
            and isinstance(key, bytes)
            and len(key) == OBJECT_KEY_BYTES
            and place >= 0
            and layout in layouts
            and key not in found
        ):
            found[key] = None
            columns.extend((place, layout, used if 0 <= used <= latest else 0))
    table = np.array(columns, dtype=np.int64).reshape(-1, 3)
    saved = _Saved(keys=list(found), places=table[:, 0], layouts=table[:, 1], ticks=table[:, 2])
    return saved, np.array(every, dtype=np.int64)


def _boot_id() -> str:
    with suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return ""


def _is_proven(facts: Mapping[str, object]) -> bool:
    """Whether the bytes on the disk must be what was written: the machine has not restarted, or all were synced."""
    return facts.get("synced") == 1 or (facts.get("boot") == _boot_id() != "")


def _within_capacity(
    records: Sequence[SegmentRecord], saved: _Saved, capacity: int
) -> tuple[SegmentRecord, ...]:
    """Return the segments that fit into the capacity, those used most recently first."""
    chosen = _record_of(saved.places, records)
    is_in = chosen >= 0
    objects = np.bincount(chosen[is_in], minlength=len(records))
    ticks = np.bincount(chosen[is_in], weights=saved.ticks[is_in], minlength=len(records))
    mean = ticks / np.maximum(objects, 1)
    left = capacity - BASE_BYTES
    kept = []
    for i in np.argsort(-mean, kind="stable").tolist():
        if records[i].cost <= left:
            kept.append(records[i])
            left -= records[i].cost
    return tuple(kept)


def _record_of(places: IndexArray, records: Sequence[SegmentRecord]) -> IndexArray:
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


def _map(state: StoreState, record: SegmentRecord) -> bool:
    """Map a segment; False where its file is not what was made, or holes in it cannot be filled."""
    try:
        descriptor = state.directory.open_segment(record.number, record.file_bytes)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        descriptor = None
    if descriptor is None:
        _log.warning("%s: segment %d is damaged", state.options.path, record.number)
        state.directory.remove_segment(record.number)
        return False
    segment = Segment(
        number=record.number,
        descriptor=descriptor,
        file_bytes=record.file_bytes,
        kind=record.kind,
        slots=record.slots,
    )
    state.space.add(segment)
    return True


def _forget_the_rest(
    state: StoreState,
    forgotten: IndexArray,
    kept: Sequence[SegmentRecord],
    facts: Mapping[str, object],
) -> None:
    numbers = {record.number for record in kept}
    synced = facts.get("synced") == 1
    if state.is_durable and not synced and (_is_proven(facts) or not kept):
        for segment in state.space:
            segment.sync()
        synced = True
    state.catalog.apply(
        CatalogChange(
            removed=forgotten.tolist(),
            removed_segments=[n for n in state.catalog.segment_numbers() if n not in numbers],
            facts=(
                ("boot", _boot_id()),
                ("synced", int(synced)),
                ("capacity", state.options.capacity),
            ),
        )
    )
    state.catalog.truncate_log()


def _index(state: StoreState, objects: _Saved, records: Sequence[SegmentRecord]) -> None:
    segments, slots = split_places(objects.places)
    kinds = [state.space.kind_id(record.kind) for record in records]
    order = np.argsort(segments, kind="stable")
    cuts = np.flatnonzero(np.diff(segments[order])) + 1
    for members in np.split(order, cuts):
        if len(members):
            state.space[int(segments[members[0]])].take_these(slots[members])
    state.index.add(
        NewObjects(
            keys=objects.keys,
            segments=segments,
            slots=slots,
            kinds=np.array(kinds, dtype=np.int64)[_record_of(objects.places, records)],
            layouts=objects.layouts,
            ticks=objects.ticks,
        )
    )
