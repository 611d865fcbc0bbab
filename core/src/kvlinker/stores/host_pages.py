"""Host pages are objects laid out in host memory, for bytes that go from one store to another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.plans import PreparedPages, SpanColumns, TransferPlan
from kvlinker.spans import MemoryRegion

__all__ = ["HostPages", "ObjectRanges", "RangesSeen", "by_range"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectRanges:
    """The ranges that an object of a pool is read by, in object order; they tile it."""

    pool: str
    offset: IndexArray
    size: IndexArray

    @property
    def object_bytes(self) -> int:
        """Bytes of an object."""
        return int(self.offset[-1] + self.size[-1])


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
        stride = ranges.object_bytes
        spans = SpanColumns(
            labels=tuple(f"{ranges.pool}[{i}]" for i in range(len(ranges.offset))),
            base=self._array.ctypes.data + ranges.offset,
            stride=np.full(len(ranges.offset), stride, dtype=np.int64),
            row_bytes=ranges.size,
            span_rows=np.full(len(ranges.offset), count, dtype=np.int64),
            offset=ranges.offset,
            part=np.zeros(len(ranges.offset), dtype=np.int64),
        )
        pages = PreparedPages.of_starts(ranges.pool, np.arange(count, dtype=np.int64), 1)
        return TransferPlan(pages=pages, spans=spans, part_bytes=(stride,))


def by_range(plan: TransferPlan) -> Iterable[TransferPlan]:
    """Yield one plan for each range of a plan of single objects."""
    for i in range(len(plan.spans.base)):
        spans = plan.spans.select(np.array([i], dtype=np.int64))
        yield TransferPlan(pages=plan.pages, spans=spans, part_bytes=plan.part_bytes)
