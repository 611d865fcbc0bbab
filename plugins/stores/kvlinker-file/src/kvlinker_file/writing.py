"""A write copies objects into slots nobody can see, and makes all of them visible in one step or none.

Order: take slots, copy, checksum, headers, ask for permission, save in the catalog, show in the index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, room_for_sums
from kvlinker.errors import StoreError, StoreFullError
from kvlinker.frames import FrameLayout, encode_headers
from kvlinker.store import ObjectKey, WriteBatch, WriteStatus
from kvlinker_file.catalog import layout_number
from kvlinker_file.index import ABSENT, NewObjects
from kvlinker_file.room import find_room
from kvlinker_file.sections import UnsettledError
from kvlinker_file.segments import SlotBlock, SlotKind, checksum
from kvlinker_file.space import Taken
from kvlinker_file.state import StoreState

__all__ = ["write_batches"]

_CHUNK_BYTES = 32 << 20
"""Bytes that are copied before their checksums are made: enough that calls do not count, and still in a cache."""
_SUMMED_CHUNK_BYTES = 256 << 20
"""Where the copy itself makes them: few enough that a transfer that is taken back is let go of soon."""

_NO_ROWS: IndexArray = np.empty(0, dtype=np.int64)


@dataclass(kw_only=True, eq=False)
class _Work:
    """What one batch needs."""

    batch: WriteBatch
    layout: FrameLayout
    kind: SlotKind
    statuses: list[WriteStatus]
    fresh: IndexArray = field(default_factory=_NO_ROWS.copy)
    """Positions of the objects to write."""
    twins: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Position to the batch and position where the call names the same key first."""
    taken: list[Taken] = field(default_factory=list)

    @property
    def fresh_keys(self) -> list[ObjectKey]:
        """Keys of the objects to write, in order."""
        return [self.batch.keys[i] for i in self.fresh.tolist()]

    @cached_property
    def block(self) -> SlotBlock:
        """The slots taken, in the order of the objects to write."""
        addresses = [taken.addresses for taken in self.taken]
        return SlotBlock(kind=self.kind, addresses=np.concatenate(addresses or [_NO_ROWS]))

    def mark(self, status: WriteStatus) -> None:
        """Give every object to write the same status."""
        for position in self.fresh.tolist():
            self.statuses[position] = status


def write_batches(
    state: StoreState,
    batches: Sequence[WriteBatch],
    memory: DeviceAccess,
    may_publish: Callable[[], bool],
) -> tuple[tuple[WriteStatus, ...], ...]:
    """See Store.write."""
    works = [_work(batch) for batch in batches]
    kept = _look_up(state, works)
    try:
        if _take_slots(state, works) and _prepare(state, works, memory):
            _copy(works, memory)
            _sync(state, works)
        _publish_if_allowed(state, works, may_publish)
    finally:
        state.let_go(kept, [taken for work in works for taken in work.taken])
    for work in works:
        for position, (twin_batch, twin) in work.twins.items():
            status = works[twin_batch].statuses[twin]
            is_stored = status is WriteStatus.WRITTEN
            work.statuses[position] = WriteStatus.EXISTS if is_stored else status
    return tuple(tuple(work.statuses) for work in works)


def _work(batch: WriteBatch) -> _Work:
    layout = FrameLayout.of_ranges(batch.plan.spans.offset, batch.plan.range_bytes)
    kind = SlotKind(payload_bytes=layout.payload_bytes, ranges=len(layout.sizes))
    statuses = [WriteStatus.FAILED] * len(batch.keys)
    return _Work(batch=batch, layout=layout, kind=kind, statuses=statuses)


def _look_up(state: StoreState, works: Sequence[_Work]) -> IndexArray:
    """Find what must be written; return the rows of the rest, which are kept from eviction meanwhile."""
    first: dict[ObjectKey, tuple[int, int]] = {}
    kept = [_NO_ROWS]
    with state.changing():
        for number, work in enumerate(works):
            if work.kind.payload_bytes > state.space.largest_payload():
                continue  # it stays FAILED: no eviction could ever make room
            rows, stays = _stored(state, work, work.batch.keys)
            fresh = []
            for position, key in enumerate(work.batch.keys):
                if stays[position]:
                    work.statuses[position] = WriteStatus.EXISTS
                elif key in first:
                    work.twins[position] = first[key]
                else:
                    first[key] = (number, position)
                    fresh.append(position)
            work.fresh = np.array(fresh, dtype=np.int64)
            kept.append(rows[stays])
        pinned = np.concatenate(kept)
        state.marks.pin(pinned)
        state.ages.touch(pinned)
    return pinned


def _stored(
    state: StoreState, work: _Work, keys: Sequence[ObjectKey]
) -> tuple[IndexArray, NDArray[np.bool_]]:
    """Return the row of each key, and whether it is an object of the batch's layout."""
    rows = state.index.find(keys)
    stays = state.index.matches(
        rows,
        payload_bytes=work.kind.payload_bytes,
        layout=layout_number(work.batch.fingerprint),
    )
    return rows, stays


def _take_slots(state: StoreState, works: Sequence[_Work]) -> bool:
    """Take slots for everything, or for nothing: the batches become visible together."""
    for work in works:
        if not len(work.fresh):
            continue
        taken = find_room(state, work.kind, len(work.fresh))
        if taken is None:
            _abandon(state, works, WriteStatus.FULL)
            state.count("full")
            return False
        work.taken = taken
    return True


def _abandon(state: StoreState, works: Sequence[_Work], status: WriteStatus) -> None:
    """Give all slots back: nothing of the call will be stored."""
    for work in works:
        taken, work.taken = work.taken, []
        state.give_back(taken)
        work.mark(status)


def _prepare(state: StoreState, works: Sequence[_Work], memory: DeviceAccess) -> bool:
    """Fault in what will be written; False, and nothing left to do, where the disk cannot give it."""
    everything = [taken for work in works for taken in work.taken]
    try:
        for taken in everything:
            taken.segment.prepare_writing(taken.slots)
        if state.pins.are_wanted(memory):  # now, so that the first load need not
            state.pins.pin([taken.segment for taken in everything], memory)
    except OSError as error:
        _report_disk_error(state, works, error)
        return False
    return True


def _sync(state: StoreState, works: Sequence[_Work]) -> None:
    """Bring what was written to the disk, if objects must be there before they are visible."""
    if not state.is_durable:
        return
    try:
        for segment in {taken.segment for work in works for taken in work.taken}:
            segment.sync()
    except OSError as error:
        _report_disk_error(state, works, error)


def _report_disk_error(state: StoreState, works: Sequence[_Work], error: OSError) -> None:
    state.notices.warn("objects were not stored", error)
    state.count("disk_errors")
    _abandon(state, works, WriteStatus.FAILED)


def _copy(works: Sequence[_Work], memory: DeviceAccess) -> None:
    for work in works:
        is_summed = room_for_sums(work.batch.plan, memory, checksum) is not None
        most = _SUMMED_CHUNK_BYTES if is_summed else _CHUNK_BYTES
        chunk = max(1, most // work.kind.payload_bytes)
        for start in range(0, len(work.fresh), chunk):
            _copy_chunk(work, slice(start, start + chunk), memory)


def _copy_chunk(work: _Work, chunk: slice, memory: DeviceAccess) -> None:
    batch, layout, positions = work.batch, work.layout, work.fresh[chunk]
    block = work.block.select(chunk)
    plan = batch.plan
    if len(positions) != plan.num_pages:
        plan = plan.select(positions)
    sums = room_for_sums(plan, memory, checksum)
    memory.copy_out(plan, block.objects.summed_into(sums))
    if sums is None:
        columns = np.array(layout.offsets, dtype=np.int64), np.array(layout.sizes, dtype=np.int64)
        checksums = block.checksums(*columns)
    else:  # the layout's ranges are the plan's, by their offsets
        checksums = sums[np.argsort(plan.spans.offset, kind="stable")].T
    headers = encode_headers(
        layout,
        [batch.keys[i] for i in positions.tolist()],
        batch.fingerprint,
        checksums,
        checksum=checksum,
    )
    block.write_headers(headers)


def _publish_if_allowed(
    state: StoreState, works: Sequence[_Work], may_publish: Callable[[], bool]
) -> None:
    is_allowed = may_publish()
    filled = [work for work in works if work.taken]
    if not is_allowed:
        for work in filled:
            work.mark(WriteStatus.DISCARDED)
            state.count("discarded", len(work.fresh))
    elif filled:
        try:
            _publish(state, filled)
            state.save_use_sometimes()
        except StoreError as error:
            state.notices.warn("objects were not stored", error)
            state.count("index_errors")
            full = isinstance(error, StoreFullError)
            for work in filled:
                work.mark(WriteStatus.FULL if full else WriteStatus.FAILED)


def _publish(state: StoreState, works: Sequence[_Work]) -> None:
    with state.committing():
        with state.changing():
            new = [_new_objects(state, work) for work in works]
            saved = _saved_rows(state, new)
        # From here on the slots are no longer given back, whatever interrupts: they may be in the catalog.
        taken = [work.taken for work in works]
        for work, item in zip(works, new, strict=True):
            work.taken = _unused(work.taken, item)
        try:
            state.commit(added=saved, layouts=_layouts_of(works))
        except UnsettledError:
            raise
        except StoreError:
            for work, all_of_it in zip(works, taken, strict=True):
                work.taken = all_of_it
            raise
        with state.sections.settling():
            for item in new:
                state.index.add(item)
    state.count("written", sum(len(item.keys) for item in new))


def _saved_rows(
    state: StoreState, new: Sequence[NewObjects]
) -> list[tuple[int, int, int, ObjectKey]]:
    """Return what the catalog must know of the objects."""
    rows: list[tuple[int, int, int, ObjectKey]] = []
    for item in new:
        places = state.places_of(item.rows)
        rows.extend(zip(places, item.layouts.tolist(), item.ticks.tolist(), item.keys, strict=True))
    return rows


def _layouts_of(works: Sequence[_Work]) -> list[tuple[int, bytes]]:
    fingerprints = {work.batch.fingerprint for work in works}
    return sorted((layout_number(fingerprint), fingerprint) for fingerprint in fingerprints)


def _new_objects(state: StoreState, work: _Work) -> NewObjects:
    """Return what becomes visible: all but what another writer stored meanwhile, instead of what does not fit."""
    keys = work.fresh_keys
    rows, stays = _stored(state, work, keys)
    state.index.remove(state.index.living(rows[(rows != ABSENT) & ~stays]))
    slots = np.concatenate([taken.rows for taken in work.taken])
    for position, exists in zip(work.fresh.tolist(), stays.tolist(), strict=True):
        work.statuses[position] = WriteStatus.EXISTS if exists else WriteStatus.WRITTEN
    wins = ~stays
    count = int(wins.sum())
    return NewObjects(
        keys=[key for key, is_new in zip(keys, wins.tolist(), strict=True) if is_new],
        rows=slots[wins],
        layouts=np.full(count, layout_number(work.batch.fingerprint)),
        ticks=state.ages.next_ticks(count),
    )


def _unused(taken: Sequence[Taken], item: NewObjects) -> list[Taken]:
    """Return the slots that do not become objects."""
    left = []
    for part in taken:
        rest = part.slots[~np.isin(part.rows, item.rows)]
        if len(rest):
            left.append(Taken(segment=part.segment, slots=rest))
    return left
