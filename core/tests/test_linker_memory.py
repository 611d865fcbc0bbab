"""The linker copies no more than it must, keeps nothing that it does not need, and reads no address itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from linker_rig import FAMILIES, NAMESPACE, PATIENT, Rig, linked, wait_for

from kvlinker.device import DeviceAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import DeviceCopyError
from kvlinker.linker import Linker
from kvlinker.load_batch import LoadBatch, LoadRequest, PoolLoad, PoolRequest
from kvlinker.offloads import PoolOffload
from kvlinker.plans import PreparedPages
from kvlinker.pools import KV, DevicePoolGroup
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker.store import ReadRequest, ReadSession, WriteBatch, WriteStatus
from kvlinker.testing import (
    Call,
    CopyTiming,
    FakePools,
    Family,
    FaultAccess,
    FaultStore,
    Gate,
    Hang,
    HostEvent,
    HostMemory,
    MemoryStore,
    OpaqueAccess,
    OpaqueMemory,
    PagePattern,
    Raise,
    Rule,
    fake_group,
    page_keys,
)

KEYS = page_keys(4)


WORK = (LoadBatch, LoadRequest, PoolLoad, PoolRequest, PoolOffload, PreparedPages, HostEvent)
"""What holds the engine's pages and events."""


def living() -> int:
    """Return how many of those objects are in memory."""
    gc.collect()
    # By type, not isinstance: that asks objects for their class, and some of torch warn when asked.
    return sum(issubclass(type(one), WORK) for one in gc.get_objects())


class Grudge(MemoryStore):
    """Raises one and the same error at every read, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.error = OSError("disk")

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        try:
            int("no number")
        except ValueError as cause:
            raise self.error from cause
        return super().open_read(request)


def load_and_fail(rig: Rig) -> None:
    rig.linker.lookup("a", rig.asked(KEYS))
    assert rig.linker.load("a", rig.transfers(KEYS, 4))
    assert living() > 0
    index = rig.linker.start_layer_wise_loading(ready=[HostEvent(done=True)])
    assert not rig.linker.finish_layer_wise_loading(index)


@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(1), DeviceCopyError("lost")])
def test_b50_l12_a_failed_load_keeps_none_of_its_pages(error: BaseException) -> None:
    with linked(Family.DSA) as rig:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.READ, fault=Raise(error=error), first=3))
        before = living()

        load_and_fail(rig)

        wait_for(lambda: living() <= before, "the end of the load's objects")


def test_b50_l12_an_error_that_its_store_keeps_keeps_none_of_the_pages() -> None:
    store = Grudge()
    with linked(Family.DSA, memory_store=store) as rig:
        rig.keep(KEYS)
        before = living()

        load_and_fail(rig)

        wait_for(lambda: living() <= before, "the end of the load's objects")
        assert store.error.__traceback__ is None
        assert store.error.__cause__ is not None
        assert store.error.__cause__.__traceback__ is None


def test_l12_a_load_that_landed_keeps_none_of_its_pages() -> None:
    with linked(Family.DSA) as rig:
        rig.keep(KEYS)
        before = living()
        assert rig.linker.load("a", rig.transfers(KEYS, 4))
        index = rig.linker.start_layer_wise_loading(ready=[HostEvent(done=True)])
        assert rig.linker.finish_layer_wise_loading(index)

        wait_for(lambda: living() <= before, "the end of the load's objects")


def test_l12_an_offload_keeps_nothing_once_it_completed() -> None:
    with linked(Family.DSA) as rig:
        before = living()
        transfers = rig.transfers(KEYS)
        rig.pools.fill(transfers)
        assert rig.linker.offload(transfers, ready=[HostEvent(done=True)])
        wait_for(lambda: rig.linker.num_completed_offloads() == 1, "the completion")

        wait_for(lambda: living() <= before, "the end of the offload's objects")


@pytest.mark.parametrize("call", [Call.READ, Call.WRITE])
def test_l12_a_task_left_behind_in_a_store_that_hangs_keeps_no_pool_memory(call: Call) -> None:
    options = replace(PATIENT, load_seconds=0.02, offload_seconds=0.02)
    pools, owners = owned_pools()
    with linked(pools=pools, options=options) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=call, fault=Hang(gate=gate)))
        if call is Call.READ:
            index = rig.start("a", KEYS)
            gate.wait_for_arrivals()
            assert not rig.linker.finish_layer_wise_loading(index)
        else:
            rig.offer(page_keys(2, chain="other"), page=12)
            gate.wait_for_arrivals()
            assert not rig.completion()
        pools.group.close()

        assert not gate.is_open
        wait_for(lambda: all(owner() is None for owner in owners), "the end of the memory")


class Allocation:
    """What keeps the memory of a buffer alive."""


def owned_pools() -> tuple[FakePools, list[weakref.ref[Allocation]]]:
    """Return MHA pools whose memory has owners, and references that do not keep them."""
    pools = fake_group(memory=OpaqueMemory())
    (entry,) = pools.group.entries
    owners: list[weakref.ref[Allocation]] = []

    def owned(span: BufferSpan) -> BufferSpan:
        owner = Allocation()
        owners.append(weakref.ref(owner))
        assert span.region is not None
        region = MemoryRegion(
            base_ptr=span.region.base_ptr,
            size_bytes=span.region.size_bytes,
            device=span.region.device,
            kind=span.region.kind,
            owner=owner,
        )
        return replace(span, region=region)

    components = [[owned(span) for span in component] for component in entry.components]
    made = DevicePoolEntry(
        name=KV,
        indices_from_pool=KV,
        components=components,
        layer_mapping=entry.layer_mapping,
        page_size=entry.page_size,
        rows_are_pages=False,
    )
    group = DevicePoolGroup([made], 4, entry.page_size, layout=pools.group.layout)
    return (
        FakePools(group, pools.memory, pages=16, windows={}, pattern=PagePattern()),
        owners,
    )


def test_c10_memory_stays_while_a_copy_runs_although_its_group_was_closed() -> None:
    pools, owners = owned_pools()
    with linked(pools=pools) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.access.script.add(Rule(call=Call.COPY_IN, fault=Hang(gate=gate)))
        index = rig.start("a", KEYS)
        gate.wait_for_arrivals()

        pools.group.close()
        gc.collect()

        assert all(owner() is not None for owner in owners)
        gate.open()
        assert not rig.linker.finish_layer_wise_loading(index)
        wait_for(lambda: all(owner() is None for owner in owners), "the end of the memory")


# ---- copies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_l13_each_byte_is_copied_once_in_each_direction(family: Family) -> None:
    with linked(family) as rig:
        rig.offload(KEYS)
        assert rig.restore("a", KEYS)

        for call in (Call.COPY_OUT, Call.COPY_IN):
            copied = [
                (copy.pool, label, row)
                for copy in rig.access.copies
                if copy.call is call
                for label in copy.labels
                for row in copy.rows
            ]
            assert len(copied) == len(set(copied))
            assert {pool for pool, _, _ in copied} == set(rig.pools.group.entry_map)


def test_l13_on_host_pools_a_store_copies_straight_between_pool_and_its_own_memory() -> None:
    pools = fake_group(Family.DSA, memory=HostMemory())
    with linked(pools=pools) as rig:
        rig.offload(KEYS)
        assert rig.restore("a", KEYS)

        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()
        assert len([copy for copy in rig.access.copies if copy.call is Call.COPY_IN]) == 6


@pytest.mark.parametrize("timing", CopyTiming)
def test_l13_pages_of_a_device_pass_through_bounded_double_buffers(timing: CopyTiming) -> None:
    memory = OpaqueMemory()
    pools = fake_group(Family.V4, memory=memory)
    staged = OpaqueAccess(memory, staging_bytes=4 * 256, timing=timing)
    access = FaultAccess(staged)
    linker = Linker(pools.group, MemoryStore(), NAMESPACE, device=access, options=PATIENT)
    rig = Rig(pools, MemoryStore(), FaultStore(MemoryStore()), access, linker)
    rig.offload(KEYS)

    assert rig.restore("a", KEYS)

    assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()
    assert staged.pending == 0
    assert staged.peak_pending <= 2
    linker.close()


class Shortcut(MemoryStore):
    """Says that it goes through the access, and reads nothing."""

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store."""
        del memory
        assert may_publish()
        return tuple((WriteStatus.WRITTEN,) * len(batch.keys) for batch in batches)


def test_l13_a_store_that_stores_without_reading_is_found_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with linked(memory_store=Shortcut()) as rig:
        rig.offer(KEYS)

        assert not rig.completion()
        assert "as written and read 0 B of pool memory; its store plugin is at fault" in caplog.text


def test_a_store_that_moves_device_memory_itself_is_believed() -> None:
    with linked(memory_store=Shortcut(), device_memory=True) as rig:
        rig.offer(KEYS)

        assert rig.completion()
