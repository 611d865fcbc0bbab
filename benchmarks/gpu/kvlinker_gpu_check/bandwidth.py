"""Bandwidth: loads and offloads of many pages against a plain copy of pinned memory, alone and beside kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import numpy as np

from kvlinker.cuda import CopyDirection
from kvlinker.device import HostObjects
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker_gpu_check.checks import opened
from kvlinker_gpu_check.findings import Finding
from kvlinker_gpu_check.lab import Lab
from kvlinker_gpu_check.layouts import Layout
from kvlinker_gpu_check.shared_slots import SharedSlots

__all__ = ["measure_bandwidth"]

PAGES = 128
"""Pages that move; the pools hold twice as many."""
ROUNDS = 5
PLAIN_BYTES = 256 << 20


def measure_bandwidth(
    lab: Lab, layout: Layout, *, pages: int = PAGES, plain_bytes: int = PLAIN_BYTES
) -> Iterator[Finding]:
    """Yield a figure for each direction, and for loads from pinned memory: alone, and beside slow kernels.

    Args:
        lab: the device.
        layout: whose first pool is moved.
        pages: how many.
        plain_bytes: of the plain copy.
    """
    memory = lab.pools()
    pools = layout.place(memory, pages=2 * pages)
    entry = pools.group.entries[0]
    chosen = np.random.default_rng(0).permutation(2 * pages)[:pages].tolist()
    prepared = entry.prepare_locations(pools.slots(entry.indices_from_pool, chosen))
    plan = entry.page_plan(prepared).by_part()[0]
    slots, shared = _host_slots(plan), SharedSlots(plan)
    load, offload = CopyDirection.LOAD, CopyDirection.OFFLOAD
    stream = lab.stream()
    with opened(memory, pools) as access:
        access.pin_host(shared.address, shared.size)
        copies = (
            ("load", load, lambda: access.copy_in(plan, slots)),
            ("load from pinned slots", load, lambda: access.copy_in(plan, shared.objects)),
            ("offload", offload, lambda: access.copy_out(plan, slots)),
        )
        for name, direction, copy in copies:
            plain = _speed(lab, lab.pinned_copy(direction, plain_bytes), plain_bytes)
            for beside in (False, True):
                speed = _speed(
                    lab, copy, plan.total_bytes, before=stream.keep_busy if beside else _nothing
                )
                yield Finding(
                    check=f"{name}, {'beside kernels' if beside else 'alone'}",
                    layout=f"{layout.name}, {pages} pages",
                    figure=f"{speed / plain:.2f} of a plain pinned copy "
                    f"({speed / 1e9:.1f} of {plain / 1e9:.1f} GB/s)",
                )


def _nothing() -> None:
    """Run nothing beside a copy."""


def _host_slots(plan: TransferPlan) -> HostObjects:
    size = plan.object_bytes
    array = np.zeros((plan.num_pages, size), dtype=np.uint8)
    base = array.ctypes.data
    region = MemoryRegion(base_ptr=base, size_bytes=array.nbytes, owner=array)
    span = BufferSpan(
        base_ptr=base,
        rows=len(array),
        row_bytes=size,
        row_stride=size,
        region=region,
        label="host slots",
    )
    return HostObjects(span=span, slots=np.arange(plan.num_pages, dtype=np.int64))


def _speed(
    lab: Lab, copy: Callable[[], None], size: int, *, before: Callable[[], None] = _nothing
) -> float:
    """Return bytes a second, the median of some rounds after one that is not counted.

    The copy is done when it returns; kernels that were started before may run on.
    """
    seconds = []
    for _ in range(ROUNDS + 1):
        lab.synchronize()
        before()
        start = lab.clock()
        copy()
        seconds.append(lab.clock() - start)
    return size / statistics.median(seconds[1:])
