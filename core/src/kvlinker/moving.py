"""Movers copy many ranges of host memory in one call, and make their checksums: compiled code, where it is installed.

A mover is found under the entry-point group `kvlinker.movers`: a module with a function `open_mover`. Everything
works without one, by numpy, `memmove` and the checksum function of the store.
"""

from __future__ import annotations

import importlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import PluginContractError

__all__ = [
    "MOVER_GROUP",
    "MOVER_VARIABLE",
    "Mover",
    "current_mover",
    "range_sums",
    "summing_mover",
    "using_mover",
]

MOVER_GROUP = "kvlinker.movers"
MOVER_VARIABLE = "KVLINKER_MOVER"
"""Name of the mover to use, or `none`; by default the first that works, and none where plugins are allowed by name."""
_NONE = "none"
_TRIED_SIZES = (0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1024, 1025, 8192, 70_001, 300_033)
"""Sizes of every branch that checksums of 64 bits are known to have; all together more than a cache is used for."""
_ALIGNMENT = 64

_log = logging.getLogger(__name__)


class Mover(ABC):
    """Copies ranges of host memory, in one call that lets the interpreter's lock go; safe in many threads at once.

    Arguments are columns of int64 with an entry for each range: addresses, and sizes in bytes. A target overlaps
    no other range. Nothing is checked: who calls has done so.
    """

    @abstractmethod
    def move(
        self, targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> None:
        """Copy every range."""

    @abstractmethod
    def move_and_sum(
        self, targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """Copy every range, and return the checksums of the sources' bytes, made right behind each copy: [ranges].

        Where a source changes meanwhile, a copy that is not what the checksum says has another checksum.
        """

    @abstractmethod
    def sums(self, sources: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the checksums of ranges: [ranges]."""

    @contextmanager
    def beside_work(self) -> Iterator[None]:
        """Take a thread less than else for the length of a block: another one of the caller works meanwhile."""
        yield


class _Override:
    """What a block of `using_mover` chose."""

    def __init__(self) -> None:
        self.is_set = False
        self.mover: Mover | None = None


_override = _Override()


@contextmanager
def using_mover(mover: Mover | None) -> Iterator[None]:
    """Let this process copy by another mover, or by Python alone, for the length of a block: to compare and to test."""
    before = _override.is_set, _override.mover
    _override.is_set, _override.mover = True, mover
    try:
        yield
    finally:
        _override.is_set, _override.mover = before


def current_mover() -> Mover | None:
    """Return the mover of this process; None where there is none that can be used, and why is logged once."""
    return _override.mover if _override.is_set else _installed_mover()


@cache
def _installed_mover() -> Mover | None:
    try:
        from importlib_metadata import entry_points  # noqa: PLC0415  # the check on a GPU does without it

        from kvlinker.admission import ALLOW_VARIABLE  # noqa: PLC0415  # it needs the same
    except ImportError:
        return None  # sources that nobody installed, as on a machine that is lent, find no plugins either
    wanted = os.environ.get(MOVER_VARIABLE)
    if wanted == _NONE or (not wanted and os.environ.get(ALLOW_VARIABLE) is not None):
        return None  # who lists what may be imported has to name a mover too
    found = {entry.name: entry.value for entry in entry_points(group=MOVER_GROUP)}
    for name in [wanted] if wanted else sorted(found):
        try:
            return _opened(name, found)
        except Exception as error:  # noqa: BLE001  # importing runs anything, and Python copies as well
            _log.warning("mover %s cannot be used, copies are made by Python: %s", name, error)
    return None


def _opened(name: str, found: Mapping[str, str]) -> Mover:
    if name not in found:
        msg = f"no mover {name!r} is installed; there is {', '.join(sorted(found)) or 'none'}"
        raise PluginContractError(msg)
    mover: object = importlib.import_module(found[name]).open_mover()
    if not isinstance(mover, Mover):
        msg = f"{found[name]}.open_mover returned {type(mover).__name__}, expected a Mover"
        raise PluginContractError(msg)
    return mover


def summing_mover(checksum: Callable[[memoryview], int]) -> Mover | None:
    """Return the mover of this process if its checksums are those of a function; None where Python has to make them."""
    mover = current_mover()
    return mover if mover is not None and _agree(mover, checksum) else None


@lru_cache(maxsize=32)
def _agree(mover: Mover, checksum: Callable[[memoryview], int]) -> bool:
    agree = _sums_right(mover, checksum)
    if not agree:
        _log.info("checksums of mover %s are not those of a store, which makes its own", mover)
    return agree


def _sums_right(mover: Mover, checksum: Callable[[memoryview], int]) -> bool:
    """Whether a mover sums as a function does, alone and while it copies, and copies what it sums."""
    block = np.random.default_rng(1).integers(0, 256, max(_TRIED_SIZES), dtype=np.uint8)
    expected = [checksum(block.data[:size]) for size in _TRIED_SIZES]
    sizes = np.array(_TRIED_SIZES, dtype=np.int64)
    sources = np.full(len(sizes), block.ctypes.data, dtype=np.int64)
    if mover.sums(sources, sizes).tolist() != expected:
        return False
    places = -(-sizes // _ALIGNMENT) * _ALIGNMENT
    starts = np.cumsum(places) - places
    copies = np.zeros(int(places.sum()), dtype=np.uint8)
    found = mover.move_and_sum(copies.ctypes.data + starts, sources, sizes).tolist()
    copied = [
        copies[start : start + size].tobytes() == block[:size].tobytes()
        for start, size in zip(starts.tolist(), _TRIED_SIZES, strict=True)
    ]
    return bool(found == expected and all(copied))


def range_sums(
    checksum: Callable[[memoryview], int],
    views: Sequence[memoryview],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> NDArray[np.uint64]:
    """Return the checksums of the same ranges of each of some views, wherever these are: [views, ranges]."""
    mover = summing_mover(checksum)
    if mover is None:
        places = [
            slice(*place) for place in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
        ]
        sums = (checksum(view[place]) for view in views for place in places)
        # The type is named: of integers below and above 2**63 numpy makes floats, which drop the low bits.
        found = np.fromiter(sums, dtype=np.uint64, count=len(views) * len(places))
        return found.reshape(len(views), len(places))
    arrays = [np.frombuffer(view, dtype=np.uint8) for view in views]
    begun = [array.__array_interface__["data"][0] for array in arrays]
    addresses = np.array(begun, dtype=np.int64)[:, np.newaxis] + starts
    lengths = np.broadcast_to(sizes, addresses.shape)
    return mover.sums(addresses.reshape(-1), lengths.reshape(-1)).reshape(addresses.shape)
