"""A read session pins its objects, checks their headers once, and each range's checksum before it answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, room_for_sums
from kvlinker.frames import FrameHeaders, FrameStatus, decode_headers
from kvlinker.moving import summing_mover
from kvlinker.open_reads import OpenReads
from kvlinker.plans import TransferPlan
from kvlinker.store import ReadRequest, ReadSession, ReadStatus
from kvlinker_file.blocks import blocks_of
from kvlinker_file.checking import CopyCheck, RangeNumbers
from kvlinker_file.index import ABSENT
from kvlinker_file.segments import SlotBlock, checksum
from kvlinker_file.state import StoreState

__all__ = ["FileReadSession"]

_OK, _MISS, _CORRUPT, _FAILED = range(4)
_STATUSES = (ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT, ReadStatus.FAILED)
_CHUNK_BYTES = 32 << 20
"""Bytes that are read between two looks whether the read is still wanted: enough that calls do not count."""
_FEW_OBJECTS = 8
"""Fewer are checked before they are copied, where Python does both: being told of spans costs more than it saves."""


_NO_ROWS: IndexArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """The objects of a session that lie in slots of one kind, and what each read of them would find out anew."""

    positions: IndexArray
    """[objects] which objects of the request these are, ascending."""
    block: SlotBlock
    headers: FrameHeaders

    @cached_property
    def every(self) -> IndexArray:
        """Numbers of all of them: [objects]."""
        return np.arange(len(self.positions))

    @cached_property
    def checksums(self) -> NDArray[np.uint64]:
        """Each range's of every object: [ranges, objects]."""
        return np.ascontiguousarray(self.headers.checksums.T)

    @cached_property
    def ranges(self) -> RangeNumbers:
        """Of every object; for headers that are uniform, one of them intact."""
        first = int(np.argmin(self.headers.status))
        return RangeNumbers(self.headers.offsets[first], self.headers.sizes[first])


def _positions(parts: Sequence[_Part]) -> IndexArray:
    return np.concatenate([_NO_ROWS, *(part.positions for part in parts)])


def _copied_wrongly(
    block: SlotBlock, plan: TransferPlan, expected: NDArray[np.uint64], memory: DeviceAccess
) -> IndexArray:
    """Copy whole ranges of objects into the pools; return which objects were not right: ascending numbers.

    Args:
        block: the objects' slots, in the plan's page order.
        plan: of whole pages, each span one range of the objects.
        expected: [spans, objects] checksums.
        memory: copies, and tells of it.
    """
    sums = room_for_sums(plan, memory, checksum)
    if sums is not None:
        memory.copy_in(plan, block.objects.summed_into(sums))
        wrong = expected != sums
        return np.flatnonzero(wrong.any(axis=0)) if wrong.any() else _NO_ROWS
    check = CopyCheck(block, plan, expected)
    memory.copy_in(plan, replace(block.objects, copied=check))
    return np.flatnonzero(~check.are_right())


class FileReadSession(ReadSession):
    """Objects that were there when it was opened, pinned until it is closed and its last read is over."""

    def __init__(
        self, state: StoreState, request: ReadRequest, rows: IndexArray, *, owner: object
    ) -> None:
        """Take over rows that were pinned.

        Args:
            state: of the store.
            request: what was asked for.
            rows: [objects] row of each object, pinned; ABSENT where there is none that fits.
            owner: what closes the state when nobody refers to it any more.
        """
        self._state = state
        self._owner = owner
        self._request = request
        self._rows = rows
        self._lock = threading.Lock()
        self._reads = OpenReads(self._let_go)
        self._parts: tuple[_Part, ...] | None = None
        self._pinned_for: DeviceAccess | None = None
        self._status = np.where(rows == ABSENT, _MISS, _OK)
        self._all_right = (ReadStatus.OK,) * len(rows)

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession."""
        self._request.check(plan)
        with self._state.using(), self._reads.reading(plan.pool):
            parts = self._checked_parts()
            self._pin(memory)
            for part in parts:
                self._read_part(part, plan, memory)
            return self._answer()

    def _answer(self) -> tuple[ReadStatus, ...]:
        if not self._status.any():
            return self._all_right
        return tuple(map(_STATUSES.__getitem__, self._status.tolist()))

    def _pin(self, memory: DeviceAccess) -> None:
        """Pin the segments once for each access that reads."""
        if self._pinned_for is not memory:
            self._pinned_for = memory
            rows = [self._rows[part.positions] for part in self._parts or ()]
            self._state.pin_segments(np.concatenate([_NO_ROWS, *rows]), memory)

    def close(self) -> None:
        """See ReadSession."""
        self._reads.close()

    def _let_go(self) -> None:
        self._state.let_go(self._rows[self._rows != ABSENT])

    # ---- headers ------------------------------------------------------------------------------

    def _checked_parts(self) -> tuple[_Part, ...]:
        with self._lock:
            if self._parts is None:
                found = np.flatnonzero(self._rows != ABSENT)
                blocks, failed = blocks_of(self._state, self._rows[found])
                self._status[found[failed]] = _FAILED
                parts = [self._check_part(block, found[chosen]) for chosen, block in blocks]
                if sum(len(block) for _, block in blocks) < len(found):
                    self._fail(np.setdiff1d(found, _positions(parts)), _MISS)  # their file is gone
                self._parts = tuple(parts)
            return self._parts

    def _check_part(self, block: SlotBlock, positions: IndexArray) -> _Part:
        request = self._request
        headers = decode_headers(
            block.read_headers(),
            ranges=block.kind.ranges,
            keys=[request.keys[i] for i in positions.tolist()],
            fingerprint=request.fingerprint,
            payload_bytes=request.object_bytes,
            checksum=checksum,
        )
        self._fail(positions[headers.status == FrameStatus.FOREIGN], _MISS)
        self._fail(positions[headers.status == FrameStatus.BROKEN], _CORRUPT)
        return _Part(positions=positions, block=block, headers=headers)

    def _fail(self, positions: IndexArray, status: int) -> None:
        """Drop objects whose slots do not hold what the index says."""
        bad = positions[self._status[positions] == _OK]
        if len(bad):
            self._status[bad] = status
            self._state.drop_corrupt(self._rows[bad])

    # ---- payload ------------------------------------------------------------------------------

    def _read_part(self, part: _Part, plan: TransferPlan, memory: DeviceAccess) -> None:
        good = self._good(part)
        ranges = self._told_ranges(part, good, plan, memory)
        chunk = max(1, _CHUNK_BYTES // max(1, sum(plan.range_bytes.tolist())))
        for start in range(0, len(good), chunk):
            numbers = good[start : start + chunk] if len(good) > chunk else good
            if self._state.options.verify and ranges is None:
                numbers = self._verified(part, numbers, plan)
            if not len(numbers):
                continue
            positions, block = part.positions[numbers], part.block.select(numbers)
            chosen = plan if len(positions) == plan.num_pages else plan.select(positions)
            if ranges is None:
                memory.copy_in(chosen, block.objects)
                continue
            expected = part.checksums[ranges]
            if len(numbers) < len(part.every):
                expected = expected[:, numbers]
            wrong = _copied_wrongly(block, chosen, expected, memory)
            if len(wrong):
                self._fail(positions[wrong], _CORRUPT)

    def _good(self, part: _Part) -> IndexArray:
        """Return which objects of a part are right so far: ascending numbers."""
        if not self._status.any():
            return part.every
        return np.flatnonzero(self._status[part.positions] == _OK)

    def _told_ranges(
        self, part: _Part, numbers: IndexArray, plan: TransferPlan, memory: DeviceAccess
    ) -> Sequence[int] | None:
        """Return which range each span is where objects are checked as they are copied; None where before that."""
        is_told = memory.tells_copied and len(numbers) >= _FEW_OBJECTS
        is_able = self._state.options.verify and plan.pages.contiguous and part.headers.is_uniform
        is_summed = memory.makes_sums and summing_mover(checksum) is not None
        if not is_able or not len(numbers) or not (is_told or is_summed):
            return None
        return part.ranges.of_spans(plan)

    def _verified(self, part: _Part, numbers: IndexArray, plan: TransferPlan) -> IndexArray:
        """Return those of a part's objects whose ranges under the plan have the right checksums."""
        is_right = np.ones(len(numbers), dtype=np.bool_)
        step = len(numbers) if part.headers.is_uniform else 1
        for start in range(0, len(numbers), step):
            group = numbers[start : start + step]
            headers, first = part.headers, int(group[0])
            ranges = headers.covering(first, plan.spans.offset, plan.range_bytes)
            table = headers.offsets[first][ranges], headers.sizes[first][ranges]
            found = part.block.select(group).checksums(*table)
            expected = headers.checksums[group][:, ranges]
            is_right[start : start + step] = np.all(found == expected, axis=1)
        self._fail(part.positions[numbers[~is_right]], _CORRUPT)
        return numbers[is_right]
