"""Blocks of host memory are used again: memory that is new costs as much as the copy into it."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

__all__ = ["Blocks"]

_KEPT = 2


class Blocks:
    """A few blocks that nobody uses now."""

    def __init__(self, max_bytes: int) -> None:
        """Keep no block that is longer."""
        self._max = max_bytes
        self._lock = threading.Lock()
        self._free: list[NDArray[np.uint8]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return a block of at least so many bytes, with anything in it."""
        with self._lock:
            for at, block in enumerate(self._free):
                if block.nbytes >= size:
                    return self._free.pop(at)
        return np.empty(size, dtype=np.uint8)

    def give(self, block: NDArray[np.uint8]) -> None:
        """Let a block be taken again; the longest ones are kept."""
        if block.nbytes > self._max:
            return
        with self._lock:
            self._free = sorted([*self._free, block], key=lambda one: one.nbytes)[-_KEPT:]
