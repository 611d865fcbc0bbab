"""Chunks are the parts of a plan that pass through a staging buffer, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.errors import ContractError
from kvlinker.plans import PreparedPages, SpanColumns, TransferPlan

__all__ = ["BUFFERS", "StagedChunk", "chunks_of", "pinned_chunks_of", "runs_of", "too_small"]

BUFFERS = 4
"""Two for each direction."""
_PINNED_PAGE_BYTES = 256 << 10
"""What a chunk should have of each page at least: fewer launches, and longer runs of each page."""
_ALIGNMENT = 8


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
    page_bytes: int = 0
    """Bytes from page to page, a multiple of 8, where the buffer has page after page; 0 where span after span."""

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
        raise too_small(plan.pool, longest, buffer_bytes)
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


def too_small(pool: str, longest: int, size: int) -> ContractError:
    """Return the error for a page of one span that fits no buffer."""
    return ContractError(
        f"pool {pool!r}: a page of one span is {longest} B and a staging buffer {size} B; raise "
        f"staging_bytes to at least {BUFFERS * (longest + 7)}"
    )


def runs_of(spans: SpanColumns, sizes: IndexArray) -> IndexArray:
    """Return the numbers of the spans at which a new run of a page's bytes begins: objects have gaps between runs."""
    is_new = np.ones(len(sizes), dtype=np.bool_)
    is_new[1:] = spans.offset[1:] != spans.offset[:-1] + sizes[:-1]
    return np.flatnonzero(is_new)


def pinned_chunks_of(plan: TransferPlan, buffer_bytes: int) -> Iterator[StagedChunk]:
    """Cut a plan of whole pages into chunks that have page after page, each as the object has it.

    So a device that reaches the objects takes all spans of a page that follow each other at once.

    Raises:
        ContractError: one page of one span is longer than the buffer.
    """
    longest = int(plan.range_bytes.max())
    if longest > buffer_bytes:
        raise too_small(plan.pool, longest, buffer_bytes)
    least = max(longest, min(_PINNED_PAGE_BYTES, int(plan.range_bytes.sum())))
    count = min(plan.num_pages, max(1, buffer_bytes // _aligned(least)))
    room = buffer_bytes // count // _ALIGNMENT * _ALIGNMENT if count > 1 else buffer_bytes
    for first in range(0, plan.num_pages, count):
        pages = np.arange(first, min(first + count, plan.num_pages), dtype=np.int64)
        selected = plan.pages.select(pages)
        for columns, places, used in _span_groups(plan, 1, room):
            yield StagedChunk(
                plan=TransferPlan(pages=selected, spans=columns, part_bytes=plan.part_bytes),
                first_page=first,
                places=places,
                used_bytes=_aligned(used) * (len(pages) - 1) + used,
                page_bytes=_aligned(used),
            )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
