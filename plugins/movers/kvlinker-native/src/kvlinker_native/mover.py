"""The compiled mover: one call of a C function for all ranges of a copy.

Checksums are XXH3 with 64 bits, made by the library that the package `xxhash` brings, called from C without
Python between. `kvlinker.moving` compares them with a store's own function before it trusts them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import KVLinkerError
from kvlinker.moving import Mover

__all__ = ["THREADS_VARIABLE", "NativeMover", "NativeMoverError", "open_mover"]

THREADS_VARIABLE = "KVLINKER_COPY_THREADS"
"""How many threads a copy may take, where somebody says so."""
_USUAL_THREADS = 4
"""Few cores saturate a machine's memory, and an engine has work for the rest."""
_MOST_THREADS = 64
_SUM = "XXH3_64bits"


class NativeMoverError(KVLinkerError):
    """The compiled part cannot be used here; copies are made by Python."""


class NativeMover(Mover):
    """Copies and checksums by compiled code; may be used from any number of threads at once."""

    def __init__(self, *, threads: int | None = None) -> None:
        """Load the compiled part.

        Args:
            threads: most of them that one call takes, 1 to 64; by default KVLINKER_COPY_THREADS, or as many as this
                process has cores, up to four.

        Raises:
            NativeMoverError: it was not built, its checksum is not to be had, or the number makes no sense.
        """
        self.threads = _checked_threads(threads)
        ranges = _library("kvlinker_native.ranges")
        self._count_others = ranges.kvlinker_count_others
        self._count_others.restype, self._count_others.argtypes = None, [ctypes.c_int]
        self._move = ranges.kvlinker_move
        self._move.restype = ctypes.c_int
        self._move.argtypes = [
            ctypes.c_int64,
            *[ctypes.c_void_p] * 5,
            ctypes.c_int,
            ctypes.c_int,
        ]
        self._is_xxh3 = True
        # Kept, since the library has to stay loaded as long as its function may be called.
        self._sums = _library("xxhash._xxhash")
        try:
            self._sum = ctypes.cast(self._sums[_SUM], ctypes.c_void_p)
        except AttributeError:
            msg = f"the library of the installed xxhash has no {_SUM}; try: pip install --force-reinstall xxhash"
            raise NativeMoverError(msg) from None

    def __str__(self) -> str:
        return f"native, up to {self.threads} threads"

    def move(
        self, targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> None:
        """See Mover."""
        self.run(targets, sources, sizes, None)

    def move_and_sum(
        self, targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """See Mover."""
        sums = np.empty(len(sizes), dtype=np.uint64)
        self.run(targets, sources, sizes, sums)
        return sums

    def sums(self, sources: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint64]:
        """See Mover."""
        sums = np.empty(len(sizes), dtype=np.uint64)
        self.run(None, sources, sizes, sums)
        return sums

    def run(
        self,
        targets: NDArray[np.int64] | None,
        sources: NDArray[np.int64],
        sizes: NDArray[np.int64],
        sums: NDArray[np.uint64] | None,
    ) -> int:
        """Copy to targets, make checksums where there is room for them; return how many threads were there for it."""
        # Bound to names until the call is over: C sees nothing but their addresses.
        columns = [
            None if column is None else np.ascontiguousarray(column, dtype=np.int64)
            for column in (targets, sources, sizes)
        ]
        addresses = [None if column is None else _address(column) for column in columns]
        into = None if sums is None else _address(sums)
        summing = (into, self._sum, self._is_xxh3)
        threads = int(self._move(len(sizes), *addresses, *summing, self.threads))
        if threads < 0:
            msg = f"there is no memory for a copy of {len(sizes)} ranges"
            raise MemoryError(msg)
        return threads

    @contextmanager
    def beside_work(self) -> Iterator[None]:
        """See Mover; of all calls of the process."""
        self._count_others(1)
        try:
            yield
        finally:
            self._count_others(-1)

    def use_sum(self, function: ctypes.c_void_p) -> None:
        """Make checksums by another C function: of an address and a size, 64 bits."""
        self._sum, self._is_xxh3 = function, False


def open_mover() -> NativeMover:
    """Return the mover of this process; see `kvlinker.moving`.

    Raises:
        NativeMoverError: it cannot be used here.
    """
    return NativeMover()


def _address(column: NDArray[np.int64] | NDArray[np.uint64]) -> int:
    """Return where a column begins; `column.ctypes.data` makes some objects more, for each call."""
    return int(column.__array_interface__["data"][0])


def _checked_threads(threads: int | None) -> int:
    if threads is None:
        text = os.environ.get(THREADS_VARIABLE)
        if text is None:
            return min(_USUAL_THREADS, len(os.sched_getaffinity(0)))
        threads = int(text) if text.isdecimal() else 0
    if not 1 <= threads <= _MOST_THREADS:
        told = os.environ.get(THREADS_VARIABLE, threads)
        msg = f"a copy takes 1 to {_MOST_THREADS} threads, got {told!r}; see {THREADS_VARIABLE}"
        raise NativeMoverError(msg)
    return threads


def _library(name: str) -> ctypes.CDLL:
    """Load what was compiled for a package, as the file that Python would import."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        msg = f"{name} is not there: it was not compiled where it was installed; install a C compiler and try again"
        raise NativeMoverError(msg)
    try:
        return ctypes.CDLL(found.origin)
    except OSError as error:
        msg = f"{found.origin} cannot be loaded: {error}"
        raise NativeMoverError(msg) from error
