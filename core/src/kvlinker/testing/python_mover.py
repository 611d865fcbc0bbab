"""A mover in Python: slow, and right; for tests of what uses a mover."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from kvlinker.frames import Checksum
from kvlinker.moving import Mover

__all__ = ["PythonMover"]


class PythonMover(Mover):
    """Copies range by range, and makes checksums with a function that it was given."""

    def __init__(self, checksum: Checksum) -> None:
        """Take the function that makes checksums."""
        self._checksum = checksum
        self.calls: list[str] = []
        """What was called, in order."""

    def move(
        self, targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> None:
        """See Mover."""
        self.calls.append("move")
        self._move(targets, sources, sizes)

    def move_and_sum(
        self, targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """See Mover."""
        self.calls.append("move_and_sum")
        self._move(targets, sources, sizes)
        return self._sums(sources, sizes)

    def sums(self, sources: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint64]:
        """See Mover."""
        self.calls.append("sums")
        return self._sums(sources, sizes)

    @staticmethod
    def _move(
        targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> None:
        for place in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(*place)

    def _sums(self, sources: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint64]:
        ranges = zip(sources.tolist(), sizes.tolist(), strict=True)
        views = (
            memoryview((ctypes.c_char * size).from_address(at)).cast("B") for at, size in ranges
        )
        return np.fromiter(map(self._checksum, views), dtype=np.uint64, count=len(sizes))
