"""Tiers: what is written, read, lost and removed in which of two stores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tiers_rig import Tiers

from kvlinker.errors import ContractError, DeviceCopyError, StoreError, StoreTimeoutError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.stores.tiered import TieredStore, tiered
from kvlinker.testing import (
    Call,
    Family,
    FaultAccess,
    FaultStore,
    Gate,
    Hang,
    MemoryStore,
    Moment,
    Raise,
    Rule,
    page_keys,
)
from kvlinker.testing.shelves import LAYERS, Shelf, object_keys
from kvlinker.testing.small_linkers import SmallLinker
from kvlinker.testing.waiting import wait_for

OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
WRITTEN, FULL, FAILED = WriteStatus.WRITTEN, WriteStatus.FULL, WriteStatus.FAILED


# ---- writing --------------------------------------------------------------------------------------


def test_a_write_is_in_both_stores_and_counts_once() -> None:
    tiers = Tiers()
    keys = object_keys(3)

    statuses = tiers.shelf.write(keys)

    assert statuses == (WRITTEN,) * 3
    assert tiers.near_memory.exists(keys) == tiers.far_memory.exists(keys) == (True,) * 3
    stats = tiers.store.stats()
    assert stats.objects == 3
    assert stats.used_bytes == 2 * 3 * tiers.shelf.page_bytes


def test_what_the_far_store_does_not_take_is_not_in_the_near_one() -> None:
    tiers = Tiers(far_bytes=2 * 640)
    first, second = object_keys(2), object_keys(1, chain="second")
    tiers.shelf.stock(first)
    hold = tiers.far_memory.hold(first, seconds=600)

    statuses = tiers.shelf.write(second)

    assert statuses == (FULL,)
    assert tiers.store.exists(second) == (False,)
    hold.release()


def test_a_near_store_that_fails_costs_no_write() -> None:
    tiers = Tiers()
    tiers.fail(tiers.near, Call.WRITE, StoreError("no memory"))
    keys = object_keys(2)

    statuses = tiers.shelf.write(keys)

    assert statuses == (WRITTEN, WRITTEN)
    assert tiers.near_memory.exists(keys) == (False, False)
    assert tiers.count("ram_failed") == 1
    assert tiers.shelf.read(keys) == (OK, OK)


def test_a_device_that_fails_at_the_near_copy_leaves_what_is_stored() -> None:
    tiers = Tiers()
    keys = object_keys(2)
    broken = FaultAccess(
        tiers.shelf.access,
        [Rule(call=Call.COPY_OUT, fault=Raise(error=DeviceCopyError("gone")), first=2)],
    )

    statuses = tiers.shelf.write(keys, memory=broken)

    assert statuses == (WRITTEN, WRITTEN)
    assert broken.script.fired
    assert tiers.near_memory.exists(keys) == (False, False)


def test_a_far_store_that_fails_fails_the_write_by_a_status() -> None:
    tiers = Tiers()
    tiers.fail(tiers.far, Call.WRITE, StoreError("disk is gone"))
    keys = object_keys(2)

    statuses = tiers.shelf.write(keys)

    assert statuses == (FAILED, FAILED)
    assert tiers.store.exists(keys) == (False, False)
    assert tiers.count("disk_failed") == 1


# ---- reading --------------------------------------------------------------------------------------


def test_what_is_near_is_not_asked_of_the_far_store() -> None:
    tiers = Tiers()
    keys = object_keys(4)
    tiers.shelf.stock(keys)

    statuses = tiers.shelf.read(keys)

    assert statuses == (OK,) * 4
    assert tiers.far.count(Call.OPEN_READ) == 0
    assert (tiers.count("ram_hits"), tiers.count("disk_hits")) == (4, 0)


def test_what_is_read_from_far_is_near_afterwards() -> None:
    tiers = Tiers()
    keys, absent = object_keys(4), object_keys(1, chain="absent")
    tiers.shelf.stock(keys)
    tiers.forget_near()

    statuses = tiers.shelf.read([*keys, *absent])

    tiers.promote()
    assert statuses == (OK,) * 4 + (MISS,)
    assert tiers.near_memory.exists([*keys, *absent]) == (True,) * 4 + (False,)
    assert (tiers.count("disk_hits"), tiers.count("missed")) == (4, 1)
    assert tiers.count("promoted") == 4
    assert tiers.shelf.read(keys) == (OK,) * 4
    assert tiers.count("ram_hits") == 4


def test_what_is_read_layer_by_layer_is_promoted_once_it_was_read_whole() -> None:
    tiers = Tiers()
    whole, part = object_keys(2), object_keys(2, chain="part")
    tiers.shelf.stock([*whole, *part])
    tiers.forget_near()

    with tiers.shelf.open(whole) as session:
        for layer in range(LAYERS):
            tiers.shelf.read(whole, session=session, layer=layer)
    with tiers.shelf.open(part) as session:
        tiers.shelf.read(part, session=session, layer=0)

    tiers.promote()
    assert tiers.near_memory.exists([*whole, *part]) == (True, True, False, False)
    assert tiers.count("disk_hits") == 4
    with tiers.shelf.open(whole) as session:
        assert tiers.shelf.read(whole, session=session, layer=2) == (OK, OK)
    assert tiers.count("ram_hits") == 2


def test_a_damaged_near_object_is_read_from_far_and_near_again_afterwards() -> None:
    tiers = Tiers()
    keys = object_keys(3)
    tiers.shelf.stock(keys)
    tiers.near_memory.tamper(keys[1], bytes(tiers.shelf.page_bytes))

    statuses = tiers.shelf.read(keys)

    tiers.promote()
    assert statuses == (OK, OK, OK)
    assert tiers.count("ram_corrupt") == 1
    assert tiers.near_memory.payload(keys[1]) == tiers.far_memory.payload(keys[1])
    assert (tiers.count("ram_hits"), tiers.count("disk_hits")) == (2, 1)


def test_an_object_that_is_damaged_near_and_absent_far_is_reported_as_corrupt() -> None:
    tiers = Tiers()
    keys = object_keys(1)
    tiers.shelf.stock(keys)
    tiers.near_memory.tamper(keys[0], bytes(tiers.shelf.page_bytes))
    tiers.far_memory.delete(keys)

    assert tiers.shelf.read(keys) == (CORRUPT,)


def test_t6_a_far_store_that_is_down_costs_one_timeout_and_near_objects_stay_readable() -> None:
    tiers = Tiers()
    near, far = object_keys(2), object_keys(2, chain="far")
    tiers.shelf.stock([*near, *far])
    tiers.near_memory.delete(far)
    tiers.fail(tiers.far, Call.EXISTS, StoreTimeoutError("no answer"))

    found = [tiers.store.exists([*near, *far]) for _ in range(3)]

    assert found == [(True, True, False, False)] * 3
    assert tiers.far.count(Call.EXISTS) == 1
    assert tiers.shelf.read([*near, *far]) == (OK, OK, ReadStatus.FAILED, ReadStatus.FAILED)
    assert tiers.count("disk_failed") == 1
    assert tiers.count("disk_skipped") >= 2


def test_an_object_that_only_the_near_store_has_left_is_found_and_held() -> None:
    tiers = Tiers()
    keys = object_keys(2)
    tiers.shelf.stock(keys)
    tiers.far_memory.delete(keys[:1])

    with_both = tiers.store.hold(keys, seconds=60)

    assert with_both.present == (True, True)
    assert tiers.store.exists(keys) == (True, True)
    assert tiers.near_memory.kept() == 2
    assert tiers.far_memory.kept() == 0
    with_both.release()
    assert tiers.near_memory.kept() == 0


# ---- promotion ------------------------------------------------------------------------------------


def test_what_was_deleted_meanwhile_is_not_promoted() -> None:
    tiers = Tiers()
    keys = object_keys(2)
    tiers.shelf.stock(keys)
    tiers.forget_near()
    gate = Gate(limit_seconds=60)
    tiers.near.script.add(Rule(call=Call.WRITE, fault=Hang(gate=gate)))

    with gate:
        tiers.shelf.read(keys)
        gate.wait_for_arrivals()
        removed = tiers.store.delete(keys)

    tiers.promote()
    assert removed == (True, True)
    assert tiers.store.exists(keys) == (False, False)
    assert tiers.count("promoted") == 0


@pytest.mark.parametrize("promotion_bytes", [0, 639])
def test_what_does_not_fit_the_buffer_stays_far(promotion_bytes: int) -> None:
    tiers = Tiers(promotion_bytes=promotion_bytes)
    keys = object_keys(2)
    tiers.shelf.stock(keys)
    tiers.forget_near()

    tiers.shelf.read(keys)

    tiers.promote()
    assert tiers.near_memory.exists(keys) == (False, False)
    assert tiers.count("promotion_dropped") == 2


def test_what_the_near_store_never_takes_is_not_read_again_from_far() -> None:
    far = FaultStore(MemoryStore())
    store = TieredStore(MemoryStore(max_object_bytes=639), far, names=("ram", "disk"))
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)

    assert shelf.read(keys) == (OK, OK)

    assert store.wait_for_promotions(60)
    assert far.count(Call.READ) == 1
    assert store.stats().counters["promotion_dropped"] == 2
    store.close()


def test_more_than_the_buffer_holds_is_promoted_in_turns() -> None:
    tiers = Tiers(promotion_bytes=3 * 640)
    keys = object_keys(8)
    tiers.shelf.stock(keys)
    tiers.forget_near()

    tiers.shelf.read(keys)

    tiers.promote()
    assert tiers.near_memory.exists(keys) == (True,) * 8
    assert all(tiers.near_memory.payload(key) == tiers.shelf.payload(key) for key in keys)


def test_what_is_prefetched_is_near_before_anybody_reads_it() -> None:
    tiers = Tiers()
    near, far, absent = (object_keys(2, chain=chain) for chain in ("near", "far", "absent"))
    tiers.shelf.stock([*near, *far])
    tiers.near_memory.delete(far)
    sizes = [tiers.shelf.page_bytes // 8] * 8

    accepted = tiers.store.prefetch(tiers.shelf.request([*near, *far, *absent]), range_bytes=sizes)

    tiers.promote()
    assert accepted == 4
    assert tiers.near_memory.exists([*far, *absent]) == (True, True, False, False)
    assert tiers.count("promoted") == 2
    assert tiers.shelf.read(far) == (OK, OK)
    assert tiers.count("ram_hits") == 2
    assert tiers.store.prefetch(tiers.shelf.request(far)) == 0


def test_a_prefetch_of_ranges_that_make_no_object_is_refused() -> None:
    tiers = Tiers()

    with pytest.raises(ContractError, match="ranges of 639 B do not make objects of 640 B"):
        tiers.store.prefetch(tiers.shelf.request(object_keys(1)), range_bytes=[639])


def test_a_prefetch_that_cannot_be_copied_is_not_accepted() -> None:
    tiers = Tiers(promotion_bytes=0)
    keys = object_keys(2)
    tiers.shelf.stock(keys)
    tiers.forget_near()

    assert tiers.store.prefetch(tiers.shelf.request(keys)) == 0
    assert MemoryStore().prefetch(tiers.shelf.request(keys)) == 0


def test_promotions_go_through_memory_that_is_registered() -> None:
    near, far = MemoryStore(registers_memory=True), MemoryStore(registers_memory=True)
    store = TieredStore(near, far)
    shelf = Shelf(store)
    keys = object_keys(2)
    shelf.stock(keys)
    near.delete(keys)

    shelf.read(keys)

    assert store.wait_for_promotions(60)
    assert near.exists(keys) == (True, True)


def test_what_was_read_while_it_is_removed_does_not_come_back() -> None:
    tiers = Tiers()
    keys = object_keys(2)
    tiers.shelf.stock(keys)
    tiers.forget_near()
    removing, promoting = Gate(limit_seconds=60), Gate(limit_seconds=60)
    tiers.far.script.add(Rule(call=Call.DELETE, fault=Hang(gate=removing)))
    tiers.near.script.add(Rule(call=Call.WRITE, fault=Hang(gate=promoting)))

    with ThreadPoolExecutor(1) as pool, promoting:
        with removing:
            removal = pool.submit(tiers.store.delete, keys)
            removing.wait_for_arrivals()
            tiers.shelf.read(keys)  # they are far yet
            promoting.wait_for_arrivals()
        assert removal.result() == (True, True)

    tiers.promote()
    assert tiers.store.exists(keys) == (False, False)


def test_an_object_that_was_replaced_far_is_not_brought_near_as_it_was() -> None:
    far = FaultStore(MemoryStore(overwrite=True))
    near = FaultStore(MemoryStore())
    store = TieredStore(near, far)
    shelf, keys = Shelf(store), object_keys(1)
    other = shelf.beside(seed=b"other")
    shelf.stock(keys)
    near.delete(keys)
    gate = Gate(limit_seconds=60)
    near.script.add(Rule(call=Call.WRITE, fault=Hang(gate=gate), times=1))

    with gate:
        shelf.read(keys)  # the promotion of what there is hangs in front of the near store
        gate.wait_for_arrivals()
        other.stock(keys)

    assert store.wait_for_promotions(60)
    assert other.read(keys) == (OK,)
    assert other.read(keys) == (OK,)


@pytest.mark.parametrize("hanging", ["near", "far", "behind far"])
def test_of_two_that_replace_an_object_at_once_the_tiers_have_one(hanging: str) -> None:
    far = FaultStore(MemoryStore(overwrite=True))
    near = FaultStore(MemoryStore())
    store = TieredStore(near, far)
    shelf, keys = Shelf(store), object_keys(1)
    other = shelf.beside(seed=b"other")
    gate = Gate(limit_seconds=60)
    moment = Moment.AFTER if hanging == "behind far" else Moment.BEFORE
    (near if hanging == "near" else far).script.add(
        Rule(call=Call.WRITE, fault=Hang(gate=gate, moment=moment), times=1)
    )

    with ThreadPoolExecutor(1) as pool:
        with gate:
            first = pool.submit(shelf.write, keys)
            gate.wait_for_arrivals()
            second = other.write(keys)
        assert (first.result(), second) == ((WRITTEN,), (WRITTEN,))

    last = shelf if hanging == "far" else other
    assert last.read(keys) == (OK,)
    near.delete(keys)
    assert last.read(keys) == (OK,)


# ---- life time, several tiers -----------------------------------------------------------------------


def test_a_registration_that_fails_in_one_store_is_taken_back_in_the_other() -> None:
    near = MemoryStore(registers_memory=True)
    far = FaultStore(MemoryStore(registers_memory=True))
    store = TieredStore(near, far)
    far.script.add(Rule(call=Call.REGISTER, fault=Raise(error=StoreError("no")), times=1))
    regions = Shelf(MemoryStore()).pools.group.regions

    with pytest.raises(StoreError, match="no"):
        store.register(regions)

    store.register(regions)


def test_closing_closes_both_whatever_one_of_them_raises() -> None:
    tiers = Tiers()
    tiers.fail(tiers.near, Call.CLOSE, StoreError("cannot save"))

    with pytest.raises(StoreError, match="cannot save"):
        tiers.store.close()

    assert tiers.far.count(Call.CLOSE) == 1


def test_three_tiers_are_read_from_the_nearest_that_has_an_object() -> None:
    memories = [MemoryStore() for _ in range(3)]
    store = tiered(list(zip(("a", "b", "c"), memories, strict=True)))
    shelf = Shelf(store)
    keys = object_keys(3)
    shelf.stock(keys)
    memories[0].delete(keys[:2])
    memories[1].delete(keys[:1])

    statuses = shelf.read(keys)

    counters = store.stats().counters
    assert statuses == (OK, OK, OK)
    assert (counters["a_hits"], counters["behind_a_hits"]) == (1, 2)
    assert (counters["behind_a_b_hits"], counters["behind_a_c_hits"]) == (1, 1)
    store.close()


def test_one_store_alone_is_itself() -> None:
    alone = MemoryStore()

    assert tiered([("memory", alone)]) is alone


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_tiers_without_names_of_their_own_are_refused(names: list[str]) -> None:
    with pytest.raises(ContractError, match="a name for each"):
        tiered([(name, MemoryStore()) for name in names])


def test_stores_that_read_in_no_common_way_are_refused() -> None:
    with pytest.raises(ContractError, match="read whole objects or ranges"):
        TieredStore(MemoryStore(ranged_reads=False), MemoryStore(whole_reads=False))


# ---- under a linker ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [Family.MHA, Family.DSA])
def test_a_linker_loads_from_far_layer_by_layer_and_from_near_the_next_time(family: Family) -> None:
    tiers = Tiers()
    keys = page_keys(3)
    with SmallLinker(tiers.store, family=family) as linker:
        assert linker.offload(keys)
        objects = tiers.store.stats().objects
        tiers.forget_near()

        for _ in range(2):
            assert linker.lookup(keys) == [1, 2, 3]
            assert linker.load(keys)
            # Sessions are closed behind the answer.
            wait_for(lambda: tiers.count("promoted") >= objects, "promotions")

    assert (tiers.count("disk_hits"), tiers.count("ram_hits")) == (objects, objects)
