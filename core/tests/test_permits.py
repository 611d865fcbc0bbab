"""After a permit was revoked, no byte of pool memory is read or written for its transfer again."""

from __future__ import annotations

import threading
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from linker_rig import Waiter

from kvlinker.device import HostAccess, HostObjects
from kvlinker.errors import DeviceCopyError, StalePoolError, TransferRevokedError
from kvlinker.moving import using_mover
from kvlinker.permits import PermittedAccess, TransferPermit
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.staging import BUFFERS, PendingCopy, StagedChunk
from kvlinker.testing import (
    Call,
    FakePools,
    FaultAccess,
    Gate,
    Hang,
    OpaqueAccess,
    OpaqueMemory,
    PythonMover,
    Raise,
    Rule,
    fake_group,
    page_keys,
)
from kvlinker.testing.pool_memory import HostStagingBuffer
from kvlinker.testing.waiting import wait_for

KEYS = page_keys(2)


def always_live() -> None:
    """Say that the pools are there."""


class Transfer:
    """One transfer of two pages, and the host memory that it goes through."""

    def __init__(self) -> None:
        self.pools: FakePools = fake_group(memory=OpaqueMemory())
        entry = self.pools.group.entries[0]
        slots = self.pools.slots("kv", [1, 3])
        self.plan: TransferPlan = entry.page_plan(entry.prepare_locations(slots))
        size = self.plan.object_bytes
        self.array = np.zeros((2, size), dtype=np.uint8)
        span = BufferSpan(
            base_ptr=self.array.ctypes.data, rows=2, row_bytes=size, row_stride=size, label="host"
        )
        self.host = HostObjects(span=span, slots=np.arange(2, dtype=np.int64))
        self.access = FaultAccess(self.pools.access())
        self.permit = TransferPermit()
        self.permitted = PermittedAccess(self.access, self.permit, always_live)


class RevokedMeanwhile(OpaqueAccess):
    """Staged access whose permit is taken back, by another thread, while the first chunk is under way."""

    def __init__(self, memory: OpaqueMemory, permit: TransferPermit, *, staging_bytes: int) -> None:
        super().__init__(memory, staging_bytes=staging_bytes)
        self.permit = permit
        self.revoker = threading.Thread(target=permit.revoke)
        self.started = 0

    def start_scatter(self, chunk: StagedChunk, buffer: HostStagingBuffer) -> PendingCopy:
        self.started += 1
        if self.started == 1:
            self.revoker.start()
            wait_for(lambda: self.permit.is_revoked, "the revocation")
        return super().start_scatter(chunk, buffer)


@pytest.fixture
def transfer() -> Transfer:
    return Transfer()


def test_l5_copies_under_a_permit_move_and_count_bytes(transfer: Transfer) -> None:
    transfer.array[:] = 7
    transfer.permitted.copy_in(transfer.plan, transfer.host)
    transfer.array[:] = 0
    transfer.permitted.copy_out(transfer.plan, transfer.host)

    assert (transfer.array == 7).all()
    assert transfer.permitted.bytes_written == transfer.plan.total_bytes
    assert transfer.permitted.bytes_read == transfer.plan.total_bytes


def test_l5_a_revoked_permit_refuses_copies_in_both_directions(transfer: Transfer) -> None:
    transfer.permit.revoke()
    before = transfer.pools.memory.snapshot()

    with pytest.raises(TransferRevokedError, match="may belong to another request"):
        transfer.permitted.copy_in(transfer.plan, transfer.host)
    with pytest.raises(TransferRevokedError):
        transfer.permitted.copy_out(transfer.plan, transfer.host)

    assert transfer.permit.is_revoked
    assert transfer.pools.memory.snapshot() == before
    assert transfer.access.copies == ()
    assert (transfer.permitted.bytes_written, transfer.permitted.bytes_read) == (0, 0)


def test_l5_revoking_waits_for_copies_under_way(transfer: Transfer) -> None:
    gate = Gate()
    transfer.access.script.add(Rule(call=Call.COPY_IN, fault=Hang(gate=gate)))
    copier = threading.Thread(
        target=transfer.permitted.copy_in, args=(transfer.plan, transfer.host)
    )

    copier.start()
    gate.wait_for_arrivals()
    revoker = Waiter(transfer.permit.revoke)
    assert revoker.still_waits()
    assert transfer.permit.is_revoked
    gate.open()

    assert revoker.returns()
    assert transfer.access.writes_since(transfer.access.mark()) == ()
    copier.join(30)


def test_l5_a_staged_copy_ends_at_its_next_chunk_once_the_permit_is_taken_back() -> None:
    memory = OpaqueMemory()
    pools = fake_group(memory=memory)
    entry = pools.group.entries[0]
    plan = entry.page_plan(entry.prepare_locations(pools.slots("kv", [1, 3, 5, 7])))
    longest = int(plan.range_bytes.max())
    array = np.zeros((4, plan.object_bytes), dtype=np.uint8)
    span = BufferSpan(
        base_ptr=array.ctypes.data, rows=4, row_bytes=array.shape[1], row_stride=array.shape[1]
    )
    host = HostObjects(span=span, slots=np.arange(4, dtype=np.int64))
    permit = TransferPermit()
    access = RevokedMeanwhile(memory, permit, staging_bytes=longest * BUFFERS)
    permitted = PermittedAccess(access, permit, always_live)

    with pytest.raises(TransferRevokedError, match="the transfer was taken back"):
        permitted.copy_in(plan, host)
    access.revoker.join(30)

    assert access.started == 1
    assert permitted.bytes_written == 0


def test_l5_a_copy_that_fails_is_over_and_not_counted(transfer: Transfer) -> None:
    error = DeviceCopyError("device lost")
    transfer.access.script.add(Rule(call=Call.COPY_IN, fault=Raise(error=error)))

    with pytest.raises(DeviceCopyError):
        transfer.permitted.copy_in(transfer.plan, transfer.host)
    transfer.permit.revoke()

    assert transfer.permitted.bytes_written == 0


def test_c10_no_copy_touches_pools_that_are_gone(transfer: Transfer) -> None:
    group = transfer.pools.group
    permitted = PermittedAccess(transfer.access, transfer.permit, group.check_live)
    group.close()

    with pytest.raises(StalePoolError):
        permitted.copy_in(transfer.plan, transfer.host)

    assert transfer.access.copies == ()


def test_l7_the_permission_to_publish_ends_with_the_permit() -> None:
    used, unused = TransferPermit(), TransferPermit()

    assert used.try_publish()
    used.revoke()
    unused.revoke()

    assert used.is_publishing
    assert not unused.try_publish()
    assert not unused.is_publishing


def test_l5_revoking_twice_is_no_harm() -> None:
    permit = TransferPermit()

    permit.revoke()
    permit.revoke()

    assert permit.is_revoked


class Owner:
    """What keeps a pool's memory."""


def test_l12_owners_are_kept_until_the_permit_is_revoked() -> None:
    permit, owner = TransferPermit(), Owner()
    kept = weakref.ref(owner)
    permit.keep((owner,))
    del owner

    assert kept() is not None
    permit.revoke()
    assert kept() is None


def test_l12_a_revoked_permit_keeps_nothing() -> None:
    permit, owner = TransferPermit(), Owner()
    kept = weakref.ref(owner)
    permit.revoke()
    permit.keep((owner,))
    del owner

    assert kept() is None


def test_copies_from_several_threads_are_all_counted(transfer: Transfer) -> None:
    def copy(_: int) -> None:
        transfer.permitted.copy_in(transfer.plan, transfer.host)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(copy, range(64)))

    assert transfer.permitted.bytes_written == 64 * transfer.plan.total_bytes


def test_a_permitted_access_tells_of_copies_where_the_access_behind_it_does(
    transfer: Transfer,
) -> None:
    host_access = PermittedAccess(HostAccess(), transfer.permit, lambda: None)

    assert host_access.tells_copied
    assert not transfer.permitted.tells_copied  # a fault access alters what passes through it
    with using_mover(PythonMover(zlib.crc32)):
        assert host_access.makes_sums
        assert not transfer.permitted.makes_sums
    with using_mover(None):
        assert not host_access.makes_sums
