"""A direct read session moves objects straight into the pools: layer by layer by a session of the client, or whole.

The client takes a lease for a session or a get, and fails both when it is over before the bytes are there, so that
memory which was given to another object meanwhile is never taken for this one's.

A lease that lasts by the clock is not enough. Memory goes to others before that where a master was started anew, which
knows of no leases; where it took a segment for dead that goes on; and where somebody removes by force. Another writer's
bytes land there in less than a millisecond from then on. So an answer of the master says nothing of bytes that came
after it was asked, and it is asked once more behind the last byte of every read: what is not where it was, in the same
length, is a miss. That is one round trip for each layer, beside which the rest of a read is little. It misses one
case: an object that went during the read and is back in its place, with another's bytes there in between.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import (
    StoreClosedError,
    UnsupportedOperationError,
)
from kvlinker.open_reads import OpenReads
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker.store import ReadRequest, ReadSession, ReadStatus
from kvlinker_mooncake.client import Found
from kvlinker_mooncake.codes import ABSENT, WHOLE_ONLY, Code
from kvlinker_mooncake.parts import MAX_BUFFERS, CallPart, buffers_of, parts_of
from kvlinker_mooncake.state import StoreState

__all__ = ["TRIES", "DirectReadSession", "MooncakeReadSession", "host_objects"]

TRIES = 4
"""How often bytes are asked for whose lease was over before they were there: a machine may be busy."""
_MAX_KEPT = 256 << 20
"""Bytes of whole objects that a session keeps in host memory, whose layers cannot be read alone."""


class MooncakeReadSession(ReadSession):
    """Objects that were asked for, and what became of each."""

    def __init__(self, state: StoreState, request: ReadRequest) -> None:
        """Note what is asked for; the master is asked with the first read."""
        self._state = state
        self._request = request
        self._names = state.names.of_objects(request.keys)
        self._lock = threading.Lock()
        self._open_reads = OpenReads(self._let_go)
        self._has_looked = False
        self._statuses = [ReadStatus.OK] * len(request.keys)

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession; it returns when nothing is written into pool memory any more.

        Raises:
            StoreError: the master cannot be asked.
        """
        self._check(plan)
        with self._open_reads.reading(plan.pool):
            self._read(plan, memory)
            return tuple(self._statuses)

    @abstractmethod
    def _read(self, plan: TransferPlan, memory: DeviceAccess) -> None:
        """Read what a plan that was checked needs of all objects, and note what became of each."""

    @property
    def _good(self) -> list[int]:
        """Positions of objects of which nothing is wrong so far."""
        if self._statuses.count(ReadStatus.OK) == len(self._statuses):
            return list(range(len(self._statuses)))
        return [at for at, status in enumerate(self._statuses) if status is ReadStatus.OK]

    def _check(self, plan: TransferPlan) -> None:
        self._state.client.calls.check_open()
        self._request.check(plan)
        if not self._state.ranged and not _is_whole(plan):
            msg = (
                f"pool {plan.pool!r}: {self._state.client.calls} reads whole objects here, and was asked for a "
                f"part of them; ask its capabilities, or open it with reads='ranged' and staged=False"
            )
            raise UnsupportedOperationError(msg)

    def _settle(self, position: int, code: int) -> None:
        """Note why an object was not read."""
        is_absent = code in ABSENT
        self._statuses[position] = ReadStatus.MISS if is_absent else ReadStatus.FAILED
        self._state.count("vanished" if is_absent else "errors")

    def _settle_all(self, positions: Sequence[int], code: int) -> None:
        for at in positions:
            self._settle(at, code)

    def _miss(self, positions: Sequence[int]) -> None:
        for at in positions:
            self._statuses[at] = ReadStatus.MISS
        self._state.count("missed", len(positions))

    def close(self) -> None:
        """See ReadSession; reads that are under way go on, and what they need stays until they are over."""
        self._open_reads.close()

    @abstractmethod
    def _let_go(self) -> None:
        """Let go of the objects: no read is under way, and none follows."""


class DirectReadSession(MooncakeReadSession):
    """Objects whose bytes go where they belong without a copy in between."""

    def __init__(self, state: StoreState, request: ReadRequest) -> None:
        """See MooncakeReadSession."""
        super().__init__(state, request)
        self._found: dict[int, Found] = {}
        self._whole_only: set[int] = set()
        self._started: set[int] = set()
        self._has_started = False
        """Whether there are leases on all objects that can be read by layer."""
        self._kept: dict[int, NDArray[np.uint8]] = {}

    def _read(self, plan: TransferPlan, memory: DeviceAccess) -> None:
        self._state.pools.check(plan)
        with self._lock:
            if not self._has_looked:
                self._look(self._good)
                self._has_looked = True
        until = time.monotonic() + self._state.options.transfer_seconds
        if _is_whole(plan) and buffers_of(plan) <= MAX_BUFFERS:
            self._read_whole(plan, until)
        else:
            self._read_parts(plan, memory, until)
        self._look_again()

    def _look_again(self) -> None:
        """Miss what is not where it was any more: what came may be another object's bytes.

        Leases do not outlive the master that gave them.
        """
        good = self._good
        now = self._state.look([self._names[at] for at in good])
        if now == [self._found[at] for at in good]:
            return
        gone = [at for at, one in zip(good, now, strict=True) if not self._found[at].is_still(one)]
        for at in gone:
            self._statuses[at] = ReadStatus.MISS
        self._state.count("vanished", len(gone))

    # ---- what is there --------------------------------------------------------------------------

    def _look(self, positions: Sequence[int]) -> None:
        absent = []
        looked = self._state.look([self._names[at] for at in positions])
        for at, found in zip(positions, looked, strict=True):
            if found is None or found.size != self._request.object_bytes:
                absent.append(at)
                continue
            self._found[at] = found
            if not found.in_memory:
                self._whole_only.add(at)
        self._miss(absent)

    def _start(self, positions: Sequence[int]) -> None:
        """Take leases; what is on disk alone is read whole from here on."""
        if not positions:
            return
        new = [at for at in positions if at not in self._started]
        self._started.update(new)
        self._state.client.keep_reads([self._names[at] for at in new])
        codes = self._state.client.start_reads([self._names[at] for at in positions])
        for at, code in zip(positions, codes, strict=True):
            if code in WHOLE_ONLY:
                self._whole_only.add(at)
            elif code != Code.DONE:
                self._settle(at, code)

    # ---- whole ----------------------------------------------------------------------------------

    def _read_whole(self, plan: TransferPlan, until: float) -> None:
        late = self._good
        for _ in range(TRIES):
            late = self._try_whole(plan, late, until)
        self._settle_all(late, Code.LEASE_OVER)

    def _try_whole(self, plan: TransferPlan, positions: Sequence[int], until: float) -> list[int]:
        """Read objects, and return those whose lease was over before their bytes were there."""
        late = []
        for part in self._parts(plan, positions, until):
            codes = self._state.client.get_whole(part, into_pools=True)
            if codes == part.expected:
                continue
            for at, code, size in zip(part.positions, codes, part.expected, strict=True):
                if code == Code.LEASE_OVER:
                    late.append(at)
                elif code != size:
                    self._settle(at, code)
        return late

    def _parts(
        self, plan: TransferPlan, positions: Sequence[int], until: float
    ) -> Iterator[CallPart]:
        """Yield parts one by one while there is time; what there is none for has failed."""
        limit = self._state.options.call_bytes
        for part in parts_of(plan, positions, self._names, call_bytes=limit):
            if time.monotonic() <= until:
                yield part
                continue
            self._settle_all(part.positions, Code.NOT_TRANSFERRED)

    # ---- by layer -------------------------------------------------------------------------------

    def _read_parts(self, plan: TransferPlan, memory: DeviceAccess, until: float) -> None:
        if not self._has_started:
            with self._lock:
                known = self._started | self._whole_only
                self._start([at for at in self._good if at not in known])
                self._has_started = True
        again = self._try_ranges(plan, self._ranged_ones(), until)
        if again or self._whole_only:
            self._read_others(plan, again, memory, until)

    def _read_others(
        self, plan: TransferPlan, again: list[int], memory: DeviceAccess, until: float
    ) -> None:
        """Read once more what was not read, and in another way what has no ranges."""
        for _ in range(1, TRIES):
            if not again:
                break
            # The lease is over, or another reader of the same objects has ended the client's session.
            with self._lock:
                self._look(again)
                self._start([at for at in again if self._statuses[at] is ReadStatus.OK])
            left = set(again).intersection(self._ranged_ones())
            again = self._try_ranges(plan, sorted(left), until)
        self._whole_only.update(again)
        for at in sorted(self._whole_only.intersection(self._good)):
            self._read_through_host(plan, at, memory, until)

    def _ranged_ones(self) -> list[int]:
        good, apart = self._good, self._whole_only
        return [at for at in good if at not in apart] if apart else good

    def _try_ranges(self, plan: TransferPlan, positions: Sequence[int], until: float) -> list[int]:
        """Read ranges, and return the objects that may be readable in another way."""
        again: dict[int, None] = {}
        for part in self._parts(plan, positions, until):
            codes = self._state.client.get_ranges(part)
            if codes == part.expected:
                continue
            for at, code, size in zip(part.positions, codes, part.expected, strict=True):
                if code in WHOLE_ONLY or code == Code.LEASE_OVER:
                    again[at] = None
                elif code != size:
                    self._settle(at, code)
        return list(again)

    # ---- through host memory --------------------------------------------------------------------

    def _read_through_host(
        self, plan: TransferPlan, position: int, memory: DeviceAccess, until: float
    ) -> None:
        """Read a part of an object that can be read whole alone."""
        kept = self._kept.get(position)
        if kept is None and time.monotonic() <= until:
            kept = self._fetch(position)
        if kept is None:
            self._settle(position, Code.NOT_TRANSFERRED)
            return
        slots = np.zeros(1, dtype=np.int64)
        memory.copy_in(plan.select([position]), host_objects(kept.reshape(1, -1), slots))

    def _fetch(self, position: int) -> NDArray[np.uint8] | None:
        size = self._request.object_bytes
        with self._state.blocks.block(size) as block:
            part = CallPart(owner=block)
            part.add(position, self._names[position], ([block.ctypes.data], [size], [0]))
            code = int(Code.LEASE_OVER)
            for _ in range(TRIES):
                if code == Code.LEASE_OVER:
                    (code,) = self._state.client.get_whole(part, into_pools=False)
            if code != size:
                return None
            self._state.count("read_whole")
            kept = block[:size].copy()
        if sum(one.nbytes for one in self._kept.values()) + size <= _MAX_KEPT:
            self._kept[position] = kept
        return kept

    def _let_go(self) -> None:
        with self._lock:
            started, self._started = self._started, set()
            self._kept.clear()
        with suppress(StoreClosedError):  # the client that knew of it is gone
            self._state.client.end_reads([self._names[at] for at in started])


def host_objects(
    rows: NDArray[np.uint8],
    slots: NDArray[np.int64],
    *,
    header_bytes: int = 0,
    sums: NDArray[np.uint64] | None = None,
) -> HostObjects:
    """Return objects that lie in rows of host memory, each behind a header; keep the rows while they are used."""
    span = BufferSpan(
        base_ptr=rows.ctypes.data,
        rows=len(rows),
        row_bytes=rows.shape[1],
        row_stride=rows.shape[1],
        label="values",
        region=MemoryRegion(base_ptr=rows.ctypes.data, size_bytes=rows.nbytes, owner=rows),
    )
    return HostObjects(span=span, slots=slots, first_offset=-header_bytes, sums=sums)


def _is_whole(plan: TransferPlan) -> bool:
    return int(plan.range_bytes.sum()) == plan.object_bytes
