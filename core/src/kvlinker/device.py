"""Device access is the only thing that touches pool memory: copies out, copies in, events.

A store that moves bytes through the host is handed an access and host slots; it never dereferences an address.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.errors import ContractError
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan

__all__ = ["DeviceAccess", "DeviceEvent", "HostAccess", "HostObjects", "wait_for_events"]

_LOOP_BYTES = 8192
"""From this range size on, one memmove a range beats numpy's gather of rows."""
_FIRST_POLL_SECONDS = 0.00002
_MAX_POLL_SECONDS = 0.002


@runtime_checkable
class DeviceEvent(Protocol):
    """A point in an engine's stream, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether everything before the point is done."""
        ...


def wait_for_events(
    events: Iterable[DeviceEvent],
    *,
    deadline: float,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> bool:
    """Poll until every event is done; False when `deadline` (of `time.monotonic`) or a cancellation comes first."""
    pause = _FIRST_POLL_SECONDS
    for event in events:
        while not event.query():
            if time.monotonic() >= deadline or is_cancelled():
                return False
            time.sleep(pause)
            pause = min(pause * 2, _MAX_POLL_SECONDS)
    return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostObjects:
    """Objects in host memory, one in each named slot of a span of equal slots.

    Object i's payload byte `o` lies at `span.base_ptr + slots[i] * span.row_stride + o - first_offset`.
    """

    span: BufferSpan
    """Rows are slots; `row_bytes` bytes of each may be used."""
    slots: IndexArray
    """[objects] slot of each object of the plan, in the plan's page order."""
    first_offset: int = 0
    """Payload offset of a slot's first byte, for buffers that hold a part of an object."""

    def check(self, plan: TransferPlan) -> None:
        """Refuse a plan that does not fit.

        Raises:
            ContractError: the counts differ, a slot is out of bounds, or a range leaves its slot.
        """
        if len(plan.part_bytes) != 1 or len(self.slots) != plan.num_pages:
            msg = (
                f"pool {plan.pool!r}: {plan.num_pages} pages of {len(plan.part_bytes)} objects "
                f"do not fit {len(self.slots)} slots"
            )
            raise ContractError(msg)
        if not len(self.slots) or not len(plan.spans.base):
            return
        low, high = int(self.slots.min()), int(self.slots.max())
        first = int(plan.spans.offset.min()) - self.first_offset
        last = int((plan.spans.offset + plan.range_bytes).max()) - self.first_offset
        if low < 0 or high >= self.span.rows or first < 0 or last > self.span.row_bytes:
            msg = (
                f"pool {plan.pool!r}: bytes [{first}, {last}) of slots {low}..{high} leave "
                f"{self.span.rows} slots of {self.span.row_bytes} B"
            )
            raise ContractError(msg)


class DeviceAccess(ABC):
    """Copies between pool memory and host slots, each finished when the call returns."""

    @abstractmethod
    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """Copy the plan's ranges from pool memory to their offsets in the host slots.

        Raises:
            ContractError: plan and slots do not fit.
            TransferRevokedError: the transfer was taken back; nothing more is read.
        """

    @abstractmethod
    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """Copy the plan's ranges from their offsets in the host slots to pool memory.

        Raises:
            ContractError: plan and slots do not fit.
            TransferRevokedError: the transfer was taken back; nothing more is written.
        """

    def close(self) -> None:  # noqa: B027  # an access that holds nothing has nothing to release
        """Release staging buffers and streams. Idempotent."""


class HostAccess(DeviceAccess):
    """Access to pools in host memory: one copy, straight between pool and slot."""

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        host.check(plan)
        _copy(plan, host, to_host=True)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        host.check(plan)
        _copy(plan, host, to_host=False)


def _copy(plan: TransferPlan, host: HostObjects, *, to_host: bool) -> None:
    if not plan.num_pages:
        return
    if not plan.pages.contiguous:
        _copy_ranges(plan, host, to_host=to_host)
        return
    for i in range(len(plan.spans.base)):
        _copy_span(plan, host, i, to_host=to_host)


def _copy_span(plan: TransferPlan, host: HostObjects, i: int, *, to_host: bool) -> None:
    """Copy one span's range of every page: all ranges have one size."""
    size = int(plan.range_bytes[i])
    rows, spans = plan.pages.page_rows, plan.spans
    pool_base, pool_stride = int(spans.base[i]), int(spans.stride[i]) * rows
    pages = plan.pages.row // rows
    slot_base = host.span.base_ptr + int(spans.offset[i]) - host.first_offset
    if size >= _LOOP_BYTES:
        device = (pool_base + pages * pool_stride).tolist()
        slots = (slot_base + host.slots * host.span.row_stride).tolist()
        pairs = zip(slots, device, strict=True) if to_host else zip(device, slots, strict=True)
        for target, source in pairs:
            ctypes.memmove(target, source, size)
        return
    pool = _rows_view(pool_base, int(spans.span_rows[i]) // rows, size, pool_stride)
    slot = _rows_view(slot_base, host.span.rows, size, host.span.row_stride)
    if to_host:
        slot[host.slots] = pool[pages]
    else:
        pool[pages] = slot[host.slots]


def _rows_view(base: int, rows: int, size: int, stride: int) -> NDArray[np.void]:
    length = (rows - 1) * stride + size
    buffer = memoryview((ctypes.c_char * length).from_address(base)).cast("B")
    return np.ndarray((rows,), dtype=np.dtype((np.void, size)), buffer=buffer, strides=(stride,))


def _copy_ranges(plan: TransferPlan, host: HostObjects, *, to_host: bool) -> None:
    ranges = plan.expand()
    slots = (
        host.span.base_ptr
        + host.slots[ranges.page] * host.span.row_stride
        + ranges.offset
        - host.first_offset
    )
    target, source = (slots, ranges.address) if to_host else (ranges.address, slots)
    columns = zip(target.tolist(), source.tolist(), ranges.size.tolist(), strict=True)
    for to, start, size in columns:
        ctypes.memmove(to, start, size)
