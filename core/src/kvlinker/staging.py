"""Staging moves pages between a device and host slots through a few bounded buffers that core owns.

Two buffers a direction: the device copies one while the host copies the other. Loads never wait for offloads.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, HostAccess, HostObjects
from kvlinker.errors import ContractError, DeviceCopyError, TransferRevokedError
from kvlinker.plans import PreparedPages, SpanColumns, TransferPlan
from kvlinker.pools import DevicePoolGroup

__all__ = [
    "BUFFERS",
    "DEFAULT_STAGING_BYTES",
    "PendingCopy",
    "StagedAccess",
    "StagedChunk",
    "StagingBuffer",
    "buffer_bytes_for",
    "chunks_of",
]

DEFAULT_STAGING_BYTES = 64 << 20
"""All staging buffers of one access together."""
BUFFERS = 4
"""Two for each direction."""


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedChunk:
    """The part of a plan that passes through one buffer at a time."""

    plan: TransferPlan
    """Device ranges: some pages over some spans."""
    first_page: int
    """Number of the chunk's first page within the whole plan."""
    places: IndexArray
    """[spans] where the span's block begins in the buffer: its ranges, page by page, without gaps."""
    used_bytes: int
    """Bytes of the buffer that the chunk fills."""

    @property
    def unit_rows(self) -> int:
        """Pool rows that are copied as one: a page where pages are contiguous, else a single row."""
        return self.plan.pages.page_rows if self.plan.pages.contiguous else 1

    @property
    def units(self) -> IndexArray:
        """[units] which unit of every span is copied, in the order in which blocks hold them."""
        pages = self.plan.pages
        if pages.contiguous:
            return pages.row // pages.page_rows
        starts = np.cumsum(pages.rows) - pages.rows
        return np.repeat(pages.row - starts, pages.rows) + np.arange(int(pages.rows.sum()))

    def buffer_plan(self, address: int) -> TransferPlan:
        """Return the plan of the same bytes of the same objects, as they lie in a buffer at `address`."""
        spans, size, count = self.plan.spans, self.plan.range_bytes, self.plan.num_pages
        columns = SpanColumns(
            labels=spans.labels,
            base=address + self.places,
            stride=size,
            row_bytes=size,
            span_rows=np.full(len(size), count, dtype=np.int64),
            offset=spans.offset,
            part=spans.part,
        )
        pages = PreparedPages.of_starts(self.plan.pool, np.arange(count, dtype=np.int64), 1)
        return TransferPlan(pages=pages, spans=columns, part_bytes=self.plan.part_bytes)


def chunks_of(plan: TransferPlan, buffer_bytes: int) -> Iterator[StagedChunk]:
    """Cut a plan into chunks that fit a buffer: as many pages as can be, then as many spans.

    A device gathers all pages of a span at once, so that few spans a chunk means few launches.

    Raises:
        ContractError: one page of one span is longer than the buffer.
    """
    if not plan.num_pages or not len(plan.spans.base):
        return
    longest = int(plan.range_bytes.max())
    if longest > buffer_bytes:
        raise _too_small(plan.pool, longest, buffer_bytes)
    count = min(plan.num_pages, buffer_bytes // longest)
    for first in range(0, plan.num_pages, count):
        pages = np.arange(first, min(first + count, plan.num_pages), dtype=np.int64)
        selected = plan.pages.select(pages)
        for columns, places, used in _span_groups(plan, len(pages), buffer_bytes):
            part = TransferPlan(pages=selected, spans=columns, part_bytes=plan.part_bytes)
            yield StagedChunk(plan=part, first_page=first, places=places, used_bytes=used)


def _span_groups(
    plan: TransferPlan, count: int, buffer_bytes: int
) -> Iterator[tuple[SpanColumns, IndexArray, int]]:
    """Yield spans that fit a buffer together, their places in it, and the bytes used."""
    blocks = plan.range_bytes * count
    start = 0
    while start < len(blocks):
        ends = np.cumsum(blocks[start:])
        fitting = int(np.searchsorted(ends, buffer_bytes, "right"))
        chosen = np.arange(start, start + fitting)
        places = ends[:fitting] - blocks[chosen]
        yield plan.spans.select(chosen), places, int(ends[fitting - 1])
        start += fitting


def buffer_bytes_for(group: DevicePoolGroup, staging_bytes: int) -> int:
    """Return the size of one buffer, a multiple of 8, when all of them together are bounded.

    Raises:
        ContractError: a page of one span of the group would not fit.
    """
    size = staging_bytes // BUFFERS // 8 * 8
    for entry in group.entries:
        longest = entry.page_rows * max(span.row_bytes for span in entry.spans)
        if longest > size:
            raise _too_small(entry.name, longest, size)
    return size


def _too_small(pool: str, longest: int, size: int) -> ContractError:
    return ContractError(
        f"pool {pool!r}: a page of one span is {longest} B and a staging buffer {size} B; raise "
        f"staging_bytes to at least {BUFFERS * (longest + 7)}"
    )


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
        self, *, loads: tuple[BufferT, BufferT], offloads: tuple[BufferT, BufferT]
    ) -> None:
        """Own two buffers for each direction.

        Args:
            loads: for copies to the device.
            offloads: for copies from the device.
        """
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
        with lane.use(plan.pool):
            for turn, chunk in enumerate(chunks_of(plan, lane.buffer_bytes)):
                buffer = lane.buffer(turn)
                lane.wait(turn)
                self._host.copy_in(chunk.buffer_plan(buffer.address), _slots(host, chunk))
                self._check(plan, check)
                lane.put(turn, self.start_scatter(chunk, buffer))

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


def _slots(host: HostObjects, chunk: StagedChunk) -> HostObjects:
    first = chunk.first_page
    # Numbers of a chunk's pages and spans are not those of the plan: who was told of them would check others.
    return replace(host, slots=host.slots[first : first + chunk.plan.num_pages], copied=None)
