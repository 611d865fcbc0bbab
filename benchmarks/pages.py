"""Pools with random content in host memory, of the page sizes of real models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.entries import DevicePoolEntry
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan, MemoryRegion

__all__ = ["MIB", "PagePool", "object_keys"]

MIB = 1 << 20
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class PagePool:
    """One pool, half of whose pages are the ones that move, scattered over it."""

    entry: DevicePoolEntry
    buffers: tuple[NDArray[np.uint8], ...]
    """One for each layer: uint8 [2 * pages, bytes of a page]."""
    chosen: IndexArray
    """[pages] numbers of the pages that move."""

    @classmethod
    def make(cls, name: str, sizes: Sequence[int], pages: int, *, seed: int = 0) -> PagePool:
        """Return a pool.

        Args:
            name: of the entry.
            sizes: bytes of a page in each layer's buffer.
            pages: how many move; the buffers hold twice as many.
            seed: of the content and of the choice.
        """
        rng = np.random.default_rng(seed)
        buffers = _buffers(2 * pages, sizes)
        for buffer in buffers:
            buffer[...] = rng.integers(0, 255, buffer.shape, dtype=np.uint8)
        spans = [_span(buffer, f"{name}[{i}]") for i, buffer in enumerate(buffers)]
        entry = DevicePoolEntry(
            name=name,
            indices_from_pool="kv",
            components=[spans],
            layer_mapping={i: i for i in range(len(spans))},
            page_size=1,
            rows_are_pages=True,
        )
        return cls(entry, buffers, rng.permutation(2 * pages)[:pages])

    @property
    def plan(self) -> TransferPlan:
        """The plan of all pages that move."""
        return self.entry.page_plan(self.entry.prepare_locations(self.chosen))


def _buffers(rows: int, sizes: Sequence[int]) -> tuple[NDArray[np.uint8], ...]:
    """Return buffers of one block, each on a line of the cache.

    numpy asks for huge pages where a block has 4 MiB or more. Buffers of an engine are that long, and what the
    other side of a comparison copies to is; these are shorter each, and would be in pages of 4 KiB alone.
    """
    lengths = [-(-rows * size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    block = np.empty(sum(lengths) + _ALIGNMENT, dtype=np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    buffers: list[NDArray[np.uint8]] = []
    for size, length in zip(sizes, lengths, strict=True):
        buffers.append(block[start : start + rows * size].reshape(rows, size))
        start += length
    return tuple(buffers)


def _span(buffer: NDArray[np.uint8], label: str) -> BufferSpan:
    rows, size = buffer.shape
    base = buffer.ctypes.data
    region = MemoryRegion(base_ptr=base, size_bytes=buffer.nbytes, owner=buffer)
    return BufferSpan(
        base_ptr=base, rows=rows, row_bytes=size, row_stride=size, region=region, label=label
    )


def object_keys(count: int, *, salt: int = 0) -> tuple[bytes, ...]:
    """Return keys of the length that stores take."""
    return tuple(b"%012d%020d" % (salt, number) for number in range(count))
