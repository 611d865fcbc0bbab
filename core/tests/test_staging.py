"""Staged copies move the right bytes through bounded buffers, whenever the device chooses to copy."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from linker_rig import Waiter

from kvlinker.device import HostAccess, HostObjects
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError, DeviceCopyError, StalePoolError, TransferRevokedError
from kvlinker.plans import TransferPlan
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker.staging import BUFFERS, PendingCopy, StagedChunk, buffer_bytes_for, chunks_of
from kvlinker.testing import (
    CopyTiming,
    FakePools,
    Family,
    Gate,
    HostMemory,
    OpaqueAccess,
    OpaqueMemory,
    fake_group,
    page_keys,
)
from kvlinker.testing.pool_memory import HostStagingBuffer

KEYS = page_keys(5)
PAGES = (3, 0, 7, 4, 12)
ELSEWHERE = (9, 1, 14, 8, 2)


def opaque_pools(family: Family) -> tuple[FakePools, OpaqueMemory]:
    memory = OpaqueMemory()
    return fake_group(family, memory=memory), memory


def plans(pools: FakePools, pages: tuple[int, ...]) -> list[TransferPlan]:
    """Whole-page plans of every object of every entry."""
    found: list[TransferPlan] = []
    for entry in pools.group.entries:
        slots = pools.slots(entry.indices_from_pool, pages)
        found += entry.page_plan(entry.prepare_locations(slots)).by_part()
    return found


def host_slots(plan: TransferPlan, *, spare: int = 3) -> tuple[HostObjects, np.ndarray]:
    """Slots for the plan's objects, in descending order, with padding between them."""
    size = plan.object_bytes
    array = np.full((plan.num_pages, size + spare), 0x11, dtype=np.uint8)
    span = BufferSpan(
        base_ptr=array.ctypes.data, rows=len(array), row_bytes=size, row_stride=size + spare
    )
    slots = np.arange(plan.num_pages, dtype=np.int64)[::-1]
    return HostObjects(span=span, slots=slots), array


def every(pools: FakePools, pages: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {
        name: pages if name not in pools.windows else pages[-pools.windows[name] :]
        for name in pools.logical_pools
    }


@pytest.mark.parametrize("timing", CopyTiming)
@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("buffer_bytes", [160, 200, 333, 4096])
def test_l13_staged_copies_equal_direct_ones_in_both_directions(
    family: Family, timing: CopyTiming, buffer_bytes: int
) -> None:
    direct, (staged, memory) = fake_group(family), opaque_pools(family)
    for pools in (direct, staged):
        pools.fill(pools.page_transfers(KEYS, every(pools, PAGES)))
    access = OpaqueAccess(memory, staging_bytes=buffer_bytes * BUFFERS, timing=timing)

    for mine, theirs, target, reference in zip(
        plans(staged, PAGES),
        plans(direct, PAGES),
        plans(staged, ELSEWHERE),
        plans(direct, ELSEWHERE),
        strict=True,
    ):
        (got, got_bytes), (expected, expected_bytes) = host_slots(mine), host_slots(theirs)
        access.copy_out(mine, got)
        HostAccess().copy_out(theirs, expected)
        assert (got_bytes == expected_bytes).all()
        access.copy_in(target, got)
        HostAccess().copy_in(reference, expected)

    assert staged.memory.snapshot() == direct.memory.snapshot()
    assert access.pending == 0


def test_an_access_that_does_not_say_so_tells_nobody_what_it_copied() -> None:
    """Its chunks have numbers of their own for pages and spans: other ranges would be checked by them."""
    pools, memory = opaque_pools(Family.MHA)
    pools.fill(pools.page_transfers(KEYS, every(pools, PAGES)))
    access = OpaqueAccess(memory, staging_bytes=200 * BUFFERS)
    (plan,) = plans(pools, PAGES)
    host, _ = host_slots(plan)
    access.copy_out(plan, host)
    told: list[int] = []

    access.copy_in(plan, replace(host, copied=lambda span, _: told.append(span)))

    assert not access.tells_copied
    assert told == []


@given(data=st.data())
def test_l13_layer_plans_of_scattered_pages_move_the_same_bytes(data: st.DataObject) -> None:
    staged, memory = opaque_pools(Family.SCATTERED)
    direct = fake_group(Family.SCATTERED)
    for pools in (direct, staged):
        pools.fill(pools.page_transfers(page_keys(16), {"kv": range(16)}))
    slots = data.draw(st.permutations(range(64)))[: 4 * data.draw(st.integers(1, 16))]
    layer = data.draw(st.integers(0, 3))
    size = data.draw(st.integers(72, 500))
    access = OpaqueAccess(memory, staging_bytes=size * BUFFERS, timing=CopyTiming.EITHER, seed=size)
    results = []

    for pools, used in ((staged, access), (direct, HostAccess())):
        entry = pools.group.entries[0]
        plan = entry.layer_plan(entry.prepare_locations(slots), layer)
        assert plan is not None
        host, array = host_slots(plan)
        used.copy_out(plan, host)
        results.append(array)

    assert (results[0] == results[1]).all()


@given(
    pages=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    buffer_bytes=st.integers(40, 400),
)
def test_l13_chunks_tile_the_plan_and_never_leave_the_buffer(
    pages: int, sizes: list[int], buffer_bytes: int
) -> None:
    spans = [
        BufferSpan(base_ptr=4096 * (i + 1), rows=64, row_bytes=size, row_stride=size, label=str(i))
        for i, size in enumerate(sizes)
    ]
    entry = DevicePoolEntry(
        name="kv",
        indices_from_pool="kv",
        components=[spans],
        layer_mapping={0: list(range(len(sizes)))},
        page_size=1,
        rows_are_pages=True,
    )
    plan = entry.page_plan(entry.prepare_locations(np.arange(pages)))
    moved: list[tuple[str, int]] = []

    for chunk in chunks_of(plan, buffer_bytes):
        blocks = chunk.plan.range_bytes * chunk.plan.num_pages
        assert chunk.places.tolist() == (np.cumsum(blocks) - blocks).tolist()
        assert chunk.used_bytes == blocks.sum() <= buffer_bytes
        moved += [(label, row) for label in chunk.plan.spans.labels for row in chunk.units.tolist()]

    assert sorted(moved) == sorted(
        (str(i), page) for i in range(len(sizes)) for page in range(pages)
    )


def test_l13_the_device_copies_one_buffer_while_the_host_copies_the_other() -> None:
    pools, memory = opaque_pools(Family.MHA)
    access = OpaqueAccess(memory, staging_bytes=100 * BUFFERS)
    (plan,) = plans(pools, PAGES)
    host, _ = host_slots(plan)

    access.copy_out(plan, host)
    out = access.peak_pending
    access.copy_in(plan, host)

    assert (out, access.peak_pending) == (2, 2)
    assert access.staging_bytes == 100 * BUFFERS


def test_a_page_longer_than_a_buffer_is_refused_with_the_size_that_would_do() -> None:
    pools, memory = opaque_pools(Family.MHA)
    access = OpaqueAccess(memory, staging_bytes=95 * BUFFERS)
    (plan,) = plans(pools, PAGES)
    host, array = host_slots(plan)

    with pytest.raises(
        ContractError, match=r"pool 'kv': a page of one span is 96 B .* raise staging"
    ):
        access.copy_out(plan, host)
    with pytest.raises(ContractError, match="raise staging_bytes to at least 412"):
        buffer_bytes_for(pools.group, 95 * BUFFERS)

    assert buffer_bytes_for(pools.group, 412) == 96
    assert (array == 0x11).all()


def test_plan_and_slots_that_do_not_fit_are_refused_before_any_copy() -> None:
    pools, memory = opaque_pools(Family.MHA)
    access = OpaqueAccess(memory)
    (plan,) = plans(pools, PAGES)
    host, _ = host_slots(plan.select([0, 1]))

    for copy in (access.copy_out, access.copy_in):
        with pytest.raises(ContractError, match="5 pages of 1 objects do not fit 2 slots"):
            copy(plan, host)

    assert access.peak_pending == 0


def test_an_empty_plan_copies_nothing() -> None:
    pools, memory = opaque_pools(Family.MHA)
    access = OpaqueAccess(memory)
    (plan,) = plans(pools, PAGES)
    before = memory.snapshot()

    nothing = plan.select([])
    host, _ = host_slots(plan)
    none = HostObjects(span=host.span, slots=np.empty(0, dtype=np.int64))
    access.copy_in(nothing, none)
    access.copy_out(nothing, none)

    assert memory.snapshot() == before
    assert access.peak_pending == 0


class Countdown:
    """Does something at its n-th check."""

    def __init__(self, at: int, action: Callable[[], None]) -> None:
        self.checks = 0
        self._at = at
        self._action = action

    def __call__(self) -> None:
        self.checks += 1
        if self.checks == self._at:
            self._action()


def take_back() -> None:
    msg = "taken back"
    raise TransferRevokedError(msg)


@pytest.mark.parametrize("timing", [CopyTiming.AT_START, CopyTiming.AT_WAIT])
def test_l5_a_load_taken_back_between_chunks_stops_and_nothing_lands_later(
    timing: CopyTiming,
) -> None:
    pools, memory = opaque_pools(Family.MHA)
    (plan,) = plans(pools, PAGES)
    host, array = host_slots(plan)
    array[:] = 0x22
    access = OpaqueAccess(memory, staging_bytes=96 * BUFFERS, timing=timing)
    revoker = Countdown(4, take_back)

    with pytest.raises(TransferRevokedError, match="taken back"):
        access.copy_in(plan, host, check=revoker)

    written = sum(content.count(b"\x22") for content in memory.snapshot().values())
    assert revoker.checks == 4
    assert written == 3 * 64
    assert access.pending == 0


def test_l5_an_offload_taken_back_stops_and_leaves_the_buffers_for_the_next() -> None:
    pools, memory = opaque_pools(Family.MHA)
    pools.fill(pools.page_transfers(KEYS, {"kv": PAGES}))
    (plan,) = plans(pools, PAGES)
    host, array = host_slots(plan)
    access = OpaqueAccess(memory, staging_bytes=96 * BUFFERS)

    with pytest.raises(TransferRevokedError, match="taken back"):
        access.copy_out(plan, host, check=Countdown(3, take_back))
    partial = bool((array == 0x11).all())
    access.copy_out(plan, host)
    access.copy_in(plans(pools, ELSEWHERE)[0], host)

    assert not partial
    assert access.pending == 0
    assert pools.wrong_pages(pools.page_transfers(KEYS, {"kv": ELSEWHERE})) == ()


def test_closing_stops_a_running_copy_before_its_next_chunk() -> None:
    pools, memory = opaque_pools(Family.MHA)
    (plan,) = plans(pools, PAGES)
    host, _ = host_slots(plan)
    access = OpaqueAccess(memory, staging_bytes=96 * BUFFERS)
    gate = Gate()

    with ThreadPoolExecutor(1) as pool, gate:
        copy = pool.submit(access.copy_in, plan, host, check=gate.pass_through)
        gate.wait_for_arrivals()
        closer = Waiter(access.close)
        assert closer.still_waits()
        gate.open()
        assert closer.returns()

    assert isinstance(copy.exception(), TransferRevokedError)
    assert gate.arrived == 1
    assert access.staging_bytes == 0


def test_a_closed_access_refuses_and_closes_twice() -> None:
    pools, memory = opaque_pools(Family.MHA)
    (plan,) = plans(pools, PAGES)
    host, _ = host_slots(plan)
    access = OpaqueAccess(memory)
    access.close()
    access.close()
    before = memory.snapshot()

    for copy in (access.copy_out, access.copy_in):
        with pytest.raises(TransferRevokedError, match=r"pool 'kv': the access .* was closed"):
            copy(plan, host)

    assert memory.snapshot() == before


def test_l9_a_load_does_not_wait_for_an_offload_that_hangs() -> None:
    pools, memory = opaque_pools(Family.MHA)
    pools.fill(pools.page_transfers(KEYS, {"kv": PAGES}))
    (plan,) = plans(pools, PAGES)
    (host, _), (other, loaded) = host_slots(plan), host_slots(plan)
    loaded[:] = 0x22
    access = OpaqueAccess(memory)
    gate = Gate()

    with ThreadPoolExecutor(1) as pool, gate:
        offload = pool.submit(access.copy_out, plan, host, check=gate.pass_through)
        gate.wait_for_arrivals()
        access.copy_in(plans(pools, ELSEWHERE)[0], other)
        running = not offload.done()
        gate.open()

    assert running
    assert offload.exception() is None
    assert pools.memory.read(pools.group.entries[0].spans[0], ELSEWHERE[0] * 4) == b"\x22" * 16


class FailingCopy:
    def wait(self) -> None:
        msg = "device lost"
        raise DeviceCopyError(msg)


class FailingAccess(OpaqueAccess):
    """Fails at the start or at the wait of the n-th copy."""

    def __init__(self, memory: OpaqueMemory, *, start: int = 0, wait: int = 0) -> None:
        super().__init__(memory, staging_bytes=96 * BUFFERS)
        self._fail_start, self._fail_wait = start, wait
        self.copies = 0

    def start_gather(self, chunk: StagedChunk, buffer: HostStagingBuffer) -> PendingCopy:
        return self._begin(lambda: OpaqueAccess.start_gather(self, chunk, buffer))

    def start_scatter(self, chunk: StagedChunk, buffer: HostStagingBuffer) -> PendingCopy:
        return self._begin(lambda: OpaqueAccess.start_scatter(self, chunk, buffer))

    def _begin(self, start: Callable[[], PendingCopy]) -> PendingCopy:
        self.copies += 1
        if self.copies == self._fail_start:
            msg = "no launch"
            raise DeviceCopyError(msg)
        return FailingCopy() if self.copies == self._fail_wait else start()


@pytest.mark.parametrize("direction", ["copy_in", "copy_out"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_b59_a_copy_that_fails_to_start_leaves_nothing_pending(direction: str, at: int) -> None:
    pools, memory = opaque_pools(Family.MHA)
    (plan,) = plans(pools, PAGES)
    host, _ = host_slots(plan)
    access = FailingAccess(memory, start=at)
    copy = {"copy_in": access.copy_in, "copy_out": access.copy_out}[direction]

    with pytest.raises(DeviceCopyError, match="no launch"):
        copy(plan, host)
    pending = access.pending
    copy(plan, host)

    assert (pending, access.pending) == (0, 0)


@pytest.mark.parametrize("direction", ["copy_in", "copy_out"])
def test_buffers_that_a_device_may_still_use_are_never_used_again(direction: str) -> None:
    pools, memory = opaque_pools(Family.MHA)
    (plan,) = plans(pools, PAGES)
    host, _ = host_slots(plan)
    access = FailingAccess(memory, wait=3)
    copies = {"copy_in": access.copy_in, "copy_out": access.copy_out}
    copy = copies.pop(direction)
    (other,) = copies.values()

    with pytest.raises(DeviceCopyError, match="device lost"):
        copy(plan, host)
    with pytest.raises(DeviceCopyError, match=r"out of use since a copy failed: .*device lost"):
        copy(plan, host)
    other(plan, host)

    assert access.pending == 0


def test_opaque_addresses_fault_when_they_are_dereferenced() -> None:
    script = textwrap.dedent("""
        import ctypes
        from kvlinker.testing import OpaqueMemory

        span = OpaqueMemory().allocate(4, 64)
        print("made", flush=True)
        ctypes.string_at(span.base_ptr, 1)
        print("read", flush=True)
    """)

    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert result.returncode < 0, result.stderr
    assert result.stdout == "made\n"


def test_the_host_access_refuses_an_opaque_pool_by_its_device() -> None:
    pools, _ = opaque_pools(Family.MHA)
    (plan,) = plans(pools, PAGES)
    host, _ = host_slots(plan)

    with pytest.raises(ContractError, match="opaque:0 cannot be copied by the host"):
        HostAccess().copy_out(plan, host)


def test_c10_a_pool_that_is_given_up_during_a_copy_is_not_touched_again() -> None:
    pools, memory = opaque_pools(Family.MHA)
    (plan,) = plans(pools, PAGES)
    host, array = host_slots(plan)
    array[:] = 0x22
    access = OpaqueAccess(memory, staging_bytes=96 * BUFFERS)

    with pytest.raises(StalePoolError, match="closed"):
        access.copy_in(plan, host, check=Countdown(3, pools.group.close))

    written = sum(content.count(b"\x22") for content in memory.snapshot().values())
    assert written == 2 * 64


def test_ranges_outside_of_opaque_buffers_are_refused() -> None:
    memory = OpaqueMemory()
    span = memory.allocate(2, 8, row_stride=10, label="one")
    other = memory.allocate(1, 8, label="two")

    for address in (span.base_ptr - 1, span.base_ptr + 13, other.base_ptr + 1, 4096):
        with pytest.raises(ContractError, match="lie in no buffer"):
            memory.gather(np.array([address]), 8)

    assert memory.gather(np.array([span.base_ptr + 10]), 8).shape == (1, 8)
    assert memory.gather(np.array([], dtype=np.int64), 8).shape == (0, 8)


def test_host_memory_is_copied_under_its_real_addresses() -> None:
    memory = HostMemory()
    span = memory.allocate(4, 8, label="one")
    memory.write(span, 1, b"12345678")

    group = DevicePoolGroup(
        [
            DevicePoolEntry(
                name="kv",
                indices_from_pool="kv",
                components=[[span]],
                layer_mapping={0: 0},
                page_size=1,
                rows_are_pages=True,
            )
        ],
        1,
        1,
        layout="one/1",
    )
    plan = group.entries[0].page_plan(group.entries[0].prepare_locations([1]))
    host, array = host_slots(plan, spare=0)
    memory.access().copy_out(plan, host)

    assert array.tobytes() == b"12345678"
