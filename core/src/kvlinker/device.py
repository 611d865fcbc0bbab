"""Device access is the only thing that touches pool memory: copies out, copies in, events.

A store that moves bytes through the host is handed an access and host slots; it never dereferences an address.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.errors import ContractError
from kvlinker.integers import as_integer
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.transfers import as_index_array

__all__ = [
    "DeviceAccess",
    "DeviceEvent",
    "HostAccess",
    "HostObjects",
    "HostPin",
    "wait_for_events",
]

_LOOP_BYTES = 8192
"""From this range size on, one memmove for each range beats a gather and a scatter by numpy."""
_FEW_RANGES = 24
"""Up to this many ranges of a span, a memmove for each costs less than setting up views."""
_CHUNK_BYTES = 256 * 1024
"""Rows gathered at once: few enough to be scattered from the processor's cache."""
_SHORT_RUN = 4
"""Up to so many slots side by side are copied with their neighbours, range by range."""
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
    """Payload offset of a slot's first byte, for buffers that hold a part of an object.

    Negative where something else stands in front of the payload, such as a header.
    """
    copied: Callable[[int, slice], None] | None = None
    """What an access that `tells_copied` calls during a copy in of whole pages, with a span's number in the plan
    and some pages, once these ranges were copied and while they are still in the processor's cache."""

    def __post_init__(self) -> None:
        slots = as_index_array(self.slots, pool=self.span.label)
        object.__setattr__(self, "slots", slots)
        what = f"span {self.span.label!r}: first_offset"
        object.__setattr__(self, "first_offset", as_integer(self.first_offset, what))

    def check(self, plan: TransferPlan) -> None:
        """Refuse a plan that does not fit.

        Raises:
            ContractError: the counts differ, a slot is out of bounds, or a range leaves its slot.
            StalePoolError: the plan's memory was given up.
        """
        plan.check_live()
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


class HostPin(ABC):
    """Host memory that copies in take without a buffer between, until it is released."""

    @abstractmethod
    def release(self) -> bool:
        """Wait for copies that use it and let go; True where it may be unmapped from now on. Idempotent.

        The access's own close releases it too.
        """


class DeviceAccess(ABC):
    """Copies between pool memory and host slots, each finished when the call returns."""

    @property
    def tells_copied(self) -> bool:
        """Whether a copy in of whole pages calls `HostObjects.copied` for every range, each once."""
        return False

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

    @property
    def pins_host(self) -> bool:
        """Whether pinned host memory spares a copy, so that `pin_host` is worth a call."""
        return False

    def pin_host(self, address: int, size: int) -> HostPin | None:  # noqa: ARG002  # nothing to pin for
        """Pin host memory that stays mapped until the pin is released, so that the device copies it itself.

        The same bytes are copied with and without. Bytes that are pinned already have their pin returned.

        Args:
            address: of whole pages of memory that belong to nobody else.
            size: bytes.

        Returns:
            The pin; None where this cannot be, and copies go on as they did.
        """
        return None

    def close(self) -> None:  # noqa: B027  # an access that holds nothing has nothing to release
        """Release staging buffers and streams. Idempotent."""


class HostAccess(DeviceAccess):
    """Access to pools in host memory: one copy, straight between pool and slot."""

    @property
    def tells_copied(self) -> bool:
        """See DeviceAccess."""
        return True

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        _check_host(plan, host)
        _copy(plan, host, to_host=True)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        _check_host(plan, host)
        if host.copied is None or not plan.pages.contiguous:
            _copy(plan, host, to_host=False)
        else:
            _copy_and_tell(plan, host, host.copied)


def _check_host(plan: TransferPlan, host: HostObjects) -> None:
    host.check(plan)
    for what, device in (("pool", plan.spans.device), ("slots", host.span.device)):
        if device != "cpu":
            msg = f"pool {plan.pool!r}: its {what} on {device} cannot be copied by the host; use that device's access"
            raise ContractError(msg)


def _copy(plan: TransferPlan, host: HostObjects, *, to_host: bool) -> None:
    if not plan.pages.contiguous:
        _copy_ranges(plan, host, to_host=to_host)
        return
    if plan.num_pages <= _FEW_RANGES:
        _copy_few(plan, host, to_host=to_host)
        return
    for i in range(len(plan.spans.base)):
        _copy_span(plan, host, i, to_host=to_host)


def _copy_and_tell(
    plan: TransferPlan, host: HostObjects, copied: Callable[[int, slice], None]
) -> None:
    """Copy whole pages in, some pages of a span at a time, and say so after each."""
    blocks: dict[int, list[tuple[slice, slice | None]]] = {}
    for i, size in enumerate(plan.range_bytes.tolist()):
        pool, slots = _pool_rows(plan, i), _slot_rows(plan, host, i)
        to, start = pool.view(size), slots.view(size)
        step = max(1, _CHUNK_BYTES // size)
        if step not in blocks:
            blocks[step] = list(_blocks(host.slots, step))
        for pages, run in blocks[step]:
            if run is not None:
                to[pool.index[pages]] = start[run]  # one pass
            elif size >= _LOOP_BYTES:
                _move(pool.addresses(pages), slots.addresses(pages), repeat(size))
            else:
                to[pool.index[pages]] = start[slots.index[pages]]
            copied(i, pages)


def _blocks(slots: IndexArray, step: int) -> Iterator[tuple[slice, slice | None]]:
    """Yield at most `step` pages at a time, and their slots as a slice; None where they do not follow each other."""
    if not len(slots):
        return
    cuts = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
    begun, end = 0, len(slots)
    for first, last in zip([0, *cuts], [*cuts, end], strict=True):
        is_run = last - first > _SHORT_RUN
        if not is_run and last < end:
            continue
        stop = first if is_run else end
        yield from ((pages, None) for pages in _slices(begun, stop, step))
        ahead = int(slots[first]) - first
        for pages in _slices(stop, last, step):
            yield pages, slice(pages.start + ahead, pages.stop + ahead)
        begun = last


def _slices(first: int, last: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, last)) for start in range(first, last, step))


def _copy_span(plan: TransferPlan, host: HostObjects, i: int, *, to_host: bool) -> None:
    """Copy one span's range of every page: all ranges have one size."""
    size = int(plan.range_bytes[i])
    pool, slots = _pool_rows(plan, i), _slot_rows(plan, host, i)
    target, source = (slots, pool) if to_host else (pool, slots)
    if (evenly := _as_slice(source.index)) is not None:
        target.view(size)[target.index] = source.view(size)[evenly]  # one pass
    elif size >= _LOOP_BYTES:
        _move(target.addresses(), source.addresses(), repeat(size))
    else:
        _move_rows(target, source, size)


def _pool_rows(plan: TransferPlan, i: int) -> _Rows:
    """Return the pages of a plan of whole pages as rows of one span."""
    rows, spans = plan.pages.page_rows, plan.spans
    return _Rows(
        base=int(spans.base[i]),
        stride=int(spans.stride[i]) * rows,
        rows=int(spans.span_rows[i]) // rows,
        index=plan.pages.row // rows,
    )


def _slot_rows(plan: TransferPlan, host: HostObjects, i: int) -> _Rows:
    """Return where a span's ranges lie in the slots."""
    return _Rows(
        base=host.span.base_ptr + int(plan.spans.offset[i]) - host.first_offset,
        stride=host.span.row_stride,
        rows=host.span.rows,
        index=host.slots,
    )


def _copy_few(plan: TransferPlan, host: HostObjects, *, to_host: bool) -> None:
    """Copy the ranges of a few whole pages one by one, span by span."""
    spans, pages = plan.spans, plan.pages
    pool = spans.base[:, None] + pages.row * spans.stride[:, None]
    first = host.span.base_ptr - host.first_offset + host.slots * host.span.row_stride
    slots = first + spans.offset[:, None]
    target, source = (slots, pool) if to_host else (pool, slots)
    sizes = np.repeat(plan.range_bytes, plan.num_pages)
    _move(target.reshape(-1), source.reshape(-1), sizes.tolist())


def _copy_ranges(plan: TransferPlan, host: HostObjects, *, to_host: bool) -> None:
    """Copy ranges of any sizes: many short ones of one size at once, the others one by one."""
    ranges = plan.expand()
    slots = (
        host.span.base_ptr
        + host.slots[ranges.page] * host.span.row_stride
        + ranges.offset
        - host.first_offset
    )
    target, source = (slots, ranges.address) if to_host else (ranges.address, slots)
    sizes, group, counts = np.unique(ranges.size, return_inverse=True, return_counts=True)
    together = (counts > _FEW_RANGES) & (sizes < _LOOP_BYTES)
    alone = ~together[group]
    _move(target[alone], source[alone], ranges.size[alone].tolist())
    for i in np.flatnonzero(together):
        chosen = group == i
        _move_rows(_Rows.at(target[chosen]), _Rows.at(source[chosen]), int(sizes[i]))


def _move(target: IndexArray, source: IndexArray, sizes: Iterable[int]) -> None:
    deque(map(ctypes.memmove, target.tolist(), source.tolist(), sizes), maxlen=0)


def _move_rows(target: _Rows, source: _Rows, size: int) -> None:
    """Gather and scatter in two passes, chunk by chunk."""
    to, start = target.view(size), source.view(size)
    step = _CHUNK_BYTES // size
    for first in range(0, len(source.index), step):
        chunk = slice(first, first + step)
        to[target.index[chunk]] = start[source.index[chunk]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Some of the rows that begin at every `stride` bytes from an address."""

    base: int
    stride: int
    rows: int
    index: IndexArray

    @classmethod
    def at(cls, addresses: IndexArray) -> _Rows:
        """Return rows anywhere in memory: row i begins i bytes behind the lowest one."""
        low = int(addresses.min())
        count = int(addresses.max()) - low + 1
        return cls(base=low, stride=1, rows=count, index=addresses - low)

    def addresses(self, chosen: slice = slice(None)) -> IndexArray:
        return self.base + self.index[chosen] * self.stride

    def view(self, size: int) -> NDArray[np.void]:
        """Return all rows as an array of `size` bytes each; only rows that are indexed are touched."""
        return np.asarray(_Memory(self, size))


class _Memory:
    """Rows of some bytes each, as numpy's array interface (version 3) names memory."""

    def __init__(self, rows: _Rows, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (rows.base, False),
            "shape": (rows.rows,),
            "strides": (rows.stride,),
            "typestr": f"|V{size}",
        }


def _as_slice(index: IndexArray) -> slice | None:
    """Return the slice that names the same rows in the same order, if there is one; of at least two."""
    step = int(index[1] - index[0])
    if step < 1 or (np.diff(index) != step).any():
        return None
    return slice(int(index[0]), int(index[-1]) + 1, step)
