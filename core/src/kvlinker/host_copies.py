"""Copies between pools and slots in host memory: by a mover in one call, or by numpy and `memmove`, whichever pays."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.moving import Mover, current_mover
from kvlinker.plans import TransferPlan

if TYPE_CHECKING:
    from kvlinker.device import HostObjects

__all__ = ["copy_ranges"]

_LOOP_BYTES = 8192
"""From this range size on, one memmove for each range beats a gather and a scatter by numpy."""
_FEW_RANGES = 24
"""Up to this many ranges of a span, a memmove for each costs less than setting up views."""
_CHUNK_BYTES = 256 * 1024
"""Rows gathered at once: few enough to be scattered from the processor's cache."""
_SHORT_RUN = 4
"""Up to so many slots side by side are copied with their neighbours, range by range."""


def copy_ranges(plan: TransferPlan, host: HostObjects, *, to_host: bool) -> None:
    """Copy a plan's ranges between pool memory and slots, both of the host, that fit each other."""
    mover = current_mover()
    is_told = host.copied is not None and not to_host and plan.pages.contiguous
    if mover is not None and (host.sums is not None or not is_told):
        _move_all(mover, plan, host, to_host=to_host)
    elif host.copied is not None and is_told:
        _copy_and_tell(plan, host, host.copied)
    else:
        _copy_by_numpy(plan, host, to_host=to_host)


def _move_all(mover: Mover, plan: TransferPlan, host: HostObjects, *, to_host: bool) -> None:
    """Copy all ranges in one call, and fill `sums` where they are asked for."""
    pool, slots, sizes = _range_columns(plan, host)
    target, source = (slots, pool) if to_host else (pool, slots)
    if host.sums is None:
        mover.move(target, source, sizes)
    else:
        host.sums[...] = mover.move_and_sum(target, source, sizes).reshape(host.sums.shape)


def _range_columns(
    plan: TransferPlan, host: HostObjects
) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Return where ranges begin in the pool and in the slots, and their sizes; span by span, of whole pages."""
    first = host.span.base_ptr - host.first_offset + host.slots * host.span.row_stride
    if not plan.pages.contiguous:
        ranges = plan.expand()
        return ranges.address, first[ranges.page] + ranges.offset, ranges.size
    spans = plan.spans
    pool = spans.base[:, None] + plan.pages.row * spans.stride[:, None]
    slots = first + spans.offset[:, None]
    return pool.reshape(-1), slots.reshape(-1), np.repeat(plan.range_bytes, plan.num_pages)


def _copy_by_numpy(plan: TransferPlan, host: HostObjects, *, to_host: bool) -> None:
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
    pool, slots, sizes = _range_columns(plan, host)
    target, source = (slots, pool) if to_host else (pool, slots)
    _move(target, source, sizes.tolist())


def _copy_ranges(plan: TransferPlan, host: HostObjects, *, to_host: bool) -> None:
    """Copy ranges of any sizes: many short ones of one size at once, the others one by one."""
    pool, slots, every_size = _range_columns(plan, host)
    target, source = (slots, pool) if to_host else (pool, slots)
    sizes, group, counts = np.unique(every_size, return_inverse=True, return_counts=True)
    together = (counts > _FEW_RANGES) & (sizes < _LOOP_BYTES)
    alone = ~together[group]
    _move(target[alone], source[alone], every_size[alone].tolist())
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
