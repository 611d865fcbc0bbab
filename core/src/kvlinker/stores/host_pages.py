"""Host pages are objects laid out in host memory, on their way from one store to another or to a pool."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import HostObjects
from kvlinker.plans import PreparedPages, SpanColumns, TransferPlan
from kvlinker.spans import BufferSpan, MemoryRegion

__all__ = [
    "HostPages",
    "ObjectRanges",
    "RangesSeen",
    "by_range",
    "plan_of_rows",
    "slot_bytes",
    "slots_of",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectRanges:
    """The ranges that an object of a pool is read by, in object order; they tile it."""

    pool: str
    offset: IndexArray
    size: IndexArray

    @classmethod
    def of_sizes(cls, pool: str, sizes: Sequence[int]) -> ObjectRanges:
        """Return ranges of some sizes, one behind the other."""
        size = np.array(sizes, dtype=np.int64)
        return cls(pool=pool, offset=np.cumsum(size) - size, size=size)

    @property
    def object_bytes(self) -> int:
        """Bytes of an object."""
        return int(self.offset[-1] + self.size[-1])

    def is_equal(self, other: ObjectRanges) -> bool:
        """Whether pool and ranges are the same."""
        return self.pool == other.pool and np.array_equal(self.size, other.size)


class RangesSeen:
    """The ranges of the plans that one read session was asked for, layer by layer or at once."""

    def __init__(self, object_bytes: int) -> None:
        self._object_bytes = object_bytes
        self._pool = ""
        self._sizes: dict[int, int] = {}

    def add(self, plan: TransferPlan) -> None:
        """Note the ranges of one plan."""
        self._pool = plan.pool
        self._sizes.update(zip(plan.spans.offset.tolist(), plan.range_bytes.tolist(), strict=True))

    def tiling(self) -> ObjectRanges | None:
        """Return the ranges once they are all of an object, each byte once; None before, or where they overlap."""
        end = 0
        ordered = sorted(self._sizes.items())
        for offset, size in ordered:
            if offset != end:
                return None
            end += size
        if not ordered or end != self._object_bytes:
            return None
        columns = np.array(ordered, dtype=np.int64)
        return ObjectRanges(pool=self._pool, offset=columns[:, 0], size=columns[:, 1])


class HostPages:
    """A buffer in host memory that some objects at a time are laid out in, one behind the other."""

    def __init__(self, size_bytes: int) -> None:
        """Reserve the buffer; the system gives it memory where it is first written."""
        self.size_bytes = size_bytes
        self._array = np.empty(size_bytes, dtype=np.uint8)

    @property
    def region(self) -> MemoryRegion:
        """The buffer, for stores that register memory."""
        return MemoryRegion(
            base_ptr=self._array.ctypes.data, size_bytes=self.size_bytes, owner=self._array
        )

    def room_for(self, object_bytes: int) -> int:
        """Return how many objects of so many bytes fit."""
        return self.size_bytes // object_bytes

    def plan(self, ranges: ObjectRanges, count: int) -> TransferPlan:
        """Return the plan of whole objects, of which so many fit; `select` names some of them."""
        rows = self._array[: count * ranges.object_bytes].reshape(count, ranges.object_bytes)
        return plan_of_rows(ranges.pool, rows, ranges.offset, ranges.size)


def plan_of_rows(
    pool: str, rows: NDArray[np.uint8], offsets: IndexArray, sizes: IndexArray
) -> TransferPlan:
    """Return the plan of some ranges of objects that lie in the rows of an array; keep it while the plan is used."""
    count, stride = rows.shape
    same = np.ones(len(offsets), dtype=np.int64)
    spans = SpanColumns(
        labels=tuple(f"{pool}[{i}]" for i in range(len(offsets))),
        base=rows.ctypes.data + offsets,
        stride=same * stride,
        row_bytes=sizes,
        span_rows=same * count,
        offset=offsets,
        part=same * 0,
    )
    pages = PreparedPages.of_starts(pool, np.arange(count, dtype=np.int64), 1)
    return TransferPlan(pages=pages, spans=spans, part_bytes=(stride,))


def by_range(plan: TransferPlan) -> Iterable[TransferPlan]:
    """Yield one plan for each range of a plan of single objects."""
    for i in range(len(plan.spans.base)):
        yield plan.select_spans(np.array([i], dtype=np.int64))


def slots_of(
    rows: NDArray[np.uint8], *, chosen: IndexArray | None = None, first_offset: int = 0
) -> HostObjects:
    """Return an array [objects, bytes] as slots, of which some may be chosen; keep the array while they are used."""
    count, size = rows.shape
    span = BufferSpan(base_ptr=rows.ctypes.data, rows=count, row_bytes=size, row_stride=size)
    slots = np.arange(count, dtype=np.int64) if chosen is None else chosen
    return HostObjects(span=span, slots=slots, first_offset=first_offset)


def slot_bytes(host: HostObjects, i: int) -> NDArray[np.uint8]:
    """Return the bytes of the slot of object i, which are its store's but for the length of the copy."""
    span = host.span
    address = span.base_ptr + int(host.slots[i]) * span.row_stride
    return np.ctypeslib.as_array((ctypes.c_uint8 * span.row_bytes).from_address(address))
