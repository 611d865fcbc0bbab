"""A read session pins its objects, checks their headers once, and all checksums before it says that bytes are right."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess
from kvlinker.errors import StoreError
from kvlinker.framed_objects import FoundObjects, WantedObjects, sort_values
from kvlinker.frames import PREFIX_BYTES
from kvlinker.named_values import parts_of
from kvlinker.open_reads import OpenReads
from kvlinker.plans import TransferPlan
from kvlinker.store import ReadRequest, ReadSession, ReadStatus
from kvlinker_nixl.agents import Operation
from kvlinker_nixl.aside import Aside
from kvlinker_nixl.depots import ABSENT
from kvlinker_nixl.pool_memory import PoolRanges, range_numbers
from kvlinker_nixl.space import round_up
from kvlinker_nixl.staged_reads import StagedReads, fetch
from kvlinker_nixl.state import SlotState, checksum

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
        self._open_reads = OpenReads(self._let_go)
        self._staged = StagedReads(
            state,
            self._pins,
            reading=partial(self._open_reads.reading, "read ahead"),
            damaged=partial(self._fail, status=_CORRUPT),
        )
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
        self._staged.leave()

    def _let_go(self) -> None:
        self._staged.close()
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
                fetch(self._state, self._pins, offsets, row_bytes, block)
                rows = block.rows(len(offsets), row_bytes)
                yield from [row[:size].tobytes() for row in rows]

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
            self._staged.copy(part, good, ranges, plan, memory)
        else:
            self._read_direct(part, good, ranges, plan)

    def _read_direct(
        self, part: FoundObjects, numbers: IndexArray, ranges: IndexArray, plan: TransferPlan
    ) -> None:
        """Let the bytes land in pool memory, and compare them there; what is wrong there is not reported as right.

        Some objects are compared while the next ones land.
        """
        size = int(plan.range_bytes.sum())
        each = max(1, self._state.read_bytes(len(numbers) * size) // size)
        parts = [numbers[chosen] for chosen in parts_of(len(numbers), each)]
        places = [PoolRanges(_pages_of(plan, part.positions[some])) for some in parts]
        lands = [partial(self._land, part, *pair) for pair in zip(parts, places, strict=True)]
        with Aside() as aside:
            for pair, _ in zip(zip(parts, places, strict=True), aside.in_turn(lands), strict=True):
                self._compare(part, *pair, ranges)

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


def _pages_of(plan: TransferPlan, positions: IndexArray) -> TransferPlan:
    """Return the plan of some pages, ascending; itself where these are all."""
    return plan if len(positions) == plan.num_pages else plan.select(positions)
