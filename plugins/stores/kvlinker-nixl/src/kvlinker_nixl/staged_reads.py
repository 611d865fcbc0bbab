"""Staged reads bring bytes into host memory, compare them with their checksums, and copy what is right to its pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, room_for_sums
from kvlinker.errors import StoreError
from kvlinker.framed_objects import FoundObjects, Piece, cut_plan, which_are_right
from kvlinker.frames import FrameHeaders
from kvlinker.named_values import parts_of
from kvlinker.plans import TransferPlan
from kvlinker_nixl.agents import Operation
from kvlinker_nixl.aside import Aside
from kvlinker_nixl.blocks import Block
from kvlinker_nixl.depots import Pins
from kvlinker_nixl.moving import descriptors
from kvlinker_nixl.pool_memory import range_numbers
from kvlinker_nixl.runs import Reader, Runs
from kvlinker_nixl.space import round_up
from kvlinker_nixl.state import SlotState, checksum
from kvlinker_nixl.windows import Chunk, ReadRows, Window

__all__ = ["StagedReads", "fetch"]

_LEAVE_SECONDS = 1.0
"""How long whoever closes a session waits for what is read ahead; behind a server that hangs, its thread goes alone."""


def fetch(state: SlotState, pins: Pins, offsets: IndexArray, row_bytes: int, block: Block) -> None:
    """Read as many bytes at each offset of the space into the rows of a block.

    Raises:
        StoreError: they cannot be read.
    """
    target = pins.target
    addresses = block.address + np.arange(len(offsets), dtype=np.int64) * row_bytes
    state.reads.move(
        Operation.READ,
        descriptors(addresses, row_bytes, 0),
        descriptors(offsets, row_bytes, target.device),
        target,
        block=block,
    )


class StagedReads(Reader):
    """The staged reads of one session; several threads may read at once."""

    def __init__(
        self,
        state: SlotState,
        pins: Pins,
        *,
        reading: Callable[[], AbstractContextManager[None]],
        damaged: Callable[[IndexArray], None],
    ) -> None:
        """Begin with none.

        Args:
            state: of the store.
            pins: the session's objects.
            reading: keeps them pinned for the length of a block.
            damaged: is told the positions of objects that are not what their checksums say.
        """
        self.window_bytes = state.window_bytes
        self._state = state
        self._pins = pins
        self._reading = reading
        self._damaged = damaged
        self._runs = Runs(self)
        self._aside = Aside()

    def copy(
        self,
        part: FoundObjects,
        numbers: IndexArray,
        ranges: IndexArray | None,
        plan: TransferPlan,
        memory: DeviceAccess,
    ) -> None:
        """Read what a plan needs of some objects of a part, and copy what is right.

        Args:
            part: of the objects.
            numbers: [objects] which ones of the part, whose tables of ranges are the same.
            ranges: [spans] of `range_numbers`.
            plan: of the part's request.
            memory: copies.

        Raises:
            StoreError: bytes cannot be read.
        """
        chunks = list(self._chunks(part, numbers, ranges, plan))
        run = self._runs.take(part, numbers, chunks)
        try:
            for at, chunk in enumerate(chunks):
                rows = run.rows(at)
                chosen = replace(chunk.piece.plan, pages=run.pages(at))
                self._land(part, chunk, rows, chosen, memory)
                run.used(at)
        except BaseException:
            run.drop()
            raise
        self._runs.put(run)

    def leave(self) -> None:
        """Read nothing ahead from now on, and wait for what was, but for no server that hangs. Idempotent."""
        self._aside.stop()
        self._aside.join(_LEAVE_SECONDS)

    def close(self) -> None:
        """Let go of all memory, now or when nobody reads into it any more. Idempotent."""
        self._runs.close()

    # ---- reading --------------------------------------------------------------------------------

    def read(self, part: FoundObjects, numbers: IndexArray, first: int, end: int) -> Window:
        """See Reader."""
        window, read = self._prepare(part, numbers, first, end)
        try:
            read()
        except BaseException:
            window.drop()
            raise
        return window

    def begin(self, part: FoundObjects, numbers: IndexArray, first: int, end: int) -> Window | None:
        """See Reader."""
        try:
            window, read = self._prepare(part, numbers, first, end)
        except StoreError:  # of memory for what nobody has asked for
            return None
        begun = self._aside.offer(partial(self._read_ahead, read))
        if begun is None:
            window.drop()
            return None
        window.begun = begun
        return window

    def _read_ahead(self, read: Callable[[], None]) -> None:
        with self._reading():
            read()

    def _prepare(
        self, part: FoundObjects, numbers: IndexArray, first: int, end: int
    ) -> tuple[Window, Callable[[], None]]:
        """Return a window of some objects between two offsets in their frames, and what fills it."""
        alignment = self._state.alignment
        first -= first % alignment
        count, row_bytes = len(numbers), round_up(end - first, alignment)
        loan = self._state.reads.blocks.lend(count * row_bytes)
        offsets = self._pins.offsets[part.positions[numbers]] + first
        read = partial(fetch, self._state, self._pins, offsets, row_bytes, loan.block)
        return Window(first=first, count=count, row_bytes=row_bytes, loan=loan), read

    def _chunks(
        self,
        part: FoundObjects,
        numbers: IndexArray,
        ranges: IndexArray | None,
        plan: TransferPlan,
    ) -> Iterator[Chunk]:
        """Yield what is read at a time: some neighbouring ranges of some objects."""
        alignment, first = self._state.alignment, int(numbers[0])
        limit = self._state.read_bytes(len(numbers) * int(plan.range_bytes.sum()))
        for piece, its_ranges in _pieces(part.headers, first, ranges, plan, limit):
            begun = part.header_bytes + piece.start
            lead = begun % alignment
            row_bytes = round_up(lead + piece.size, alignment)
            for chosen in parts_of(len(numbers), max(1, limit // row_bytes)):
                yield Chunk(
                    chosen=chosen,
                    numbers=numbers[chosen],
                    first=begun - lead,
                    row_bytes=row_bytes,
                    lead=lead,
                    piece=piece,
                    ranges=its_ranges,
                )

    # ---- landing --------------------------------------------------------------------------------

    def _land(
        self,
        part: FoundObjects,
        chunk: Chunk,
        rows: ReadRows,
        chosen: TransferPlan,
        memory: DeviceAccess,
    ) -> None:
        """Copy a chunk into the pools, and tell which of its objects are not right."""
        is_right = self._landed(part, chunk, rows, chosen, memory)
        if not is_right.all():
            self._damaged(part.positions[chunk.numbers[~is_right]])

    def _landed(
        self,
        part: FoundObjects,
        chunk: Chunk,
        rows: ReadRows,
        chosen: TransferPlan,
        memory: DeviceAccess,
    ) -> NDArray[np.bool_]:
        """Copy a chunk into the pools, and return which of its objects are right: [objects]."""
        piece, numbers, ranges = chunk.piece, chunk.numbers, chunk.ranges
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
