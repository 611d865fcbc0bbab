"""Pool memory as transfers name it: its ranges as descriptors, and the checksums of what it holds."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvlinker.errors import ContractError
from kvlinker.frames import FrameHeaders
from kvlinker.plans import TransferPlan
from kvlinker_nixl.agents import Descriptors, Memory
from kvlinker_nixl.moving import Target, descriptors
from kvlinker_nixl.state import checksum

__all__ = ["device_of", "pool_descriptors", "range_numbers", "range_sums"]


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


def pool_descriptors(
    plan: TransferPlan, starts: NDArray[np.int64], target: Target
) -> tuple[Memory, Descriptors, Descriptors]:
    """Return the plan's ranges, [ranges, 3] each: in pool memory, whose kind comes first, and in a target.

    Args:
        plan: its columns become the rows.
        starts: [pages] offset of each object's payload in the target.
        target: where the objects are.

    Raises:
        ContractError: transfers do not know the device.
        StalePoolError: the memory was given up.
    """
    memory, device = device_of(plan.spans.device)
    ranges = plan.expand()
    local = descriptors(ranges.address, ranges.size, device)
    remote = descriptors(starts[ranges.page] + ranges.offset, ranges.size, target.device)
    return memory, local, remote


def range_sums(plan: TransferPlan) -> NDArray[np.uint64]:
    """Return the checksums of what host memory holds now: [pages, spans]."""
    shape = (plan.num_pages, len(plan.spans.base))
    sums = _sums_of_runs(plan) if not plan.pages.contiguous else _sums_of_pages(plan)
    return np.fromiter(sums, dtype=np.uint64, count=shape[0] * shape[1]).reshape(shape)


def _sums_of_pages(plan: TransferPlan) -> Iterator[int]:
    plan.check_live()
    kinds = [ctypes.c_ubyte * size for size in plan.range_bytes.tolist()]
    addresses = plan.spans.base + plan.pages.row[:, None] * plan.spans.stride
    for row in addresses.tolist():
        for kind, address in zip(kinds, row, strict=True):
            yield checksum(memoryview(kind.from_address(address)))


def _sums_of_runs(plan: TransferPlan) -> Iterator[int]:
    """Yield checksums of ranges that lie in several places each."""
    ranges = plan.expand()
    places = iter(zip(ranges.address.tolist(), ranges.size.tolist(), strict=True))
    for runs in np.bincount(plan.pages.page, minlength=plan.num_pages).tolist():
        for _ in range(len(plan.spans.base)):
            running = xxhash.xxh3_64()
            for _ in range(runs):
                address, size = next(places)
                running.update(memoryview((ctypes.c_ubyte * size).from_address(address)))
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
