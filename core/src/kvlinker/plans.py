"""Plans say which bytes of device memory make which bytes of which object, in columns.

A plan holds one row per run of pool rows and one column per span, O(runs + spans), and expands on demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.errors import ContractError, StalePoolError
from kvlinker.spans import BufferSpan
from kvlinker.transfers import as_index_array

__all__ = [
    "IOVEC",
    "LayerMetadata",
    "PoolLife",
    "PreparedPages",
    "Ranges",
    "SpanColumns",
    "TransferPlan",
]

LayerMetadata: TypeAlias = tuple[list[list[int]], list[list[int]], list[list[int]]]
"""Nested lists of addresses, sizes and object offsets, one inner list per object."""

IOVEC = np.dtype([("address", np.uint64), ("size", np.uint64)])
"""`struct iovec` of POSIX readv(2): base address and length."""


def _frozen(values: NDArray[np.int64] | Sequence[int]) -> IndexArray:
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array


class PoolLife:
    """Whether memory may still be used, shared by its owner and everything that was planned on it."""

    __slots__ = ("_end", "_subject")

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._end = ""

    def end(self, reason: str) -> None:
        """Refuse every use from here on; the first reason stays."""
        self._end = self._end or reason

    def check(self) -> None:
        """Do nothing while the memory may be used.

        Raises:
            StalePoolError: it ended; the message says why.
        """
        if self._end:
            msg = f"{self._subject}: {self._end}; describe the pools again and build a new group"
            raise StalePoolError(msg)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedPages:
    """Pages of one entry whose indices were validated; an entry takes only those it made itself.

    Runs are consecutive pool rows of one page; a contiguous page is a single run.
    """

    pool: str
    num_pages: int
    page_rows: int
    """Pool rows in a page: 1 where rows are pages, the page size where rows are slots."""
    page: IndexArray
    """[runs] number of the page within the request, ascending."""
    row: IndexArray
    """[runs] first pool row of the run."""
    rows: IndexArray
    """[runs] pool rows in the run."""
    first_row: IndexArray
    """[runs] where the run begins within its page, in rows."""
    contiguous: bool
    """Whether every page is one run."""
    life: PoolLife = field(repr=False)
    """Of the entry that made the pages; after its end no plan on them can be used."""

    @classmethod
    def of_starts(
        cls, pool: str, starts: IndexArray, page_rows: int, *, life: PoolLife | None = None
    ) -> PreparedPages:
        """Return contiguous pages that begin at the given rows."""
        count = len(starts)
        return cls(
            pool=pool,
            num_pages=count,
            page_rows=page_rows,
            page=_frozen(np.arange(count)),
            row=_frozen(starts),
            rows=_frozen(np.full(count, page_rows)),
            first_row=_frozen(np.zeros(count, dtype=np.int64)),
            contiguous=True,
            life=life or PoolLife(f"pool {pool!r}"),
        )

    @classmethod
    def of_slots(
        cls, pool: str, slots: IndexArray, page_rows: int, *, life: PoolLife | None = None
    ) -> PreparedPages:
        """Return pages of scattered slots: adjacent slots of one page coalesce into runs."""
        within = np.arange(len(slots)) % page_rows
        breaks = np.ones(len(slots), dtype=bool)
        breaks[1:] = (np.diff(slots) != 1) | (within[1:] == 0)
        first = np.flatnonzero(breaks)
        return cls(
            pool=pool,
            num_pages=len(slots) // page_rows,
            page_rows=page_rows,
            page=_frozen(first // page_rows),
            row=_frozen(slots[first]),
            rows=_frozen(np.diff(np.append(first, len(slots)))),
            first_row=_frozen(within[first]),
            contiguous=False,
            life=life or PoolLife(f"pool {pool!r}"),
        )

    def select(self, pages: Sequence[int] | IndexArray) -> PreparedPages:
        """Return some of the pages, by number, renumbered in the given order.

        Raises:
            ContractError: a number is no page of these, or is named twice.
        """
        chosen = as_index_array(pages, pool=self.pool)
        if chosen.size and (chosen.min() < 0 or chosen.max() >= self.num_pages):
            msg = f"pool {self.pool!r}: cannot select pages {chosen.tolist()} of {self.num_pages}"
            raise ContractError(msg)
        if len(np.unique(chosen)) != len(chosen):
            msg = f"pool {self.pool!r}: pages {chosen.tolist()} name one twice; two keys cannot share one place"
            raise ContractError(msg)
        if self.contiguous:
            return PreparedPages.of_starts(
                self.pool, self.row[chosen], self.page_rows, life=self.life
            )
        low, high = np.searchsorted(self.page, chosen), np.searchsorted(self.page, chosen, "right")
        counts = high - low
        runs = np.repeat(low - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        return PreparedPages(
            pool=self.pool,
            num_pages=len(chosen),
            page_rows=self.page_rows,
            page=_frozen(np.repeat(np.arange(len(chosen)), counts)),
            row=_frozen(self.row[runs]),
            rows=_frozen(self.rows[runs]),
            first_row=_frozen(self.first_row[runs]),
            contiguous=False,
            life=self.life,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanColumns:
    """Some spans of an entry as columns, in object order, with their places in the object."""

    labels: tuple[str, ...]
    base: IndexArray
    """[spans] address of row 0."""
    stride: IndexArray
    """[spans] bytes from row to row."""
    row_bytes: IndexArray
    span_rows: IndexArray
    """[spans] rows in the span."""
    offset: IndexArray
    """[spans] where the span's bytes of a page begin in the object."""
    part: IndexArray
    """[spans] which of a page's objects holds the span; 0 where packed."""
    device: str = "cpu"
    """Where the spans are, in torch's notation."""

    @classmethod
    def of_components(
        cls, components: Sequence[Sequence[BufferSpan]], *, page_rows: int, packed: bool
    ) -> SpanColumns:
        """Return the columns of an entry: component by component, span by span, on one device.

        Packed: offsets run through all components. Not packed: each component is an object of its own.
        """
        offsets: list[int] = []
        parts: list[int] = []
        offset = 0
        for part, component in enumerate(components):
            offset = offset if packed else 0
            for span in component:
                offsets.append(offset)
                parts.append(0 if packed else part)
                offset += span.row_bytes * page_rows
        spans = [span for component in components for span in component]
        return cls(
            labels=tuple(span.label for span in spans),
            base=_frozen([span.base_ptr for span in spans]),
            stride=_frozen([span.row_stride for span in spans]),
            row_bytes=_frozen([span.row_bytes for span in spans]),
            span_rows=_frozen([span.rows for span in spans]),
            offset=_frozen(offsets),
            part=_frozen(parts),
            device=spans[0].device,
        )

    def select(self, mask: NDArray[np.bool_] | NDArray[np.int64]) -> SpanColumns:
        """Return the spans that a mask or positions name."""
        chosen = np.arange(len(self.labels))[mask]
        return SpanColumns(
            labels=tuple(self.labels[i] for i in chosen),
            base=_frozen(self.base[chosen]),
            stride=_frozen(self.stride[chosen]),
            row_bytes=_frozen(self.row_bytes[chosen]),
            span_rows=_frozen(self.span_rows[chosen]),
            offset=_frozen(self.offset[chosen]),
            part=_frozen(self.part[chosen]),
            device=self.device,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranges:
    """A plan fully expanded: one row per range, page by page, in object order."""

    page: IndexArray
    part: IndexArray
    address: IndexArray
    size: IndexArray
    offset: IndexArray
    """Offset in the object, relative to its payload."""

    def iovecs(self) -> NDArray[np.void]:
        """Return addresses and sizes as an array of `struct iovec`."""
        vectors = np.empty(len(self.address), dtype=IOVEC)
        vectors["address"], vectors["size"] = self.address, self.size
        return vectors


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferPlan:
    """Ranges of some pages of one entry, over all of its spans or one layer's."""

    pages: PreparedPages
    spans: SpanColumns
    part_bytes: tuple[int, ...]
    """Bytes of each of a page's objects; one where the entry is packed."""

    @property
    def pool(self) -> str:
        """Name of the entry."""
        return self.pages.pool

    @property
    def num_pages(self) -> int:
        """Pages in the plan, one object each and part."""
        return self.pages.num_pages

    @property
    def object_bytes(self) -> int:
        """Bytes of one object's payload; only for a plan of one part.

        Raises:
            ContractError: the plan has several parts; use `by_part`.
        """
        if len(self.part_bytes) != 1:
            msg = f"pool {self.pool!r}: a page is {len(self.part_bytes)} objects; take the plan apart with by_part()"
            raise ContractError(msg)
        return self.part_bytes[0]

    @cached_property
    def range_bytes(self) -> IndexArray:
        """[spans] bytes of one page in each span."""
        return _frozen(self.spans.row_bytes * self.pages.page_rows)

    @property
    def total_bytes(self) -> int:
        """Bytes that the plan moves."""
        return self.num_pages * int(self.range_bytes.sum())

    def by_part(self) -> tuple[TransferPlan, ...]:
        """Return one plan per object of a page, each of a single part; parts without spans keep their place."""
        if len(self.part_bytes) == 1:
            return (self,)
        return tuple(
            TransferPlan(
                pages=self.pages,
                spans=self.spans.select(self.spans.part == part),
                part_bytes=(size,),
            )
            for part, size in enumerate(self.part_bytes)
        )

    def select(self, pages: Sequence[int] | IndexArray) -> TransferPlan:
        """Return the plan of some of its pages, renumbered in the given order."""
        return TransferPlan(
            pages=self.pages.select(pages), spans=self.spans, part_bytes=self.part_bytes
        )

    def select_spans(self, chosen: NDArray[np.bool_] | IndexArray) -> TransferPlan:
        """Return the plan of some of its spans, by a mask or by ascending numbers; itself where these are all."""
        count = int(chosen.sum()) if chosen.dtype == np.bool_ else len(chosen)
        if count == len(self.spans.base):
            return self
        spans = self.spans.select(chosen)
        return TransferPlan(pages=self.pages, spans=spans, part_bytes=self.part_bytes)

    def check_live(self) -> None:
        """Do nothing while the memory may be used.

        Raises:
            StalePoolError: the entry was closed or its memory moved.
        """
        self.pages.life.check()

    def expand(self) -> Ranges:
        """Return every range as int64 columns: page by page, component by component, span by span.

        Raises:
            StalePoolError: the entry was closed or its memory moved.
        """
        self.check_live()
        runs, spans = self.pages, self.spans
        shape = (len(runs.row), len(spans.base))
        # One block for all columns: for a layer of few pages the calls into numpy are the whole cost.
        columns = np.empty((5, *shape), dtype=np.int64)
        columns[0] = runs.page[:, None]
        columns[1] = spans.part
        np.multiply(runs.row[:, None], spans.stride, out=columns[2])
        columns[2] += spans.base
        if runs.contiguous:
            columns[3] = self.range_bytes
            columns[4] = spans.offset
        else:
            np.multiply(runs.rows[:, None], spans.row_bytes, out=columns[3])
            np.multiply(runs.first_row[:, None], spans.row_bytes, out=columns[4])
            columns[4] += spans.offset
        page, part, address, size, offset = columns.reshape(5, -1)
        if not runs.contiguous:
            # Several runs of a page belong to one span's place in the object: span before run.
            span = np.broadcast_to(np.arange(shape[1]), shape).reshape(-1)
            order = np.lexsort((offset, span, page))
            page, part, address, size, offset = columns.reshape(5, -1)[:, order]
        return Ranges(page=page, part=part, address=address, size=size, offset=offset)

    def nested_lists(self, *, packed: bool) -> LayerMetadata:
        """Return addresses, sizes and offsets as nested lists, in SGLang 0.5.23's shape.

        Packed: one inner list per page. Not packed: one inner list per page, component and span.
        Equal inner lists of sizes and offsets may be one list; read them only.

        Raises:
            StalePoolError: the entry was closed or its memory moved.
        """
        self.check_live()
        if self.pages.contiguous:
            return self._lists_of_whole_pages(packed=packed)
        ranges = self.expand()
        columns = (ranges.address, ranges.size, ranges.offset)
        count = len(self.spans.base)
        runs = np.bincount(self.pages.page, minlength=self.num_pages)
        lengths = runs * count if packed else np.repeat(runs, count)
        ends = np.cumsum(lengths)
        cuts = list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))
        address, size, offset = (
            [column[start:end].tolist() for start, end in cuts] for column in columns
        )
        return address, size, offset

    def _lists_of_whole_pages(self, *, packed: bool) -> LayerMetadata:
        """Return the lists of contiguous pages, whose sizes and offsets are the same for every page.

        All pages share one inner list of each: a third of the objects for the garbage collector to walk.
        """
        address = self.spans.base + self.pages.row[:, None] * self.spans.stride
        sizes, offsets = self.range_bytes.tolist(), self.spans.offset.tolist()
        if packed:
            count = self.num_pages
            return address.tolist(), [sizes] * count, [offsets] * count
        size_lists = [[size] for size in sizes] * self.num_pages
        offset_lists = [[offset] for offset in offsets] * self.num_pages
        return address.reshape(-1, 1).tolist(), size_lists, offset_lists
