"""Staging moves pages between a device and host slots through a few bounded buffers that core owns.

Two buffers a direction: the device copies one while the host copies the other. Loads never wait for offloads.
A load from pinned host slots passes through the device's half of a buffer alone.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from kvlinker.device import DeviceAccess, HostAccess, HostObjects, HostPin
from kvlinker.errors import (
    DeviceCopyError,
    TransferRevokedError,
    UnsupportedOperationError,
)
from kvlinker.pinning import HostPins
from kvlinker.plans import TransferPlan
from kvlinker.pools import DevicePoolGroup
from kvlinker.staged_chunks import (
    BUFFERS,
    StagedChunk,
    chunks_of,
    pinned_chunks_of,
    runs_of,
    too_small,
)

__all__ = [
    "BUFFERS",
    "DEFAULT_STAGING_BYTES",
    "PINNED_RUN_BYTES",
    "PendingCopy",
    "StagedAccess",
    "StagedChunk",
    "StagingBuffer",
    "buffer_bytes_for",
    "chunks_of",
]

DEFAULT_STAGING_BYTES = 64 << 20
"""All staging buffers of one access together."""
PINNED_RUN_BYTES = 64 << 10
"""From this length on, a device asked for one range more costs less than the host's own copy of it."""


class StagingBuffer(Protocol):
    """Host memory that both the host and the device can copy."""

    @property
    def address(self) -> int:
        """Host address of the first byte."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes that may be used."""
        ...


class PendingCopy(Protocol):
    """A copy that a device was asked for."""

    def wait(self) -> None:
        """Return once the copy is done; raise what it failed of."""
        ...


def buffer_bytes_for(group: DevicePoolGroup, staging_bytes: int) -> int:
    """Return the size of one buffer, a multiple of 8, when all of them together are bounded.

    Raises:
        ContractError: a page of one span of the group would not fit.
    """
    size = staging_bytes // BUFFERS // 8 * 8
    for entry in group.entries:
        longest = entry.page_rows * max(span.row_bytes for span in entry.spans)
        if longest > size:
            raise too_small(entry.name, longest, size)
    return size


BufferT = TypeVar("BufferT", bound=StagingBuffer)


class _Lane(Generic[BufferT]):
    """The two buffers of one direction, and the copies that a device may still be at."""

    def __init__(self, buffers: tuple[BufferT, BufferT]) -> None:
        self.buffers: tuple[BufferT, ...] = buffers
        self.buffer_bytes = min(buffer.size_bytes for buffer in buffers)
        self._lock = threading.Lock()
        self._pending: list[PendingCopy | None] = [None, None]
        self._broken = ""

    @contextmanager
    def use(self, pool: str) -> Iterator[None]:
        """Take the lane; nothing is pending when it is left, however it is left."""
        with self._lock:
            if self._broken:
                msg = f"pool {pool!r}: the staging buffers are out of use since a copy failed: {self._broken}"
                raise DeviceCopyError(msg)
            if not self.buffers:
                raise _closed(pool)
            try:
                yield
            finally:
                self._drain()

    def buffer(self, turn: int) -> BufferT:
        """Return the buffer of this turn."""
        return self.buffers[turn % 2]

    def put(self, turn: int, pending: PendingCopy) -> None:
        """Note the copy that the device does with the buffer of this turn."""
        self._pending[turn % 2] = pending

    def wait(self, turn: int) -> None:
        """Wait until the device is done with the buffer of this turn."""
        pending = self._pending[turn % 2]
        if pending is None:
            return
        try:
            pending.wait()
        except BaseException as error:
            # Nobody knows whether the device still uses the buffer.
            self._broken = repr(error)
            raise
        finally:
            self._pending[turn % 2] = None

    def _drain(self) -> None:
        try:
            self.wait(0)
        finally:
            self.wait(1)

    def retire(self) -> None:
        """Wait until nobody uses the lane, and let go of its buffers."""
        with self._lock:
            self.buffers = ()


def _closed(pool: str) -> TransferRevokedError:
    return TransferRevokedError(f"pool {pool!r}: the access to its memory was closed")


def _never() -> None:
    """Revoke nothing."""


class StagedAccess(DeviceAccess, Generic[BufferT]):
    """Access to memory that the host cannot reach, through buffers that both sides can.

    A subclass brings the buffers and starts copies; bounds, overlap, revocation and failures are done here.
    """

    def __init__(
        self,
        *,
        loads: tuple[BufferT, BufferT],
        offloads: tuple[BufferT, BufferT],
        pins: HostPins | None = None,
        pinned_run_bytes: int = PINNED_RUN_BYTES,
    ) -> None:
        """Own two buffers for each direction.

        Args:
            loads: for copies to the device.
            offloads: for copies from the device.
            pins: what pins host memory for loads; None for an access that cannot.
            pinned_run_bytes: loads of shorter runs, on average, go through buffers all the same.
        """
        self._pins = pins
        self._pinned_run_bytes = pinned_run_bytes
        self._loads = _Lane(loads)
        self._offloads = _Lane(offloads)
        self._host = HostAccess()
        self._closed = False

    @property
    def staging_bytes(self) -> int:
        """Bytes of all buffers together."""
        lanes = (self._loads, self._offloads)
        return sum(buffer.size_bytes for lane in lanes for buffer in lane.buffers)

    @abstractmethod
    def start_gather(self, chunk: StagedChunk, buffer: BufferT) -> PendingCopy:
        """Begin to copy the chunk's device ranges to their places in the buffer."""

    @abstractmethod
    def start_scatter(self, chunk: StagedChunk, buffer: BufferT) -> PendingCopy:
        """Begin to copy the buffer's blocks to the chunk's device ranges."""

    def start_pinned_scatter(
        self, chunk: StagedChunk, buffer: BufferT, host: HostObjects
    ) -> PendingCopy:
        """Begin to copy the chunk's ranges from pinned host slots, by way of the device's half of the buffer.

        Raises:
            UnsupportedOperationError: this access pins nothing.
        """
        msg = (
            f"pool {chunk.plan.pool!r}: {type(self).__name__} does not copy {len(host.slots)} pinned slots by way "
            f"of {buffer.size_bytes} B"
        )
        raise UnsupportedOperationError(msg)

    @property
    def pins_host(self) -> bool:
        """See DeviceAccess."""
        return self._pins is not None

    def pin_host(self, address: int, size: int) -> HostPin | None:
        """See DeviceAccess; copies out go through buffers all the same.

        What a failed copy may still write must never be a slot that was given to somebody else.
        """
        return None if self._pins is None else self._pins.pin(address, size)

    def copy_out(
        self, plan: TransferPlan, host: HostObjects, *, check: Callable[[], None] = _never
    ) -> None:
        """See DeviceAccess.

        Args:
            plan: what to copy.
            host: where to.
            check: called before each chunk; what it raises, such as TransferRevokedError, ends the copy.
        """
        host.check(plan)
        lane = self._offloads
        with lane.use(plan.pool):
            last: tuple[int, StagedChunk] | None = None
            for turn, chunk in enumerate(chunks_of(plan, lane.buffer_bytes)):
                self._check(plan, check)
                lane.put(turn, self.start_gather(chunk, lane.buffer(turn)))
                if last is not None:
                    self._take(lane, *last, host)
                last = (turn, chunk)
            if last is not None:
                self._take(lane, *last, host)

    def _take(self, lane: _Lane[BufferT], turn: int, chunk: StagedChunk, host: HostObjects) -> None:
        lane.wait(turn)
        buffer = lane.buffer(turn)
        self._host.copy_out(chunk.buffer_plan(buffer.address), _slots(host, chunk))

    def copy_in(
        self, plan: TransferPlan, host: HostObjects, *, check: Callable[[], None] = _never
    ) -> None:
        """See DeviceAccess.

        Args:
            plan: what to copy.
            host: where from.
            check: called before each chunk; what it raises, such as TransferRevokedError, ends the copy.
        """
        host.check(plan)
        lane = self._loads
        # The slots stay pinned until the lane was drained.
        with self._using_pinned(plan, host) as is_pinned, lane.use(plan.pool):
            cut = pinned_chunks_of if is_pinned else chunks_of
            for turn, chunk in enumerate(cut(plan, lane.buffer_bytes)):
                buffer, slots = lane.buffer(turn), _slots(host, chunk)
                lane.wait(turn)
                if not is_pinned:
                    self._host.copy_in(chunk.buffer_plan(buffer.address), slots)
                self._check(plan, check)
                if is_pinned:
                    lane.put(turn, self.start_pinned_scatter(chunk, buffer, slots))
                else:
                    lane.put(turn, self.start_scatter(chunk, buffer))

    @contextmanager
    def _using_pinned(self, plan: TransferPlan, host: HostObjects) -> Iterator[bool]:
        """Keep the slots pinned that a plan reads; False where they are not, or where it would not be worth it."""
        sizes, offsets = plan.range_bytes, plan.spans.offset
        is_able = self._pins is not None and plan.pages.contiguous and plan.num_pages and len(sizes)
        runs = len(runs_of(plan.spans, sizes)) if is_able else 0
        if self._pins is None or not runs or sizes.sum() < self._pinned_run_bytes * runs:
            yield False
            return
        low, high = int(offsets.min()), int((offsets + sizes).max())
        first = host.span.base_ptr + low - host.first_offset
        with self._pins.using(first + host.slots * host.span.row_stride, high - low) as is_pinned:
            yield is_pinned

    def _check(self, plan: TransferPlan, check: Callable[[], None]) -> None:
        if self._closed:
            raise _closed(plan.pool)
        check()
        plan.check_live()

    def close(self) -> None:
        """Stop what runs before its next chunk, wait for it and let go of the buffers. Idempotent."""
        self._closed = True
        for lane in (self._loads, self._offloads):
            lane.retire()
        if self._pins is not None:
            self._pins.close()


def _slots(host: HostObjects, chunk: StagedChunk) -> HostObjects:
    first = chunk.first_page
    # Numbers of a chunk's pages and spans are not those of the plan: who was told of them would check others.
    return replace(
        host, slots=host.slots[first : first + chunk.plan.num_pages], copied=None, sums=None
    )
