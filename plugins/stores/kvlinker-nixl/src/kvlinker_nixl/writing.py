"""A write finds room, moves headers and payloads there, asks for permission, and lets the objects be found."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess
from kvlinker.errors import StoreError
from kvlinker.framed_objects import frame_pages
from kvlinker.frames import FrameLayout, encode_headers
from kvlinker.named_values import parts_of
from kvlinker.plans import TransferPlan
from kvlinker.store import ObjectKey, WriteBatch, WriteStatus
from kvlinker_nixl.agents import Operation
from kvlinker_nixl.aside import LEAST_BYTES, Aside, Begun
from kvlinker_nixl.blocks import Block
from kvlinker_nixl.depots import EXISTS, Reservation
from kvlinker_nixl.moving import LateTransferError, descriptors
from kvlinker_nixl.pool_memory import PoolRanges
from kvlinker_nixl.space import round_up
from kvlinker_nixl.state import SlotState, checksum

__all__ = ["write_batches"]

_BLOCKS = 3
"""One is filled while another one is written, and a third waits for that."""
_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class _Work:
    """What one batch needs."""

    batch: WriteBatch
    layout: FrameLayout
    statuses: list[WriteStatus]
    twins: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Position to the batch and position where the call names the same key first."""
    asked: list[int] = field(default_factory=list)
    """Positions that room was asked for, in the reservation's order."""
    reservation: Reservation | None = None

    @property
    def frame_bytes(self) -> int:
        """Bytes of a header and a payload."""
        return self.layout.header_bytes + self.layout.payload_bytes


def write_batches(
    state: SlotState,
    batches: Sequence[WriteBatch],
    memory: DeviceAccess,
    may_publish: Callable[[], bool],
) -> tuple[tuple[WriteStatus, ...], ...]:
    """See Store.write."""
    works = [
        _Work(
            batch=batch,
            layout=FrameLayout.of_ranges(batch.plan.spans.offset, batch.plan.range_bytes),
            statuses=[WriteStatus.FULL] * len(batch.keys),
        )
        for batch in batches
        if batch.keys
    ]
    _Write(state, works).run(memory, may_publish)
    done = iter(works)
    return tuple(tuple(next(done).statuses) if batch.keys else () for batch in batches)


class _Write:
    """One call of `write`."""

    def __init__(self, state: SlotState, works: Sequence[_Work]) -> None:
        self._state = state
        self._works = works

    def run(self, memory: DeviceAccess, may_publish: Callable[[], bool]) -> None:
        """Write, and set the statuses."""
        try:
            self._reserve()
            for work in self._works:
                self._move(work, memory)
            is_allowed = may_publish()
            for work in self._works:
                self._end(work, is_allowed=is_allowed)
        finally:
            for work in self._works:
                if work.reservation is not None:
                    self._state.depot.discard(work.reservation)
        self._answer_twins()

    def _reserve(self) -> None:
        first: dict[ObjectKey, tuple[int, int]] = {}
        for number, work in enumerate(self._works):
            if work.frame_bytes > self._state.depot.max_frame_bytes:
                continue  # it stays FULL
            for at, key in enumerate(work.batch.keys):
                if key in first:
                    work.twins[at] = first[key]
                else:
                    first[key] = (number, at)
                    work.asked.append(at)
            keys = [work.batch.keys[at] for at in work.asked]
            work.reservation = self._state.depot.reserve(keys, work.frame_bytes)
            for at, offset in zip(work.asked, work.reservation.offsets.tolist(), strict=True):
                if offset == EXISTS:
                    work.statuses[at] = WriteStatus.EXISTS

    def _answer_twins(self) -> None:
        for work in self._works:
            for at, (number, twin) in work.twins.items():
                status = self._works[number].statuses[twin]
                is_written = status is WriteStatus.WRITTEN
                work.statuses[at] = WriteStatus.EXISTS if is_written else status

    # ---- bytes ----------------------------------------------------------------------------------

    def _move(self, work: _Work, memory: DeviceAccess) -> None:
        reservation = work.reservation
        if reservation is None:
            return
        has_room = reservation.offsets >= 0
        positions = np.array(work.asked, dtype=np.int64)[has_room]
        self._state.count("full", int((~has_room & (reservation.offsets != EXISTS)).sum()))
        if not len(positions):
            return
        if self._state.is_staged:
            self._move_staged(work, reservation, positions, reservation.offsets[has_room], memory)
        else:
            self._move_direct(work, reservation, positions, reservation.offsets[has_room])

    def _move_staged(
        self,
        work: _Work,
        reservation: Reservation,
        positions: IndexArray,
        offsets: IndexArray,
        memory: DeviceAccess,
    ) -> None:
        """Frame objects in host memory, and move the frames: some of them while the next ones are framed."""
        line, size = self._state.writes, work.frame_bytes
        row_bytes = round_up(size, self._state.alignment)
        each = max(1, self._state.write_bytes(len(positions) * row_bytes) // row_bytes)
        parts = list(parts_of(len(positions), each))
        most = len(positions[parts[0]]) * row_bytes
        with ExitStack() as lent, Aside() as aside:
            blocks = [lent.enter_context(line.blocks.borrow(most)) for _ in parts[:_BLOCKS]]
            begun: deque[Begun] = deque()
            for at, part in enumerate(parts):
                if len(begun) == _BLOCKS:
                    begun.popleft().finish()
                block, count = blocks[at % _BLOCKS], len(positions[part])
                rows = block.rows(count, row_bytes)
                frame_pages(
                    work.batch, work.layout, positions[part], rows, memory, checksum=checksum
                )
                rows[:, size:] = 0
                addresses = block.address + np.arange(count) * row_bytes
                write = partial(
                    self._write, work, reservation, (addresses, offsets[part]), row_bytes, block
                )
                if len(parts) == 1:
                    write()
                else:
                    begun.append(aside.begin(write))
            while begun:
                begun.popleft().finish()

    def _write(
        self,
        work: _Work,
        reservation: Reservation,
        places: tuple[IndexArray, IndexArray],
        size: int,
        block: Block,
    ) -> None:
        """Move as many bytes from addresses in a block to each offset; what is late keeps its room until it is over."""
        if work.reservation is not reservation:
            return  # one before is late and has the room until it is over
        line, target = self._state.writes, reservation.target
        addresses, offsets = places
        try:
            line.move(
                Operation.WRITE,
                descriptors(addresses, size, 0),
                descriptors(offsets, size, target.device),
                target,
                block=block,
            )
        except LateTransferError:
            # Others would be written over in room that is given back.
            work.reservation = None
            line.blocks.when_over(block, lambda: self._state.depot.discard(reservation))
            raise

    def _move_direct(
        self, work: _Work, reservation: Reservation, positions: IndexArray, offsets: IndexArray
    ) -> None:
        """Move payloads from where they are in pool memory while their checksums are made, and headers from a block."""
        plan = work.batch.plan
        chosen = plan if len(positions) == plan.num_pages else plan.select(positions)
        target, line = reservation.target, self._state.writes
        places = PoolRanges(chosen)
        local, remote = places.descriptors(offsets + work.layout.header_bytes, target)
        move = partial(line.move, Operation.WRITE, local, remote, target, memory=places.memory)
        with Aside() as aside:
            begun = aside.begin(move) if chosen.total_bytes >= LEAST_BYTES else None
            headers = encode_headers(
                work.layout,
                [work.batch.keys[at] for at in positions.tolist()],
                work.batch.fingerprint,
                self._sums(chosen, places),
                checksum=checksum,
            )
            if begun is None:
                move()
            else:
                begun.finish()
        with line.blocks.borrow(headers.nbytes) as block:
            block.rows(*headers.shape)[:] = headers
            addresses = block.address + np.arange(len(headers)) * headers.shape[1]
            self._write(work, reservation, (addresses, offsets), headers.shape[1], block)

    def _sums(self, plan: TransferPlan, places: PoolRanges) -> NDArray[np.uint64]:
        """Return checksums in the order of the layout's ranges: [objects, ranges]."""
        if not self._state.has_checksums:
            return np.zeros((plan.num_pages, len(plan.spans.base)), dtype=np.uint64)
        return places.sums()[:, np.argsort(plan.spans.offset, kind="stable")]

    # ---- publishing -----------------------------------------------------------------------------

    def _end(self, work: _Work, *, is_allowed: bool) -> None:
        """Let the objects of a batch be found, or not, and set their statuses."""
        if work.reservation is None:
            return
        has_room = work.reservation.offsets >= 0
        if not is_allowed:
            for at in np.array(work.asked, dtype=np.int64)[has_room].tolist():
                work.statuses[at] = WriteStatus.DISCARDED
            self._state.count("discarded", int(has_room.sum()))
            return
        try:
            is_written = self._state.depot.publish(work.reservation)
        except StoreError as error:
            # What was published is there and said to be; the rest is said to have failed.
            _log.warning("%s: not everything was stored: %s", self._state.writes, error)
            self._state.count("errors")
            for at in np.array(work.asked, dtype=np.int64)[has_room].tolist():
                work.statuses[at] = WriteStatus.FAILED
            return
        for at, was_room, is_new in zip(work.asked, has_room.tolist(), is_written, strict=True):
            if was_room:
                work.statuses[at] = WriteStatus.WRITTEN if is_new else WriteStatus.EXISTS
