"""A read session pins its objects, checks their headers once, and all checksums before it says that bytes are right."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, room_for_sums
from kvlinker.errors import StoreError
from kvlinker.framed_objects import (
    FoundObjects,
    Piece,
    WantedObjects,
    cut_plan,
    sort_values,
    which_are_right,
)
from kvlinker.frames import PREFIX_BYTES, FrameHeaders
from kvlinker.named_values import parts_of
from kvlinker.open_reads import OpenReads
from kvlinker.plans import TransferPlan
from kvlinker.store import ReadRequest, ReadSession, ReadStatus
from kvlinker_nixl.agents import Operation
from kvlinker_nixl.aside import Aside
from kvlinker_nixl.blocks import Block
from kvlinker_nixl.depots import ABSENT
from kvlinker_nixl.moving import descriptors
from kvlinker_nixl.pool_memory import PoolRanges, range_numbers
from kvlinker_nixl.space import round_up
from kvlinker_nixl.state import SlotState, checksum
from kvlinker_nixl.windows import ReadRows, Window, Windows

__all__ = ["SlotReadSession"]

_OK, _MISS, _CORRUPT, _FAILED = range(4)
_STATUSES = (ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT, ReadStatus.FAILED)


class SlotReadSession(ReadSession):
    """Objects that were there when it was opened, whose bytes stay until it is closed and its last read is over."""

    def __init__(self, state: SlotState, request: ReadRequest) -> None:
        """Pin the objects."""
        self._state = state
        self._request = request
        self._wanted = WantedObjects(
            keys=request.keys, object_bytes=request.object_bytes, fingerprint=request.fingerprint
        )
        self._looking = threading.Lock()
        self._parts: Sequence[tuple[FoundObjects, IndexArray]] | None = None
        self._pins = state.depot.pin(request.keys, request.object_bytes)
        self._windows = Windows()
        self._open_reads = OpenReads(self._let_go)
        self._status = np.where(self._pins.offsets == ABSENT, _MISS, _OK)
        state.count("missed", int((self._status == _MISS).sum()))

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession.

        Raises:
            StoreError: bytes cannot be moved; nobody knows which were. Of a server that was restarted, all objects
                are missed instead.
        """
        self._state.reads.check_open()
        self._request.check(plan)
        with self._open_reads.reading(plan.pool):
            if not self._state.depot.is_current(self._pins):
                self._vanish()
            self._read_parts(plan, memory)
            return tuple(map(_STATUSES.__getitem__, self._status.tolist()))

    def _read_parts(self, plan: TransferPlan, memory: DeviceAccess) -> None:
        try:
            for part, numbers in self._checked_parts():
                self._read_part(part, numbers, plan, memory)
        except StoreError:
            if self._state.depot.find_current(self._pins):
                raise
            self._vanish()  # the place is gone, and with it what could not be read

    def close(self) -> None:
        """See ReadSession."""
        self._open_reads.close()

    def _let_go(self) -> None:
        self._windows.close()
        self._state.depot.unpin(self._pins)

    # ---- headers ------------------------------------------------------------------------------

    def _checked_parts(self) -> Sequence[tuple[FoundObjects, IndexArray]]:
        """Return the objects, and numbers in each part of those that have the same ranges."""
        with self._looking:
            if self._parts is None:
                parts = self._look()
                self._parts = [(part, numbers) for part in parts for numbers in part.alike()]
            return self._parts

    def _look(self) -> Sequence[FoundObjects]:
        """Read the headers of all objects, and tell what they are."""
        pins = self._pins
        beginnings: list[bytes | None] = [None] * len(pins.offsets)
        there = self._status == _OK
        for size in np.unique(pins.header_bytes[there]).tolist():
            positions = np.flatnonzero(there & (pins.header_bytes == size))
            for at, raw in zip(positions.tolist(), self._headers(positions, size), strict=True):
                beginnings[at] = raw
        lengths = (pins.header_bytes + self._wanted.object_bytes).tolist()
        look = sort_values(self._wanted, beginnings, lengths, checksum=checksum)
        own = [at for at in look.others if self._names(at, beginnings[at])]
        self._miss(np.array(own, dtype=np.int64))
        self._fail(np.setdiff1d(np.array(look.others, dtype=np.int64), own), _MISS)
        self._fail(np.array(look.damaged, dtype=np.int64), _CORRUPT)
        return look.parts

    def _names(self, at: int, beginning: bytes | None) -> bool:
        """Whether a header names the object: it is one of another length or layout, which others may look for."""
        return self._wanted.keys[at] in (beginning or b"")[:PREFIX_BYTES]

    def _miss(self, positions: IndexArray) -> None:
        """Miss objects that are not what was asked for, and leave them where they are."""
        self._status[positions] = _MISS
        self._state.count("missed", len(positions))

    def _headers(self, positions: IndexArray, size: int) -> Iterator[bytes]:
        """Yield the headers of objects whose headers are equally long."""
        row_bytes = round_up(size, self._state.alignment)
        each = max(1, self._state.reads.limits.call_bytes // row_bytes)
        for part in parts_of(len(positions), each):
            offsets = self._pins.offsets[positions[part]]
            with self._state.reads.blocks.borrow(len(offsets) * row_bytes) as block:
                self._fetch(offsets, row_bytes, block)
                rows = block.rows(len(offsets), row_bytes)
                yield from [row[:size].tobytes() for row in rows]

    def _fetch(self, offsets: IndexArray, row_bytes: int, block: Block) -> None:
        """Read as many bytes at each offset of the space into the rows of a block."""
        target, line = self._pins.target, self._state.reads
        addresses = block.address + np.arange(len(offsets), dtype=np.int64) * row_bytes
        line.move(
            Operation.READ,
            descriptors(addresses, row_bytes, 0),
            descriptors(offsets, row_bytes, target.device),
            target,
            block=block,
        )

    def _fail(self, positions: IndexArray, status: int) -> None:
        """Drop objects that are not what they should be, unless their places are others' by now."""
        bad = positions[self._status[positions] == _OK]
        if not len(bad):
            return
        if not self._state.depot.is_current(self._pins):
            self._vanish()
            return
        self._status[bad] = status
        self._state.count("corrupt" if status == _CORRUPT else "foreign", len(bad))
        self._state.depot.drop(self._pins, self._wanted.keys, bad.tolist())

    def _vanish(self) -> None:
        """Miss everything: the pins are gone, and the places may be others' by now."""
        left = self._status == _OK
        self._status[left] = _MISS
        self._state.count("vanished", int(left.sum()))

    # ---- payload ------------------------------------------------------------------------------

    def _read_part(
        self, part: FoundObjects, numbers: IndexArray, plan: TransferPlan, memory: DeviceAccess
    ) -> None:
        """Read what a plan needs of some objects of a part, whose tables of ranges are the same."""
        good = numbers[self._status[part.positions[numbers]] == _OK]
        if not len(good) or not len(plan.spans.base):
            return
        ranges = range_numbers(part.headers, int(good[0]), plan)
        if self._state.is_staged or ranges is None:
            self._read_staged(part, list(self._chunks(part, good, ranges, plan)), memory)
        else:
            self._read_direct(part, good, ranges, plan)

    def _read_direct(
        self, part: FoundObjects, numbers: IndexArray, ranges: IndexArray, plan: TransferPlan
    ) -> None:
        """Let the bytes land in pool memory, and compare them there; what is wrong there is not reported as right.

        Some objects are compared while the next ones land.
        """
        size = int(plan.range_bytes.sum())
        total = len(numbers) * size
        each = max(1, self._state.read_bytes(total) // size)
        landed: tuple[IndexArray, PoolRanges] | None = None
        with Aside(total) as aside:
            for chosen in parts_of(len(numbers), each):
                some = numbers[chosen]
                places = PoolRanges(_pages_of(plan, part.positions[some]))
                land = partial(self._land, part, some, places)
                if landed is None:
                    land()
                else:
                    aside.begin(land)
                    self._compare(part, *landed, ranges)
                    aside.finish()
                landed = some, places
            if landed is not None:
                self._compare(part, *landed, ranges)

    def _land(self, part: FoundObjects, numbers: IndexArray, places: PoolRanges) -> None:
        target = self._pins.target
        starts = self._pins.offsets[part.positions[numbers]] + part.header_bytes
        local, remote = places.descriptors(starts, target)
        self._state.reads.move(Operation.READ, local, remote, target, memory=places.memory)

    def _compare(
        self, part: FoundObjects, numbers: IndexArray, places: PoolRanges, ranges: IndexArray
    ) -> None:
        """Compare what landed with the checksums of its objects, where there are any."""
        if not self._state.has_checksums:
            return
        expected = part.headers.checksums[numbers[:, None], ranges]
        is_right = (places.sums() == expected).all(axis=1)
        if not is_right.all():
            self._fail(part.positions[numbers[~is_right]], _CORRUPT)

    def _read_staged(
        self, part: FoundObjects, chunks: Sequence[_Chunk], memory: DeviceAccess
    ) -> None:
        total = sum(chunk.size for chunk in chunks)
        if total > self._state.read_bytes(total):
            self._read_chunks(part, chunks, memory)
            return
        for chunk in chunks:
            self._read_chunk(part, chunk, memory)

    def _read_chunks(
        self, part: FoundObjects, chunks: Sequence[_Chunk], memory: DeviceAccess
    ) -> None:
        """Read into host memory, compare, and copy what is right: some of it while the next bytes are read."""
        blocks, most = self._state.reads.blocks, max(chunk.size for chunk in chunks)
        with ExitStack() as lent, Aside(most * len(chunks)) as aside:
            halves = [lent.enter_context(blocks.borrow(most)) for _ in chunks[:2]]
            self._fetch_chunk(part, chunks[0], chunks[0].row_bytes, halves[0])
            for at, chunk in enumerate(chunks):
                for following in chunks[at + 1 : at + 2]:
                    half = halves[(at + 1) % 2]
                    fetch = partial(self._fetch_chunk, part, following, following.row_bytes, half)
                    aside.begin(fetch)
                rows = halves[at % 2].rows(len(chunk.numbers), chunk.row_bytes)
                self._land_chunk(part, chunk, ReadRows.of(rows).behind(chunk.lead), memory)
                aside.finish()

    def _read_chunk(self, part: FoundObjects, chunk: _Chunk, memory: DeviceAccess) -> None:
        """Read into host memory, or find it there, since an earlier read has brought it along."""
        windows, begun = self._windows, chunk.first + chunk.lead
        end = begun + chunk.piece.size
        follows = windows.follows(begun, end)
        window = windows.take(part, chunk.numbers, begun, end)
        if window is None:
            window = self._opened(part, chunk, self._ahead(part, chunk) if follows else 0)
        try:
            self._land_chunk(part, chunk, window.rows.behind(begun - window.first), memory)
        except BaseException:
            window.loan.end()
            raise
        windows.put(window, used=round_up(end, self._state.alignment))

    def _ahead(self, part: FoundObjects, chunk: _Chunk) -> int:
        """Return how many bytes of each object to read at once where one read follows another."""
        end = round_up(part.header_bytes + self._wanted.object_bytes, self._state.alignment)
        most = self._state.read_bytes(0) // len(chunk.numbers)
        return min(end - chunk.first, most // self._state.alignment * self._state.alignment)

    def _opened(self, part: FoundObjects, chunk: _Chunk, ahead: int) -> Window:
        """Read a chunk, and what is behind it of each object up to so many bytes."""
        row_bytes = max(chunk.row_bytes, ahead)
        count = len(chunk.numbers)
        loan = self._state.reads.blocks.lend(count * row_bytes)
        try:
            self._fetch_chunk(part, chunk, row_bytes, loan.block)
        except BaseException:
            loan.end()
            raise
        return Window(
            part=part,
            numbers=chunk.numbers,
            first=chunk.first,
            rows=ReadRows.of(loan.block.rows(count, row_bytes)),
            loan=loan,
        )

    def _fetch_chunk(self, part: FoundObjects, chunk: _Chunk, row_bytes: int, block: Block) -> None:
        offsets = self._pins.offsets[part.positions[chunk.numbers]] + chunk.first
        self._fetch(offsets, row_bytes, block)

    def _land_chunk(
        self, part: FoundObjects, chunk: _Chunk, rows: ReadRows, memory: DeviceAccess
    ) -> None:
        """Copy a chunk into the pools, and drop objects that are not right."""
        is_right = self._landed(part, chunk, rows, memory)
        if not is_right.all():
            self._fail(part.positions[chunk.numbers[~is_right]], _CORRUPT)

    def _chunks(
        self,
        part: FoundObjects,
        numbers: IndexArray,
        ranges: IndexArray | None,
        plan: TransferPlan,
    ) -> Iterator[_Chunk]:
        """Yield what is read at a time: some neighbouring ranges of some objects."""
        alignment, first = self._state.alignment, int(numbers[0])
        limit = self._state.read_bytes(len(numbers) * int(plan.range_bytes.sum()))
        for piece, its_ranges in _pieces(part.headers, first, ranges, plan, limit):
            begun = part.header_bytes + piece.start
            lead = begun % alignment
            row_bytes = round_up(lead + piece.size, alignment)
            for chosen in parts_of(len(numbers), max(1, limit // row_bytes)):
                some = numbers[chosen]
                yield _Chunk(
                    numbers=some,
                    first=begun - lead,
                    row_bytes=row_bytes,
                    lead=lead,
                    piece=piece,
                    ranges=its_ranges,
                )

    def _landed(
        self, part: FoundObjects, chunk: _Chunk, rows: ReadRows, memory: DeviceAccess
    ) -> NDArray[np.bool_]:
        """Copy a chunk into the pools, and return which of its objects are right: [objects]."""
        piece, numbers, ranges = chunk.piece, chunk.numbers, chunk.ranges
        chosen = _pages_of(piece.plan, part.positions[numbers])
        if not self._state.has_checksums:
            memory.copy_in(chosen, rows.objects(piece))
            return np.ones(len(numbers), dtype=np.bool_)
        sums = None if ranges is None else room_for_sums(chosen, memory, checksum)
        if ranges is not None and sums is not None:  # one pass over the bytes, and not two
            memory.copy_in(chosen, rows.objects(piece, sums=sums))
            expected = part.headers.checksums[numbers[:, None], ranges]
            return np.asarray((expected == sums.T).all(axis=1))
        views = rows.views(piece.size)
        found = which_are_right(part.headers, numbers, piece, views, checksum=checksum)
        is_right = np.asarray(found)
        if is_right.all():
            memory.copy_in(chosen, rows.objects(piece))
        elif is_right.any():
            right = np.flatnonzero(is_right)
            memory.copy_in(chosen.select(right), rows.objects(piece, chosen=right))
        return is_right


def _pieces(
    headers: FrameHeaders, number: int, ranges: IndexArray | None, plan: TransferPlan, limit: int
) -> Iterator[tuple[Piece, IndexArray | None]]:
    """Yield what a plan needs of an object as pieces of at most `limit` bytes, where that can be.

    Args:
        headers: of objects.
        number: of one of them.
        ranges: [spans] of `range_numbers`.
        plan: what is needed.
        limit: see above.

    Yields:
        A piece, and which range of the object each of its spans is; None where one is a part of several.
    """
    size = int(plan.range_bytes.sum())
    if ranges is not None and size <= limit and (np.diff(ranges) == 1).all():
        first, behind = int(ranges[0]), int(ranges[-1]) + 1  # one piece, as most plans are
        start = int(headers.offsets[number, first])
        yield Piece(start=start, size=size, frames=slice(first, behind), plan=plan), ranges
        return
    for piece in cut_plan(headers, number, plan, limit):
        yield piece, range_numbers(headers, number, piece.plan)


def _pages_of(plan: TransferPlan, positions: IndexArray) -> TransferPlan:
    """Return the plan of some pages, ascending; itself where these are all."""
    return plan if len(positions) == plan.num_pages else plan.select(positions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chunk:
    """Bytes that are read at a time, as many of each object."""

    numbers: IndexArray
    """[objects] which ones of their part."""
    first: int
    """Where reading begins in each object's frame."""
    row_bytes: int
    """Bytes that are read of each."""
    lead: int
    """Bytes in front of what was wanted."""
    piece: Piece
    ranges: IndexArray | None
    """[spans] which range of an object each span of the piece is; None where one is a part of several."""

    @property
    def size(self) -> int:
        """Bytes of all objects."""
        return len(self.numbers) * self.row_bytes
