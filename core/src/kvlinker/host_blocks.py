"""Blocks of host memory are used again: finding and clearing the pages of a new one costs as much as a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

__all__ = ["HostBlocks"]

_KEPT = 4
"""Two loads and two offloads at a time."""


def _new_block(size: int) -> NDArray[np.uint8]:
    return np.empty(size, dtype=np.uint8)


class HostBlocks:
    """Blocks that nobody uses now: a bounded number of them, each of a bounded size."""

    def __init__(
        self,
        largest: int,
        *,
        kept: int = _KEPT,
        allocate: Callable[[int], NDArray[np.uint8]] = _new_block,
    ) -> None:
        """Keep nothing yet.

        Args:
            largest: bytes of the longest block that is kept.
            kept: how many are kept at most.
            allocate: makes a block of so many bytes, such as a registered one; uint8 [bytes].
        """
        self._largest = largest
        self._kept = kept
        self._allocate = allocate
        self._lock = threading.Lock()
        self._spare: list[NDArray[np.uint8]] = []

    @contextmanager
    def lent(self, size: int) -> Iterator[NDArray[np.uint8]]:
        """Give a block of so many bytes, with anything in it, for as long as the caller uses it."""
        block = self.take(size)
        try:
            yield block[:size]
        finally:
            self.give_back(block)

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return a block of at least so many bytes; who never gives it back leaves it to the garbage collector."""
        with self._lock:
            for at, block in enumerate(self._spare):
                if len(block) >= size:
                    return self._spare.pop(at)
        return self._allocate(size)

    def give_back(self, block: NDArray[np.uint8]) -> None:
        """Let a block be taken again; nobody may read or fill it any more. The longest ones are kept."""
        # A forgotten generator may give back from within the garbage collector, in a thread that holds the lock.
        if len(block) > self._largest or not self._lock.acquire(blocking=False):
            return
        try:
            self._spare = sorted([*self._spare, block], key=len)[-self._kept :]
        finally:
            self._lock.release()
