"""Blocks of memory are used again: finding and clearing the pages of a new one costs as much as a copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

__all__ = ["Blocks"]

_KEPT = 4
"""Two loads and two offloads at a time."""


class Blocks:
    """Blocks that nobody uses now; a bounded number of them, each of a bounded size."""

    def __init__(self, largest: int) -> None:
        """Keep no block that is longer than so many bytes."""
        self._largest = largest
        self._lock = threading.Lock()
        self._spare: list[NDArray[np.uint8]] = []

    @contextmanager
    def lent(self, size: int) -> Iterator[NDArray[np.uint8]]:
        """Give a block of so many bytes, with anything in it, for as long as the caller uses it."""
        block = self._take(size)
        try:
            yield block[:size]
        finally:
            self._give_back(block)

    def _take(self, size: int) -> NDArray[np.uint8]:
        with self._lock:
            for at, block in enumerate(self._spare):
                if len(block) >= size:
                    return self._spare.pop(at)
        return np.empty(size, dtype=np.uint8)

    def _give_back(self, block: NDArray[np.uint8]) -> None:
        if len(block) > self._largest:
            return
        with self._lock:
            self._spare = sorted([*self._spare, block], key=len)[-_KEPT:]
