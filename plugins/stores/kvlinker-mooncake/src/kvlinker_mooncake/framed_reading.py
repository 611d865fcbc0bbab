"""A framed read session fetches whole objects into host memory, and compares every checksum before a byte is copied."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlinker.device import DeviceAccess
from kvlinker.framed_objects import (
    FoundObjects,
    WantedObjects,
    are_ranges_right,
    cut_plan,
    sort_values,
)
from kvlinker.frames import PREFIX_BYTES, header_bytes, read_range_count
from kvlinker.plans import TransferPlan
from kvlinker.store import ReadRequest, ReadStatus
from kvlinker_mooncake.client import Found
from kvlinker_mooncake.codes import Code
from kvlinker_mooncake.parts import CallPart
from kvlinker_mooncake.reading import MooncakeReadSession, host_objects
from kvlinker_mooncake.state import StoreState, checksum

__all__ = ["StagedReadSession"]


class StagedReadSession(MooncakeReadSession):
    """Objects with a header in front of each; damaged ones are removed."""

    def __init__(self, state: StoreState, request: ReadRequest) -> None:
        """See MooncakeReadSession."""
        super().__init__(state, request)
        self._found: dict[int, Found] = {}

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession.

        Raises:
            StoreError: the master cannot be asked.
        """
        self._check(plan)
        until = time.monotonic() + self._state.options.transfer_seconds
        for size, positions in self._look().items():
            each = max(1, self._state.options.call_bytes // size)
            for start in range(0, len(positions), each):
                chosen = positions[start : start + each]
                if time.monotonic() <= until:
                    self._read_some(chosen, size, plan, memory)
                    continue
                for at in chosen:
                    self._settle(at, Code.NOT_TRANSFERRED)
        return tuple(self._statuses)

    def _look(self) -> dict[int, list[int]]:
        """Return the positions of objects that are there, by their length with the header."""
        positions = self._good
        alike: dict[int, list[int]] = {}
        absent = []
        looked = self._state.look([self._names[at] for at in positions])
        for at, found in zip(positions, looked, strict=True):
            if found is None:
                absent.append(at)
            else:
                self._found[at] = found
                alike.setdefault(found.size, []).append(at)
        self._miss(absent)
        return alike

    def _read_some(
        self, positions: Sequence[int], size: int, plan: TransferPlan, memory: DeviceAccess
    ) -> None:
        with self._state.blocks.block(len(positions) * size) as block:
            rows = block[: len(positions) * size].reshape(len(positions), size)
            part = CallPart(owner=block)
            for row, at in enumerate(positions):
                part.add(at, self._names[at], ([rows.ctypes.data + row * size], [size], [0]))
            codes = self._state.client.get_whole(part, into_pools=False)
            came = [row for row, code in enumerate(codes) if code == size]
            for row, code in enumerate(codes):
                if code != size:
                    self._settle(positions[row], code)
            self._take(
                np.array(positions)[came],
                rows[came] if len(came) < len(rows) else rows,
                plan,
                memory,
            )

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
        request = self._request
        wanted = WantedObjects(
            keys=tuple(request.keys[at] for at in positions.tolist()),
            object_bytes=request.object_bytes,
            fingerprint=request.fingerprint,
        )
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
        header = part.header_bytes
        right: list[int] = []
        wrong: list[int] = []
        for number, row in enumerate(part.positions.tolist()):
            payload = rows[row, header:].data
            is_right = all(
                are_ranges_right(
                    part.headers,
                    number,
                    piece,
                    payload[piece.start : piece.start + piece.size],
                    checksum=checksum,
                )
                for piece in cut_plan(part.headers, number, plan, len(payload))
            )
            (right if is_right else wrong).append(row)
        self._drop([int(positions[row]) for row in wrong])
        if right:
            slots = np.array(right, dtype=np.int64)
            chosen = plan.select(positions[slots])
            memory.copy_in(chosen, host_objects(rows, slots, header_bytes=header))

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


def _header_of(row: NDArray[np.uint8]) -> bytes:
    """Return the bytes of the header that an object begins with."""
    ranges = read_range_count(row[:PREFIX_BYTES].tobytes())
    return row[: header_bytes(ranges or 0)].tobytes()
