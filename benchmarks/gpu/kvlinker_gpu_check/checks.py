"""Checks of the access itself: what it moves, through which memory, and beside what it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.device import DeviceAccess, HostAccess, HostObjects
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.staging import BUFFERS, DEFAULT_STAGING_BYTES, PINNED_RUN_BYTES
from kvlinker.testing import HostMemory
from kvlinker_gpu_check.findings import expect, expect_equal, expect_same_memory
from kvlinker_gpu_check.lab import DevicePools, EngineStream, Lab
from kvlinker_gpu_check.layouts import Layout, PlacedPools
from kvlinker_gpu_check.shared_slots import SharedSlots

__all__ = [
    "OTHER_PAGES",
    "PAGES",
    "check_bytes",
    "check_overlap",
    "check_pinned",
    "check_staging",
    "content_of",
    "fill",
    "opened",
]

PAGES, OTHER_PAGES = (6, 1, 3), (0, 5, 8)
"""Scattered pages that are stored, and the others that they come back to."""
_UNTOUCHED = 0x11
"""Fills host slots before a copy, so that what is not written shows."""


def content_of(pools: PlacedPools, *, seed: int) -> dict[str, bytes]:
    """Return random content for every buffer, by label."""
    rng = np.random.default_rng(seed)
    return {span.label: rng.bytes(span.rows * span.row_bytes) for span in pools.spans}


def fill(memory: DevicePools | HostMemory, pools: PlacedPools, content: dict[str, bytes]) -> None:
    """Write the content of every buffer."""
    for span in pools.spans:
        memory.write(span, 0, content[span.label])


def staging_bytes_for(pools: PlacedPools) -> int:
    """Return so little that one page of the longest span fits a buffer: copies take many turns."""
    longest = max(
        entry.page_rows * span.row_bytes for entry in pools.group.entries for span in entry.spans
    )
    return BUFFERS * (longest + 8)


@contextmanager
def opened(
    memory: DevicePools,
    pools: PlacedPools,
    *,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    pinned_run_bytes: int = PINNED_RUN_BYTES,
) -> Iterator[DeviceAccess]:
    """Open an access and close it at the end."""
    access = memory.open(
        pools.group, staging_bytes=staging_bytes, pinned_run_bytes=pinned_run_bytes
    ).access
    try:
        yield access
    finally:
        access.close()


@dataclass(frozen=True, slots=True)
class _Side:
    """One memory with its pools, its access, and the host slots of whole objects."""

    pools: PlacedPools
    access: DeviceAccess

    def plans(self, entry: int, pages: Sequence[int]) -> tuple[TransferPlan, ...]:
        """Return the plans of whole objects of one entry, one for each part."""
        return self._entry_plans(entry, pages, None)

    def layer_plans(self, entry: int, pages: Sequence[int], layer: int) -> tuple[TransferPlan, ...]:
        """Return the plans of one layer; none where the entry has nothing of it."""
        return self._entry_plans(entry, pages, layer)

    def _entry_plans(
        self, number: int, pages: Sequence[int], layer: int | None
    ) -> tuple[TransferPlan, ...]:
        entry = self.pools.group.entries[number]
        prepared = entry.prepare_locations(self.pools.slots(entry.indices_from_pool, pages))
        if layer is None:
            return entry.page_plan(prepared).by_part()
        plan = entry.layer_plan(prepared, layer)
        return plan.by_part() if plan is not None else ()


def _slots(plan: TransferPlan) -> tuple[HostObjects, NDArray[np.uint8]]:
    size = plan.object_bytes
    array = np.full((plan.num_pages, size), _UNTOUCHED, dtype=np.uint8)
    span = BufferSpan(
        base_ptr=array.ctypes.data,
        rows=len(array),
        row_bytes=size,
        row_stride=size,
        label="host slots",
    )
    return HostObjects(span=span, slots=np.arange(len(array), dtype=np.int64)), array


def check_bytes(lab: Lab, layout: Layout) -> None:
    """Copy pages out, back in whole, and back in layer by layer; compare all memory with the host's own copies.

    Raises:
        CheckFailedError: any byte differs, of the objects or of the pools, padding included.
    """
    for is_tight in (True, False):
        memory, host_memory = lab.pools(), HostMemory()
        pools, host_pools = layout.place(memory), layout.place(host_memory)
        content = content_of(pools, seed=1)
        fill(memory, pools, content)
        fill(host_memory, host_pools, content)
        staging = staging_bytes_for(pools) if is_tight else DEFAULT_STAGING_BYTES
        with opened(memory, pools, staging_bytes=staging) as access:
            device, host = _Side(pools, access), _Side(host_pools, HostAccess())
            for entry in range(len(pools.group.entries)):
                _move_entry(device, host, entry)
        expect_same_memory(memory.snapshot(), host_memory.snapshot())


def _move_entry(device: _Side, host: _Side, entry: int) -> None:
    name = device.pools.group.entries[entry].name
    kept: list[tuple[HostObjects, HostObjects]] = []
    for mine, theirs in zip(device.plans(entry, PAGES), host.plans(entry, PAGES), strict=True):
        (slots, got), (host_slots, expected) = _slots(mine), _slots(theirs)
        device.access.copy_out(mine, slots)
        host.access.copy_out(theirs, host_slots)
        expect_equal(got.tobytes(), expected.tobytes(), f"objects of pool {name}")
        kept.append((slots, host_slots))
    for side, number in ((device, 0), (host, 1)):
        slots_of_parts = [pair[number] for pair in kept]
        for plan, slots in zip(side.plans(entry, OTHER_PAGES), slots_of_parts, strict=True):
            side.access.copy_in(plan, slots)
        _move_layers(side, entry, slots_of_parts)


def _move_layers(side: _Side, entry: int, slots_of_parts: Sequence[HostObjects]) -> None:
    """Bring the pages back to other places once more, the last layer first."""
    turned = (*OTHER_PAGES[1:], OTHER_PAGES[0])
    for layer in reversed(range(side.pools.group.num_layers)):
        plans = side.layer_plans(entry, turned, layer)
        for plan, slots in zip(plans, slots_of_parts, strict=False):
            side.access.copy_in(plan, slots)


def check_staging(lab: Lab, layout: Layout) -> None:
    """See that every staging buffer is pinned, and that together they keep to their bound.

    Raises:
        CheckFailedError: one is not, or they are larger.
    """
    memory = lab.pools()
    pools = layout.place(memory)
    asked = staging_bytes_for(pools)
    opened_access = memory.open(pools.group, staging_bytes=asked)
    opened_access.access.close()
    sizes = [size for size, _ in opened_access.buffers]
    expect(len(sizes) == BUFFERS, f"{len(sizes)} staging buffers, expected {BUFFERS}")
    expect(sum(sizes) <= asked, f"staging buffers of {sum(sizes)} B, at most {asked} B were asked")
    unpinned = sum(not is_pinned for _, is_pinned in opened_access.buffers)
    expect(not unpinned, f"{unpinned} of {len(sizes)} staging buffers are not pinned")


def check_pinned(lab: Lab, layout: Layout) -> None:
    """Load pages, whole and layer by layer, from shared memory that is pinned, and compare with the host's own copies.

    Raises:
        CheckFailedError: it cannot be pinned, stays so, or any byte differs.
    """
    for is_tight in (True, False):
        memory, host_memory = lab.pools(), HostMemory()
        pools, host_pools = layout.place(memory), layout.place(host_memory)
        staging = staging_bytes_for(pools) if is_tight else DEFAULT_STAGING_BYTES
        content = content_of(pools, seed=4)
        fill(memory, pools, content)
        fill(host_memory, host_pools, content)
        with opened(memory, pools, staging_bytes=staging, pinned_run_bytes=1) as access:
            device, host = _Side(pools, access), _Side(host_pools, HostAccess())
            for entry in range(len(pools.group.entries)):
                _load_pinned(lab, device, host, entry)
        expect_same_memory(memory.snapshot(), host_memory.snapshot())


def _load_pinned(lab: Lab, device: _Side, host: _Side, entry: int) -> None:
    plans = device.plans(entry, PAGES)
    parts = [SharedSlots(plan, seed=5 + part) for part, plan in enumerate(plans)]
    pins = [device.access.pin_host(part.address, part.size) for part in parts]
    pool = device.pools.group.entries[entry].name
    expect(None not in pins, f"shared memory of pool {pool} cannot be pinned")
    are_pinned = all(lab.is_pinned(part.array) for part in parts)
    expect(are_pinned, f"shared memory of pool {pool} was pinned, and the device does not say so")
    slots = [part.objects for part in parts]
    for side in (device, host):
        for plan, objects in zip(side.plans(entry, OTHER_PAGES), slots, strict=True):
            side.access.copy_in(plan, objects)
        _move_layers(side, entry, slots)
    are_free = [pin.release() for pin in pins if pin is not None]
    is_free = all(are_free) and not any(lab.is_pinned(part.array) for part in parts)
    expect(is_free, f"shared memory of pool {pool} was released and is still pinned")


def check_overlap(lab: Lab, layout: Layout) -> None:
    """Copy out and in while a kernel runs on another stream, and see that neither waited for it.

    Raises:
        CheckFailedError: the kernel was done before the copies were, or bytes are wrong.
    """
    memory = lab.pools()
    pools = layout.place(memory)
    fill(memory, pools, content_of(pools, seed=2))
    stream = lab.stream()
    with opened(memory, pools) as access:
        side = _Side(pools, access)
        plan, target = side.plans(0, PAGES)[0], side.plans(0, OTHER_PAGES)[0]
        slots, _ = _slots(plan)
        access.copy_out(plan, slots)  # the first copy of a device also sets it up
        slots, got = _slots(plan)
        _copy_beside_a_kernel(stream, access, plan, target, slots)
        back, found = _slots(target)
        access.copy_out(target, back)
    expect_equal(found.tobytes(), got.tobytes(), f"pages of pool {plan.pool} copied meanwhile")
    expect((got != _UNTOUCHED).any(), f"no page of pool {plan.pool} was copied out")


def _copy_beside_a_kernel(
    stream: EngineStream,
    access: DeviceAccess,
    plan: TransferPlan,
    target: TransferPlan,
    slots: HostObjects,
) -> None:
    stream.keep_busy()
    event = stream.record()
    access.copy_out(plan, slots)
    access.copy_in(target, slots)
    was_done = event.query()
    event.wait()
    expect(not was_done, "the copies ended only after the kernel of another stream had ended")
