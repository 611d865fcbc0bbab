"""Pinned host memory is copied without a buffer between, and let go of only when no copy uses it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from linker_rig import Waiter

from kvlinker.device import DeviceAccess, HostObjects, HostPin
from kvlinker.errors import DeviceCopyError, TransferRevokedError
from kvlinker.permits import PermittedAccess, TransferPermit
from kvlinker.pinning import HostPins
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.staged_chunks import StagedChunk, pinned_chunks_of
from kvlinker.staging import PendingCopy
from kvlinker.testing import (
    CopyTiming,
    FakePools,
    Family,
    Gate,
    HostMemory,
    OpaqueAccess,
    OpaqueMemory,
    fake_group,
)
from kvlinker.testing.layered_pages import LayeredPages
from kvlinker.testing.pool_memory import HostStagingBuffer

PAGES = (3, 0, 7, 4, 12)
HEADER = 24


class Driver:
    """A device's driver, which knows what is pinned now."""

    def __init__(self, *, refuses: bool = False, keeps: bool = False) -> None:
        self.pinned: dict[int, int] = {}
        self.asked = 0
        self._refuses = refuses
        self._keeps = keeps

    def register(self, address: int, size: int) -> None:
        self.asked += 1
        if self._refuses:
            msg = "error 2 of the CUDA runtime"
            raise RuntimeError(msg)
        assert address not in self.pinned
        self.pinned[address] = size

    def unregister(self, address: int) -> None:
        if self._keeps:
            msg = "error 999 of the CUDA runtime"
            raise RuntimeError(msg)
        del self.pinned[address]

    def pins(self) -> HostPins:
        return HostPins(self.register, self.unregister)


class Slots:
    """Objects in host slots, the last one first, each behind a header."""

    def __init__(self, plan: TransferPlan) -> None:
        size, count = plan.object_bytes, plan.num_pages
        shape = (count, HEADER + size)
        self.array = np.random.default_rng(11).integers(0, 256, shape, dtype=np.uint8)
        span = BufferSpan(
            base_ptr=self.array.ctypes.data,
            rows=count,
            row_bytes=HEADER + size,
            row_stride=HEADER + size,
            label="slots",
        )
        slots = np.arange(count, dtype=np.int64)[::-1]
        self.host = HostObjects(span=span, slots=slots, first_offset=-HEADER)

    def pin(self, access: DeviceAccess) -> HostPin:
        pin = access.pin_host(self.array.ctypes.data, self.array.size)
        assert pin is not None
        return pin


def opaque_pools(family: Family = Family.MHA) -> tuple[FakePools, OpaqueMemory]:
    memory = OpaqueMemory()
    return fake_group(family, memory=memory), memory


def plans(pools: FakePools) -> Iterator[TransferPlan]:
    """Yield plans of whole pages, of every layer of them, and of several."""
    for entry in pools.group.entries:
        located = entry.prepare_locations(pools.slots(entry.indices_from_pool, PAGES))
        yield from entry.page_plan(located).by_part()
        layers = range(pools.group.num_layers)
        for some in (*(layers[i : i + 1] for i in layers), layers[1:]):
            plan = entry.layers_plan(located, some)
            if plan is not None:
                yield from plan.by_part()


def first_plan(pools: FakePools) -> TransferPlan:
    return next(plan for plan in plans(pools) if plan.pages.contiguous)


@pytest.mark.parametrize("timing", CopyTiming)
@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("buffer_bytes", [160, 200, 333, 4096])
def test_l13_pages_from_pinned_slots_equal_those_that_go_through_buffers(
    family: Family, timing: CopyTiming, buffer_bytes: int
) -> None:
    (pools, memory), (others, other_memory) = opaque_pools(family), opaque_pools(family)
    access = OpaqueAccess(
        memory,
        staging_bytes=4 * buffer_bytes,
        timing=timing,
        pins=Driver().pins(),
        pinned_run_bytes=1,
    )
    through_buffers = OpaqueAccess(other_memory, staging_bytes=4 * buffer_bytes)

    contiguous = 0
    for plan, other in zip(plans(pools), plans(others), strict=True):
        slots = Slots(plan)
        pin = slots.pin(access)
        access.copy_in(plan, slots.host)
        assert pin.release()
        through_buffers.copy_in(other, slots.host)
        contiguous += plan.pages.contiguous

    assert memory.snapshot() == other_memory.snapshot()
    assert (access.pinned_copies > 0) == (contiguous > 0)
    assert access.pending == 0


@pytest.mark.parametrize("buffer_bytes", [160, 161, 167, 200, 1000, 1 << 20])
def test_l13_chunks_of_pinned_pages_keep_to_the_buffer_and_have_every_range_once(
    buffer_bytes: int,
) -> None:
    pools, _ = opaque_pools()
    for plan in plans(pools):
        seen: list[tuple[int, str]] = []
        for chunk in pinned_chunks_of(plan, buffer_bytes):
            assert chunk.used_bytes <= buffer_bytes
            ends = chunk.places + chunk.plan.range_bytes
            assert ends.max() <= chunk.page_bytes
            assert (chunk.places[1:] >= ends[:-1]).all()
            for page in range(chunk.plan.num_pages):
                seen += [(chunk.first_page + page, label) for label in chunk.plan.spans.labels]
        assert sorted(seen) == sorted(
            (p, label) for p in range(len(PAGES)) for label in plan.spans.labels
        )


@pytest.mark.parametrize("size", [1, 3, 13])
def test_l13_chunks_of_ranges_of_odd_lengths_keep_to_every_buffer_that_has_room_for_one(
    size: int,
) -> None:
    plan = LayeredPages(3, size).both
    for buffer_bytes in range(size, 16 * size):
        chunks = list(pinned_chunks_of(plan, buffer_bytes))

        assert max(chunk.used_bytes for chunk in chunks) <= buffer_bytes
        assert sum(chunk.plan.num_pages * len(chunk.places) for chunk in chunks) == 2 * 3


def test_a_load_of_which_some_slots_are_not_pinned_goes_through_buffers() -> None:
    pools, memory = opaque_pools()
    access = OpaqueAccess(memory, pins=Driver().pins(), pinned_run_bytes=1)
    plan = first_plan(pools)
    slots, row = Slots(plan), HEADER + plan.object_bytes

    access.pin_host(slots.array.ctypes.data, 2 * row)
    access.pin_host(slots.array.ctypes.data + 2 * row, 3 * row - 1)
    access.copy_in(plan, slots.host)
    before = memory.snapshot()
    slots.array[:] = ~slots.array
    access.copy_in(plan.select([3, 4]), replace(slots.host, slots=slots.host.slots[[3, 4]]))

    assert access.pinned_copies == 1
    assert memory.snapshot() != before


def test_short_runs_go_through_buffers_since_each_costs_a_copy_of_the_device() -> None:
    pools, memory = opaque_pools()
    access = OpaqueAccess(memory, pins=Driver().pins())
    plan = first_plan(pools)
    slots = Slots(plan)
    slots.pin(access)

    access.copy_in(plan, slots.host)

    assert access.pinned_copies == 0


def test_memory_that_cannot_be_pinned_is_asked_for_once_and_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pools, memory = opaque_pools()
    driver = Driver(refuses=True)
    access = OpaqueAccess(memory, pins=driver.pins(), pinned_run_bytes=1)
    plan = first_plan(pools)
    slots = Slots(plan)

    with caplog.at_level(logging.WARNING):
        answers = [access.pin_host(slots.array.ctypes.data + i, 8) for i in range(3)]
    access.copy_in(plan, slots.host)

    assert answers == [None] * 3
    assert driver.asked == 1
    (record,) = caplog.records
    assert (
        "8 B of host memory cannot be pinned (error 2 of the CUDA runtime)" in record.getMessage()
    )
    assert access.pinned_copies == 0


def test_the_same_bytes_have_one_pin_until_it_is_released() -> None:
    driver = Driver()
    access = OpaqueAccess(OpaqueMemory(), pins=driver.pins())

    first, same = (access.pin_host(4096, 8192) for _ in range(2))
    other = access.pin_host(65536, 4096)

    assert first is same
    assert driver.pinned == {4096: 8192, 65536: 4096}
    assert first is not None
    assert [first.release(), first.release()] == [True, True]
    assert driver.pinned == {65536: 4096}
    assert access.pin_host(4096, 8192) not in (first, other, None)


def test_a_pin_that_is_released_again_leaves_a_later_one_of_the_same_bytes() -> None:
    driver = Driver()
    access = OpaqueAccess(OpaqueMemory(), pins=driver.pins())
    first = access.pin_host(4096, 8192)
    assert first is not None
    first.release()
    later = access.pin_host(4096, 8192)  # where something else was mapped meanwhile
    assert later is not None

    assert first.release()

    assert driver.pinned == {4096: 8192}
    assert access.pin_host(4096, 8192) is later
    assert later.release()
    assert driver.pinned == {}


class SlowCopy:
    """A copy whose end waits at a gate."""

    def __init__(self, copy: PendingCopy, gate: Gate) -> None:
        self._copy = copy
        self._gate = gate

    def wait(self) -> None:
        self._gate.pass_through()
        self._copy.wait()


class SlowAccess(OpaqueAccess):
    """Its copies from pinned slots end when a gate is open."""

    gate: Gate

    def start_pinned_scatter(
        self, chunk: StagedChunk, buffer: HostStagingBuffer, host: HostObjects
    ) -> PendingCopy:
        return SlowCopy(super().start_pinned_scatter(chunk, buffer, host), self.gate)


def test_l5_a_pin_is_released_only_when_no_copy_uses_it() -> None:
    pools, memory = opaque_pools()
    driver = Driver()
    access = SlowAccess(memory, pins=driver.pins(), pinned_run_bytes=1)
    access.gate = Gate()
    plan = first_plan(pools)
    slots = Slots(plan)
    pin = slots.pin(access)

    with ThreadPoolExecutor(1) as threads:
        copy = threads.submit(access.copy_in, plan, slots.host)
        access.gate.wait_for_arrivals()
        release = Waiter(pin.release)
        assert release.still_waits()
        assert driver.pinned
        access.gate.open()
        copy.result()
        assert release.returns()
        assert release.answer is True

    assert driver.pinned == {}
    access.copy_in(plan, slots.host)  # through buffers again
    assert access.pinned_copies == 1


class FailingAccess(OpaqueAccess):
    """Its copies from pinned slots fail."""

    def start_pinned_scatter(
        self, chunk: StagedChunk, buffer: HostStagingBuffer, host: HostObjects
    ) -> PendingCopy:
        del chunk, buffer, host
        msg = "illegal address"
        raise DeviceCopyError(msg)


def test_a_pin_is_released_behind_a_copy_that_failed() -> None:
    pools, memory = opaque_pools()
    driver = Driver()
    access = FailingAccess(memory, pins=driver.pins(), pinned_run_bytes=1)
    plan = first_plan(pools)
    slots = Slots(plan)
    pin = slots.pin(access)

    with pytest.raises(DeviceCopyError, match="illegal address"):
        access.copy_in(plan, slots.host)

    assert pin.release()
    assert driver.pinned == {}


def test_memory_that_the_device_does_not_let_go_of_must_stay_mapped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    access = OpaqueAccess(OpaqueMemory(), pins=Driver(keeps=True).pins())
    pin = access.pin_host(4096, 8192)
    assert pin is not None

    assert [pin.release(), pin.release()] == [False, False]
    access.close()
    assert not pin.release()

    (record,) = caplog.records
    assert "does not let go of host memory: error 999" in record.getMessage()


def test_closing_the_access_lets_go_of_everything_and_pins_nothing_any_more() -> None:
    driver = Driver()
    access = OpaqueAccess(OpaqueMemory(), pins=driver.pins())
    pin = access.pin_host(4096, 8192)
    access.pin_host(65536, 4096)
    assert pin is not None

    access.close()
    access.close()

    assert driver.pinned == {}
    assert pin.release()
    assert access.pin_host(4096, 8192) is None


def test_l5_a_transfer_pins_for_the_access_behind_it_and_copies_nothing_once_it_was_taken_back() -> (
    None
):
    pools, memory = opaque_pools()
    driver = Driver()
    access = OpaqueAccess(memory, pins=driver.pins(), pinned_run_bytes=1)
    permit = TransferPermit()
    permitted = PermittedAccess(access, permit, lambda: None)
    plan = first_plan(pools)
    slots = Slots(plan)

    assert permitted.pins_host
    pin = slots.pin(permitted)
    permitted.copy_in(plan, slots.host)
    written, before = permitted.bytes_written, memory.snapshot()
    permit.revoke()
    slots.array[:] = ~slots.array
    with pytest.raises(TransferRevokedError):
        permitted.copy_in(plan, slots.host)

    assert (access.pinned_copies, written) == (1, plan.total_bytes)
    assert memory.snapshot() == before
    assert slots.pin(access) is pin
    assert pin.release()


@pytest.mark.parametrize("memory", [HostMemory(), OpaqueMemory()])
def test_an_access_that_cannot_pin_says_so_and_copies_as_it_did(
    memory: HostMemory | OpaqueMemory,
) -> None:
    access = memory.access()

    assert not access.pins_host
    assert access.pin_host(4096, 8192) is None
