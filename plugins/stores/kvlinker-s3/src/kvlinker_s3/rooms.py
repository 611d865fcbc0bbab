"""A room is host memory that answers are read into, in the way in which they are copied out of it together."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlinker.host_blocks import HostBlocks

__all__ = ["Room"]

_BLOCK_BYTES = 4 << 20
"""Of a block at least, so that one fits whatever comes next."""


class Room:
    """Host memory for the answers of some requests, taken when the first of them comes."""

    def __init__(self, blocks: HostBlocks, *, count: int, size: int) -> None:
        """Take no memory yet.

        Args:
            blocks: where it is from, and goes when nobody looks at it any more.
            count: objects.
            size: bytes of each.
        """
        self._blocks = blocks
        self._count = count
        self._bytes = count * size
        self._lock = threading.Lock()
        self._block: NDArray[np.uint8] | None = None

    @property
    def view(self) -> memoryview:
        """All bytes."""
        with self._lock:
            if self._block is None:
                self._block = self._blocks.take(max(self._bytes, _BLOCK_BYTES))
            return self._block.data[: self._bytes]

    def places(self, number: int, sizes: Sequence[int]) -> list[memoryview]:
        """Return where the ranges of an object go: beside the same ranges of the others."""
        view, places, start = self.view, [], 0
        for size in sizes:
            first = start + number * size
            places.append(view[first : first + size])
            start += self._count * size
        return places

    def rows(self, start: int, size: int) -> NDArray[np.uint8]:
        """Return the range of all objects that so many bytes of ranges come before: [objects, bytes]."""
        first = self._count * start
        block = np.frombuffer(self.view, dtype=np.uint8)
        return block[first : first + self._count * size].reshape(self._count, size)

    def give_back(self) -> None:
        """Let others have the memory; nobody may be reading into it, or look at it, any more."""
        with self._lock:
            block, self._block = self._block, None
        if block is not None:
            self._blocks.give_back(block)
