"""The memory store keeps every promise of the store contract, with and without each capability."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Unpack

import pytest

from kvlinker.device import DeviceAccess
from kvlinker.errors import (
    ContractError,
    RegistrationError,
    StoreClosedError,
    UnsupportedOperationError,
)
from kvlinker.plans import TransferPlan
from kvlinker.store import (
    Integrity,
    ReadRequest,
    ReadSession,
    ReadStatus,
    WriteBatch,
    WriteStatus,
)
from kvlinker.testing import (
    Call,
    CapabilityChoices,
    FakePools,
    Family,
    FaultAccess,
    Gate,
    Hang,
    MemoryStore,
    OpaqueMemory,
    Rule,
    fake_group,
    page_keys,
)

FINGERPRINT = b"layout"
PAGE = 640
"""Bytes of one page of the MHA group: 4 layers, 4 slots, 16 + 24 bytes."""


class Shelf:
    """Pools with some filled pages, and the store under test."""

    def __init__(self, store: MemoryStore, pools: FakePools | None = None) -> None:
        self.store = store
        self.pools = pools or fake_group(Family.MHA, pages=32)
        self.entry = self.pools.group.entries[0]
        self.access: DeviceAccess = self.pools.access()

    def plan(self, pages: Sequence[int]) -> TransferPlan:
        return self.entry.page_plan(self.entry.prepare_locations(self.pools.slots("kv", pages)))

    def layer(self, pages: Sequence[int], layer: int) -> TransferPlan:
        locations = self.entry.prepare_locations(self.pools.slots("kv", pages))
        plan = self.entry.layer_plan(locations, layer)
        assert plan is not None
        return plan

    def fill(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        self.pools.fill(self.pools.page_transfers(keys, {"kv": pages}))

    def batch(
        self, keys: Sequence[bytes], pages: Sequence[int], fingerprint: bytes = FINGERPRINT
    ) -> WriteBatch:
        return WriteBatch(keys=tuple(keys), plan=self.plan(pages), fingerprint=fingerprint)

    def write(self, keys: Sequence[bytes], first_page: int = 0) -> tuple[WriteStatus, ...]:
        pages = range(first_page, first_page + len(keys))
        self.fill(keys, pages)
        batches = [self.batch(keys, pages)]
        return self.store.write(batches, self.access, may_publish=lambda: True)[0]

    def open(
        self, keys: Sequence[bytes], size: int = PAGE, fingerprint: bytes = FINGERPRINT
    ) -> ReadSession:
        return self.store.open_read(
            ReadRequest(keys=tuple(keys), object_bytes=size, fingerprint=fingerprint)
        )

    def read(self, keys: Sequence[bytes], first_page: int = 16) -> tuple[ReadStatus, ...]:
        with self.open(keys) as session:
            return session.read(self.plan(range(first_page, first_page + len(keys))), self.access)

    def wrong(self, keys: Sequence[bytes], first_page: int = 16) -> int:
        pages = range(first_page, first_page + len(keys))
        return len(self.pools.wrong_pages(self.pools.page_transfers(keys, {"kv": pages})))


def shelf(capacity_pages: int | None = None, **choices: Unpack[CapabilityChoices]) -> Shelf:
    capacity = None if capacity_pages is None else capacity_pages * PAGE
    return Shelf(MemoryStore(capacity_bytes=capacity, **choices))


KEYS = page_keys(8)
WRITTEN, EXISTS, FULL = WriteStatus.WRITTEN, WriteStatus.EXISTS, WriteStatus.FULL
OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT


@pytest.mark.parametrize("family", [Family.MHA, Family.SCATTERED])
def test_what_is_written_reads_back_whole_at_another_place(family: Family) -> None:
    kept = Shelf(MemoryStore(), fake_group(family, pages=32, memory=OpaqueMemory()))
    size = kept.entry.page_bytes

    statuses = kept.write(KEYS[:3])
    with kept.open(KEYS[:3], size) as session:
        read = session.read(kept.plan([20, 18, 19]), kept.access)

    assert statuses == (WRITTEN,) * 3
    assert read == (OK,) * 3
    transfers = kept.pools.page_transfers(KEYS[:3], {"kv": [20, 18, 19]})
    assert kept.pools.wrong_pages(transfers) == ()


def test_a_ranged_read_fills_one_layer_and_no_other_byte() -> None:
    kept = shelf()
    kept.write(KEYS[:2])
    transfers = kept.pools.page_transfers(KEYS[:2], {"kv": [16, 17]})
    before = kept.pools.memory.snapshot()

    with kept.open(KEYS[:2]) as session:
        statuses = session.read(kept.layer([16, 17], 2), kept.access)

    after = kept.pools.memory.snapshot()
    assert statuses == (OK, OK)
    assert kept.pools.wrong_pages(transfers, layers=[2]) == ()
    assert {label for label in before if before[label] != after[label]} == {"k[2]", "v[2]"}


def test_t4_statuses_stand_at_the_positions_of_their_keys() -> None:
    kept = shelf()
    kept.write([KEYS[1]])

    written = kept.write(KEYS[:3])
    read = kept.read([b"absent-1", KEYS[2], b"absent-2", KEYS[0]])

    assert written == (WRITTEN, EXISTS, WRITTEN)
    assert read == (MISS, OK, MISS, OK)
    assert kept.store.exists([KEYS[2], b"absent", KEYS[0]]) == (True, False, True)


def test_t3_the_least_recently_used_object_goes_first_and_capacity_holds() -> None:
    kept = shelf(capacity_pages=3)
    kept.write(KEYS[:3])
    kept.read([KEYS[0]])

    kept.write([KEYS[3]])

    assert kept.store.keys() == (KEYS[2], KEYS[0], KEYS[3])
    assert kept.store.stats().used_bytes == 3 * PAGE
    assert kept.store.stats().counters["evicted"] == 1


def test_t3_held_objects_stay_until_released() -> None:
    kept = shelf(capacity_pages=2)
    kept.write(KEYS[:2])
    hold = kept.store.hold([*KEYS[:2], b"absent"], seconds=60)

    refused = kept.write([KEYS[2]])
    hold.release()
    accepted = kept.write([KEYS[2]])

    assert hold.present == (True, True, False)
    assert (refused, accepted) == ((FULL,), (WRITTEN,))
    assert kept.store.keys() == (KEYS[1], KEYS[2])


def test_a_hold_expires_by_the_clock() -> None:
    now = [0.0]
    kept = Shelf(MemoryStore(capacity_bytes=PAGE, clock=lambda: now[0]))
    kept.write(KEYS[:1])
    kept.store.hold(KEYS[:1], seconds=10)

    now[0] = 9.9
    before = kept.write([KEYS[1]])
    now[0] = 10.0
    after = kept.write([KEYS[1]])

    assert (before, after) == ((FULL,), (WRITTEN,))
    assert kept.store.kept() == 0


def test_an_open_session_keeps_its_objects() -> None:
    kept = shelf(capacity_pages=1)
    kept.write(KEYS[:1])

    with kept.open(KEYS[:1]):
        during = kept.write([KEYS[1]])
    after = kept.write([KEYS[1]])

    assert (during, after) == ((FULL,), (WRITTEN,))


def test_a_write_that_cannot_fit_evicts_nothing() -> None:
    kept = shelf(capacity_pages=2)
    kept.write(KEYS[:2])

    statuses = kept.write(KEYS[2:5])

    assert statuses == (FULL,) * 3
    assert kept.store.keys() == KEYS[:2]


def test_without_atomic_batches_what_fits_is_stored() -> None:
    kept = shelf(capacity_pages=2, atomic_batches=False)

    statuses = kept.write(KEYS[:3])

    assert statuses == (WRITTEN, WRITTEN, FULL)
    assert kept.store.keys() == KEYS[:2]


def test_objects_of_one_call_never_evict_each_other() -> None:
    kept = shelf(capacity_pages=2, atomic_batches=False)
    kept.write(KEYS[:1])

    statuses = kept.write(KEYS[:3])

    assert statuses == (EXISTS, WRITTEN, FULL)
    assert kept.store.keys() == KEYS[:2]


def test_t2_batches_become_visible_together_after_permission_was_asked_once() -> None:
    kept = shelf()
    kept.fill(KEYS[:4], range(4))
    batches = [kept.batch(KEYS[:2], [0, 1]), kept.batch(KEYS[2:4], [2, 3])]
    seen: list[tuple[bool, ...]] = []

    def may_publish() -> bool:
        seen.append(kept.store.exists(KEYS[:4]))
        return True

    kept.store.write(batches, kept.access, may_publish=may_publish)

    assert seen == [(False,) * 4]
    assert kept.store.exists(KEYS[:4]) == (True,) * 4


def test_without_permission_nothing_of_the_call_stays() -> None:
    kept = shelf()
    kept.write(KEYS[:1])

    statuses = kept.store.write(
        [kept.batch(KEYS[:2], [0, 1])], kept.access, may_publish=lambda: False
    )

    assert statuses == ((EXISTS, WriteStatus.DISCARDED),)
    assert kept.store.keys() == KEYS[:1]


def test_t2_of_two_writers_of_one_key_one_writes_and_both_are_right() -> None:
    kept = shelf()
    kept.fill(KEYS[:1], [0])
    gate = Gate()
    slow = FaultAccess(kept.access, [Rule(call=Call.COPY_OUT, fault=Hang(gate=gate))])
    batches = [kept.batch(KEYS[:1], [0])]

    with ThreadPoolExecutor(1) as pool, gate:
        first = pool.submit(kept.store.write, batches, slow, may_publish=lambda: True)
        gate.wait_for_arrivals()
        second = kept.store.write(batches, kept.access, may_publish=lambda: True)
        gate.open()

    assert second == ((WRITTEN,),)
    assert first.result() == ((EXISTS,),)
    assert kept.store.stats().used_bytes == PAGE
    assert kept.read(KEYS[:1]) == (OK,)


def test_one_key_twice_in_a_call_is_written_once() -> None:
    kept = shelf()
    kept.fill([KEYS[0], KEYS[1]], [0, 1])

    statuses = kept.store.write(
        [kept.batch([KEYS[0], KEYS[0]], [0, 1])], kept.access, may_publish=lambda: True
    )

    assert statuses == ((WRITTEN, EXISTS),)
    assert kept.read(KEYS[:1]) == (OK,)
    assert kept.wrong(KEYS[:1]) == 0


def test_overwrite_replaces_the_object_and_its_hold_keeps_the_new_one() -> None:
    kept = shelf(capacity_pages=1, overwrite=True)
    kept.write(KEYS[:1])
    kept.store.hold(KEYS[:1], seconds=60)
    old = kept.store.payload(KEYS[0])
    kept.fill([KEYS[5]], [0])

    statuses = kept.store.write([kept.batch(KEYS[:1], [0])], kept.access, may_publish=lambda: True)

    assert statuses == ((WRITTEN,),)
    assert kept.store.payload(KEYS[0]) != old
    assert kept.write([KEYS[1]], first_page=1) == (FULL,)


@pytest.mark.parametrize("kept_bytes", [PAGE - 1, PAGE + 1, 0])
def test_t1_dh9_b81_an_object_of_another_length_is_a_miss(kept_bytes: int) -> None:
    kept = shelf()
    kept.write(KEYS[:1])
    kept.store.tamper(KEYS[0], b"\1" * kept_bytes)
    before = kept.pools.memory.snapshot()

    statuses = kept.read(KEYS[:1])

    assert statuses == (MISS,)
    assert kept.pools.memory.snapshot() == before
    assert kept.store.stats().used_bytes == kept_bytes


def test_t1_an_object_of_another_layout_is_a_miss_and_is_replaced_by_a_write() -> None:
    kept = shelf()
    kept.write(KEYS[:1])

    with kept.open(KEYS[:1], fingerprint=b"other") as session:
        foreign = session.read(kept.plan([16]), kept.access)
    written = kept.store.write(
        [kept.batch(KEYS[:1], [0], fingerprint=b"other")], kept.access, may_publish=lambda: True
    )

    assert foreign == (MISS,)
    assert written == ((WRITTEN,),)
    assert kept.store.stats().objects == 1


def test_t1_e3_changed_bytes_are_corrupt_dropped_and_never_reach_pool_memory() -> None:
    kept = shelf()
    kept.write(KEYS[:2])
    payload = kept.store.payload(KEYS[0])
    kept.store.tamper(KEYS[0], payload[:-1] + bytes([payload[-1] ^ 1]))
    before = kept.pools.memory.snapshot()

    with kept.open(KEYS[:1]) as session:
        statuses = session.read(kept.plan([16]), kept.access)

    assert statuses == (CORRUPT,)
    assert kept.pools.memory.snapshot() == before
    assert kept.store.keys() == (KEYS[1],)
    assert kept.store.stats().used_bytes == PAGE
    assert kept.store.stats().counters["corrupt"] == 1


def test_with_integrity_by_length_changed_bytes_pass() -> None:
    kept = shelf(integrity=Integrity.LENGTH)
    kept.write(KEYS[:1])
    kept.store.tamper(KEYS[0], bytes(PAGE))

    statuses = kept.read(KEYS[:1])

    assert statuses == (OK,)
    assert kept.wrong(KEYS[:1]) == 8


def test_an_object_that_shrinks_while_it_is_open_is_corrupt() -> None:
    kept = shelf(integrity=Integrity.LENGTH)
    kept.write(KEYS[:1])

    with kept.open(KEYS[:1]) as session:
        kept.store.tamper(KEYS[0], b"short")
        statuses = session.read(kept.plan([16]), kept.access)

    assert statuses == (CORRUPT,)


def test_a_store_of_whole_objects_refuses_ranges() -> None:
    kept = shelf(ranged_reads=False)
    kept.write(KEYS[:1])

    with kept.open(KEYS[:1]) as session:
        with pytest.raises(UnsupportedOperationError, match="reads whole objects alone"):
            session.read(kept.layer([16], 0), kept.access)
        whole = session.read(kept.plan([16]), kept.access)

    assert whole == (OK,)


def test_a_store_of_ranges_takes_one_that_is_a_whole_object() -> None:
    kept = shelf(whole_reads=False)
    kept.write(KEYS[:1])

    with kept.open(KEYS[:1]) as session:
        whole = session.read(kept.plan([16]), kept.access)
        layer = session.read(kept.layer([16], 0), kept.access)

    assert whole == (OK,)
    assert layer == (OK,)


def test_a_store_without_leases_cannot_hold() -> None:
    kept = shelf(leases=False)

    with pytest.raises(UnsupportedOperationError, match="has no leases"):
        kept.store.hold(KEYS[:1], seconds=1)

    assert not kept.store.capabilities.leases


def test_objects_over_the_limit_fail_and_are_not_stored() -> None:
    kept = shelf(max_object_bytes=PAGE - 1)

    statuses = kept.write(KEYS[:2])

    assert statuses == (WriteStatus.FAILED,) * 2
    assert kept.store.stats().objects == 0


def test_a_call_of_more_ranges_than_the_store_takes_is_refused() -> None:
    kept = shelf(max_ranges_per_call=8)

    kept.write(KEYS[:1])
    with pytest.raises(ContractError, match="16 ranges in one call, this store takes 8"):
        kept.write(KEYS[:2])

    assert kept.store.keys() == KEYS[:1]


def test_a_store_that_registers_memory_moves_registered_ranges_only() -> None:
    kept = shelf(registers_memory=True)

    with pytest.raises(RegistrationError, match="lies in no registered region"):
        kept.write(KEYS[:1])
    kept.store.register(kept.pools.group.regions[:-1])
    with pytest.raises(RegistrationError, match="lies in no registered region"):
        kept.write(KEYS[:1])
    kept.store.unregister()
    kept.store.register(kept.pools.group.regions)

    assert kept.write(KEYS[:1]) == (WRITTEN,)
    with pytest.raises(RegistrationError, match="8 regions are registered already"):
        kept.store.register(kept.pools.group.regions)


def test_a_read_that_does_not_fit_its_request_is_refused() -> None:
    kept = shelf()
    kept.write(KEYS[:2])

    with (
        kept.open(KEYS[:2]) as session,
        pytest.raises(ContractError, match="1 objects of 640 B does not fit a request of 2"),
    ):
        session.read(kept.plan([16]), kept.access)


def test_a_deleted_object_can_be_read_to_the_end_and_counts_until_then() -> None:
    kept = shelf()
    kept.write(KEYS[:1])

    with kept.open(KEYS[:1]) as session:
        removed = kept.store.delete([KEYS[0], KEYS[0], b"absent"])
        statuses = session.read(kept.plan([16]), kept.access)
        during = kept.store.stats().used_bytes
        session.close()

    assert removed == (True, False, False)
    assert statuses == (OK,)
    assert (during, kept.store.stats().used_bytes) == (PAGE, 0)


def test_k4_clearing_a_namespace_leaves_the_others() -> None:
    kept = shelf()
    mine, other = b"mine" + KEYS[0], b"other" + KEYS[1]
    kept.write([mine, other])

    removed = kept.store.clear(b"mine")

    assert removed == 1
    assert kept.store.keys() == (other,)


def test_a_closed_store_refuses_and_frees_everything() -> None:
    kept = shelf()
    kept.write(KEYS[:1])
    session = kept.open(KEYS[:1])
    kept.store.close()
    kept.store.close()

    with pytest.raises(StoreClosedError, match="was closed"):
        kept.store.exists(KEYS[:1])
    with pytest.raises(StoreClosedError, match="was closed"):
        session.read(kept.plan([16]), kept.access)
    session.close()
    session.close()
    with pytest.raises(StoreClosedError, match="session was closed"):
        session.read(kept.plan([16]), kept.access)

    assert kept.store.stats().used_bytes == 0


def test_a_failing_copy_stores_nothing() -> None:
    kept = Shelf(MemoryStore(), fake_group(Family.MHA, pages=32, memory=OpaqueMemory()))
    kept.fill(KEYS[:1], [0])
    kept.access.close()

    with pytest.raises(RuntimeError, match="was closed"):
        kept.store.write([kept.batch(KEYS[:1], [0])], kept.access, may_publish=lambda: True)

    assert kept.store.stats().objects == 0


def test_b71_threads_that_write_read_and_delete_see_only_whole_objects() -> None:
    kept = shelf(capacity_pages=4)
    kept.fill(KEYS, range(8))
    start = threading.Barrier(3)
    over_capacity: list[int] = []

    def write() -> None:
        start.wait()
        for _ in range(150):
            batches = [kept.batch(KEYS[:4], range(4)), kept.batch(KEYS[4:], range(4, 8))]
            for batch in batches:
                kept.store.write([batch], kept.access, may_publish=lambda: True)
            if kept.store.stats().used_bytes > 4 * PAGE:
                over_capacity.append(1)

    def remove() -> None:
        start.wait()
        for number in range(300):
            kept.store.delete([KEYS[number % 8]])

    def read() -> int:
        start.wait()
        wrong = 0
        for number in range(300):
            key = KEYS[number % 8]
            status = kept.read([key], first_page=16)
            wrong += status[0] not in (OK, MISS)
            wrong += status[0] is OK and kept.wrong([key], first_page=16) > 0
        return wrong

    with ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(write), pool.submit(remove)]
        wrong = pool.submit(read)

    assert [task.result() for task in tasks] == [None, None]
    assert wrong.result() == 0
    assert over_capacity == []
    assert kept.store.stats().used_bytes == PAGE * kept.store.stats().objects


def test_capabilities_are_what_was_chosen() -> None:
    choices: CapabilityChoices = {"ranged_reads": False, "integrity": Integrity.LENGTH}

    capabilities = MemoryStore(**choices).capabilities

    assert (capabilities.ranged_reads, capabilities.integrity) == (False, Integrity.LENGTH)
    assert (capabilities.leases, capabilities.atomic_batches, capabilities.persistent) == (
        True,
        True,
        False,
    )
