"""Pool memory as transfers name it: its ranges as descriptors, and the checksums of what it holds."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvlinker.errors import ContractError
from kvlinker.frames import FrameHeaders
from kvlinker.moving import summing_mover
from kvlinker.plans import TransferPlan
from kvlinker_nixl.agents import Descriptors, Memory
from kvlinker_nixl.moving import Target, descriptors
from kvlinker_nixl.state import checksum

__all__ = ["PoolRanges", "device_of", "range_numbers"]


def device_of(device: str) -> tuple[Memory, int]:
    """Return what kind of memory a device in torch's notation has, and its number.

    Raises:
        ContractError: transfers know no such device.
    """
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return Memory.HOST, 0
    if kind == "cuda" and (not number or number.isdecimal()):
        return Memory.DEVICE, int(number or 0)
    msg = f"memory of device {device!r} cannot be moved by NIXL; open the store with staged: true"
    raise ContractError(msg)


class PoolRanges:
    """The ranges of a plan where they lie in pool memory: what transfers and checksums need of them."""

    def __init__(self, plan: TransferPlan) -> None:
        """Expand a plan, once for all that is done with it.

        Raises:
            ContractError: transfers do not know the device.
            StalePoolError: the memory was given up.
        """
        self.memory, self._device = device_of(plan.spans.device)
        self._plan = plan
        self._ranges = plan.expand()

    def descriptors(
        self, starts: NDArray[np.int64], target: Target
    ) -> tuple[Descriptors, Descriptors]:
        """Return the ranges in pool memory and in a target, [ranges, 3] each.

        Args:
            starts: [pages] offset of each object's payload in the target.
            target: where the objects are.
        """
        ranges = self._ranges
        local = descriptors(ranges.address, ranges.size, self._device)
        remote = descriptors(starts[ranges.page] + ranges.offset, ranges.size, target.device)
        return local, remote

    def sums(self) -> NDArray[np.uint64]:
        """Return the checksums of what host memory holds now: [pages, spans].

        Raises:
            ContractError: it is a device's memory, which the processor cannot read.
        """
        plan, ranges = self._plan, self._ranges
        if self.memory is not Memory.HOST:
            msg = f"pool {plan.pool!r}: no checksums of memory of {plan.spans.device}; open the store with staged: true"
            raise ContractError(msg)
        shape = (plan.num_pages, len(plan.spans.base))
        mover = summing_mover(checksum) if plan.pages.contiguous else None
        if mover is not None:
            return mover.sums(ranges.address, ranges.size).reshape(shape)
        sums = self._sums_of_pages() if plan.pages.contiguous else self._sums_of_runs()
        return np.fromiter(sums, dtype=np.uint64, count=shape[0] * shape[1]).reshape(shape)

    def _sums_of_pages(self) -> Iterator[int]:
        return map(checksum, self._views())

    def _views(self) -> Iterator[memoryview]:
        ranges = self._ranges
        for address, size in zip(ranges.address.tolist(), ranges.size.tolist(), strict=True):
            yield memoryview((ctypes.c_ubyte * size).from_address(address))

    def _sums_of_runs(self) -> Iterator[int]:
        """Yield checksums of ranges that lie in several places each."""
        plan, views = self._plan, self._views()
        for runs in np.bincount(plan.pages.page, minlength=plan.num_pages).tolist():
            for _ in range(len(plan.spans.base)):
                running = xxhash.xxh3_64()
                for view in itertools.islice(views, runs):
                    running.update(view)
                yield running.intdigest()


def range_numbers(
    headers: FrameHeaders, number: int, plan: TransferPlan
) -> NDArray[np.int64] | None:
    """Return which range of an object each span of a plan is, [spans]; None where one is a part of several."""
    offsets, sizes = headers.offsets[number], headers.sizes[number]
    found = np.searchsorted(offsets, plan.spans.offset)
    found = np.minimum(found, len(offsets) - 1)
    is_same = (offsets[found] == plan.spans.offset) & (sizes[found] == plan.range_bytes)
    return found if is_same.all() else None
