"""Buffers: the memory of one layer's rows of one kind, page by page, or of its states, slot by slot."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from typing_extensions import override

from kvlinker_transformers.engine.codecs import PlainRows, RowCodec
from kvlinker_transformers.engine.tables import PageTable

__all__ = ["HeadMajorBuffer", "PageBuffer", "RowBuffer", "StateBuffer", "unwritten"]

_UNWRITTEN_BYTE = 0xFF


def unwritten(rows: int, row_bytes: int, device: torch.device) -> torch.Tensor:
    """Return new pool memory, uint8 [rows, row_bytes], in which every value reads as NaN.

    0xFF bytes are NaN in bf16, fp16, fp32 and e4m3: a row that nobody wrote shows up in the output.
    """
    return torch.full((rows, row_bytes), _UNWRITTEN_BYTE, dtype=torch.uint8, device=device)


class RowBuffer(Protocol):
    """Rows that a cache layer writes at the end of a sequence and reads back as a range."""

    def write(self, table: PageTable, first: int, values: torch.Tensor) -> None:
        """Write rows [first, first + T) of the sequence: floating point [T, width]."""
        ...

    def read(self, table: PageTable, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows [first, last) of the sequence: `dtype` [last - first, width]."""
        ...


class PageBuffer(RowBuffer):
    """Rows in pages; a page holds all first parts of its rows, then all second parts, then padding."""

    def __init__(
        self,
        codec: RowCodec,
        *,
        pages: int,
        rows_per_page: int,
        device: torch.device,
        spare_rows: int = 0,
    ) -> None:
        """Allocate the pages.

        Args:
            codec: layout of a row.
            pages: page numbers 0 to `pages` - 1.
            rows_per_page: rows of one page, not necessarily one for each token.
            device: where the memory is.
            spare_rows: rows behind the last page, which belong to none; only for rows of one part.
        """
        self.codec = codec
        self.rows_per_page = rows_per_page
        page_bytes = codec.page_bytes(rows_per_page)
        spare_bytes = spare_rows * sum(codec.part_bytes)
        self._memory = unwritten(1, pages * page_bytes + spare_bytes, device).view(-1)
        self._pages = self._memory[: pages * page_bytes].view(pages, page_bytes)
        self._parts = self._split(self._pages)

    @property
    def page_rows(self) -> torch.Tensor:
        """The memory with a page in each row: uint8 [pages, page_bytes]."""
        return self._pages

    @property
    def rows(self) -> torch.Tensor:
        """The memory with a row in each row, spare rows included: uint8 [rows, row_bytes]."""
        (row_bytes,) = self.codec.part_bytes
        return self._memory.view(-1, row_bytes)

    def _split(self, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views of the parts, uint8 [pages, rows_per_page, part_bytes] each."""
        views, start = [], 0
        for part_bytes in self.codec.part_bytes:
            end = start + self.rows_per_page * part_bytes
            views.append(pages[:, start:end].unflatten(1, (self.rows_per_page, part_bytes)))
            start = end
        return tuple(views)

    def write_at(self, pages: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write single rows: int64 [T] page numbers, int64 [T] rows within them, [T, width] values."""
        for part, encoded in zip(self._parts, self.codec.encode(values), strict=True):
            part[pages, rows] = encoded

    def read_at(self, pages: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return single rows, `dtype` [T, width]; arguments as for `write_at`."""
        return self.codec.decode([part[pages, rows] for part in self._parts], dtype)

    @override
    def write(self, table: PageTable, first: int, values: torch.Tensor) -> None:
        pages, rows = table.locate(first, first + len(values), self.rows_per_page)
        self.write_at(pages, rows, values)

    @override
    def read(self, table: PageTable, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        # Whole pages are gathered and the ends cut: one copy of a page instead of one for each row.
        pages, skip = table.covering(first, last, self.rows_per_page)
        parts = self._split(self._pages.index_select(0, pages))
        rows = [part.flatten(0, 1)[skip : skip + last - first] for part in parts]
        return self.codec.decode(rows, dtype)


class HeadMajorBuffer(RowBuffer):
    """Rows of heads in pages that hold all of one head, then all of the next: [heads, slots, head_dim]."""

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._codec = PlainRows(head_dim, dtype)
        self._shape = (heads, page_size, *self._codec.part_bytes)
        self._page_size = page_size
        self._pages = unwritten(pages, heads * self._codec.page_bytes(page_size), device)

    @property
    def page_rows(self) -> torch.Tensor:
        """The memory with a page in each row: uint8 [pages, page_bytes]."""
        return self._pages

    @override
    def write(self, table: PageTable, first: int, values: torch.Tensor) -> None:
        heads, page_size, row_bytes = self._shape
        pages, slots = table.locate(first, first + len(values), page_size)
        (encoded,) = self._codec.encode(values.reshape(len(values) * heads, -1))
        memory = self._pages.view(-1, heads, page_size, row_bytes)
        memory[pages, :, slots] = encoded.view(-1, heads, row_bytes)

    @override
    def read(self, table: PageTable, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        heads, page_size, row_bytes = self._shape
        pages, skip = table.covering(first, last, page_size)
        memory = self._pages.index_select(0, pages).view(-1, heads, page_size, row_bytes)
        rows = memory.transpose(1, 2).flatten(0, 1)[skip : skip + last - first]
        return self._codec.decode([rows.flatten(0, 1)], dtype).view(last - first, -1)


class StateBuffer:
    """States in slots, which a model reads and writes where they are."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, slots: int, device: torch.device
    ) -> None:
        self.shape = shape
        """Of one state."""
        self._rows = unwritten(slots, math.prod(shape) * dtype.itemsize, device)
        self._states = self._rows.view(dtype).view(slots, *shape)

    @property
    def rows(self) -> torch.Tensor:
        """The memory with a state in each row: uint8 [slots, row_bytes]."""
        return self._rows

    def at(self, slot: int) -> torch.Tensor:
        """Return one state in place: [1, *shape]."""
        return self._states[slot : slot + 1]
