"""A framed read session fetches whole objects into host memory, and compares every checksum of what it copies."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, room_for_sums
from kvlinker.framed_objects import (
    FoundObjects,
    Piece,
    WantedObjects,
    cut_plan,
    sort_values,
    which_rows_are_right,
)
from kvlinker.frames import PREFIX_BYTES, header_bytes, read_range_count
from kvlinker.plans import TransferPlan
from kvlinker.store import ReadRequest, ReadStatus
from kvlinker_mooncake.client import Found
from kvlinker_mooncake.codes import Code
from kvlinker_mooncake.parts import row_parts, rows_of_call
from kvlinker_mooncake.reading import TRIES, MooncakeReadSession, host_objects
from kvlinker_mooncake.state import StoreState, checksum

__all__ = ["StagedReadSession"]


class StagedReadSession(MooncakeReadSession):
    """Objects with a header in front of each; damaged ones are removed."""

    def __init__(self, state: StoreState, request: ReadRequest) -> None:
        """See MooncakeReadSession."""
        super().__init__(state, request)
        self._found: dict[int, Found] = {}
        self._wanted = WantedObjects(
            keys=request.keys,
            object_bytes=request.object_bytes,
            fingerprint=request.fingerprint,
        )

    def _read(self, plan: TransferPlan, memory: DeviceAccess) -> None:
        until = time.monotonic() + self._state.options.transfer_seconds
        for size, positions in self._look().items():
            each = rows_of_call(size, self._state.options.call_bytes)
            for start in range(0, len(positions), each):
                chosen = positions[start : start + each]
                if time.monotonic() <= until:
                    self._read_some(chosen, size, plan, memory, until)
                    continue
                self._settle_all(chosen, Code.NOT_TRANSFERRED)

    def _let_go(self) -> None:
        """Do nothing: whole objects are leased for one call each."""

    def _look(self) -> dict[int, list[int]]:
        """Return the positions of objects that are there, by their length with the header.

        What is too long or too short for an object with a header is none of ours, and not fetched.
        """
        positions = self._good
        most = self._request.object_bytes + self._wanted.max_header_bytes
        alike: dict[int, list[int]] = {}
        absent = []
        looked = self._state.look([self._names[at] for at in positions])
        for at, found in zip(positions, looked, strict=True):
            if found is None or not self._request.object_bytes < found.size <= most:
                absent.append(at)
            else:
                self._found[at] = found
                alike.setdefault(found.size, []).append(at)
        self._miss(absent)
        return alike

    def _read_some(
        self,
        positions: Sequence[int],
        size: int,
        plan: TransferPlan,
        memory: DeviceAccess,
        until: float,
    ) -> None:
        with self._state.blocks.block(len(positions) * size) as block:
            rows = block[: len(positions) * size].reshape(len(positions), size)
            starts = [(at, rows.ctypes.data + row * size) for row, at in enumerate(positions)]
            codes = self._get(starts, size, block, until)
            for at in positions:
                if codes[at] != size:
                    self._settle(at, codes[at])
            came = [row for row, at in enumerate(positions) if codes[at] == size]
            self._take(
                np.array(positions)[came],
                rows[came] if len(came) < len(rows) else rows,
                plan,
                memory,
            )

    def _get(
        self, starts: Sequence[tuple[int, int]], size: int, owner: NDArray[np.uint8], until: float
    ) -> dict[int, int]:
        """Read objects to addresses in host memory, and return bytes or codes by position."""
        limit = self._state.options.call_bytes
        codes: dict[int, int] = {at: Code.LEASE_OVER for at, _ in starts}
        for _ in range(TRIES):
            late = [start for start in starts if codes[start[0]] == Code.LEASE_OVER]
            if time.monotonic() > until:
                break
            for part in row_parts(late, self._names, size, call_bytes=limit, owner=owner):
                found = self._state.client.get_whole(part, into_pools=False)
                codes.update(zip(part.positions, found, strict=True))
        return codes

    def _take(
        self,
        positions: NDArray[np.int64],
        rows: NDArray[np.uint8],
        plan: TransferPlan,
        memory: DeviceAccess,
    ) -> None:
        """Sort what came by its headers, and copy what is right."""
        if not len(positions):
            return
        wanted = self._wanted.some(positions.tolist())
        # An object of another length has a header too, which says so.
        beginnings = [_header_of(row) for row in rows]
        look = sort_values(wanted, beginnings, [rows.shape[1]] * len(rows), checksum=checksum)
        self._miss([int(positions[at]) for at in [*look.absent, *look.others]])
        self._drop([int(positions[at]) for at in look.damaged])
        for part in look.parts:
            self._copy(part, positions, rows, plan, memory)

    def _copy(
        self,
        part: FoundObjects,
        positions: NDArray[np.int64],
        rows: NDArray[np.uint8],
        plan: TransferPlan,
        memory: DeviceAccess,
    ) -> None:
        for numbers in part.alike():
            for piece in cut_plan(part.headers, int(numbers[0]), plan, plan.object_bytes):
                chosen = piece.plan.select(positions[part.positions[numbers]])
                is_right = self._copy_piece(part, numbers, piece, rows, chosen, memory)
                if not is_right.all():
                    wrong = part.positions[numbers[~is_right]]
                    self._drop(positions[wrong].tolist())

    @staticmethod
    def _copy_piece(
        part: FoundObjects,
        numbers: IndexArray,
        piece: Piece,
        rows: NDArray[np.uint8],
        plan: TransferPlan,
        memory: DeviceAccess,
    ) -> NDArray[np.bool_]:
        """Copy what lies in a piece of some objects, and return which of them are right: [objects].

        Where a copy makes checksums, the bytes are looked at once, and what is wrong has been copied, and is told;
        otherwise it is not copied.
        """
        slots, header = part.positions[numbers], part.header_bytes
        ranges = _ranges_of(part, int(numbers[0]), piece.plan)
        sums = None if ranges is None else room_for_sums(plan, memory, checksum)
        if sums is not None:
            memory.copy_in(plan, host_objects(rows, slots, header_bytes=header, sums=sums))
            expected = part.headers.checksums[numbers[:, None], ranges]
            return np.asarray((expected == sums.T).all(axis=1), dtype=np.bool_)
        begin = header + piece.start
        held = rows if len(slots) == len(rows) else rows[slots]
        is_right = which_rows_are_right(
            part.headers, numbers, piece, held[:, begin : begin + piece.size], checksum=checksum
        )
        if is_right.any():
            right = np.flatnonzero(is_right)
            objects = host_objects(rows, slots[right], header_bytes=header)
            memory.copy_in(plan if is_right.all() else plan.select(right), objects)
        return is_right

    def _drop(self, positions: Sequence[int]) -> None:
        """Remove objects that are not what was written, and say so; those that went meanwhile are misses."""
        now = self._state.look([self._names[at] for at in positions])
        wrong = []
        for at, one in zip(positions, now, strict=True):
            if self._found[at].is_still(one):
                self._statuses[at] = ReadStatus.CORRUPT
                wrong.append(at)
            else:
                self._statuses[at] = ReadStatus.MISS
        self._state.count("corrupt", len(wrong))
        self._state.count("vanished", len(positions) - len(wrong))
        self._state.removals.remove([self._names[at] for at in wrong], wait=False)


def _ranges_of(part: FoundObjects, number: int, plan: TransferPlan) -> IndexArray | None:
    """Return which range of an object each span of a plan is, [spans]; None where one is a part of several."""
    offsets, sizes = part.headers.offsets[number], part.headers.sizes[number]
    found = np.minimum(np.searchsorted(offsets, plan.spans.offset), len(offsets) - 1)
    is_same = (offsets[found] == plan.spans.offset) & (sizes[found] == plan.range_bytes)
    return found if is_same.all() else None


def _header_of(row: NDArray[np.uint8]) -> bytes:
    """Return the bytes of the header that an object begins with."""
    ranges = read_range_count(row[:PREFIX_BYTES].tobytes())
    return row[: header_bytes(ranges or 0)].tobytes()
