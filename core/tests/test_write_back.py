"""Write-back: what is near first, when it is far, and what is lost where it never gets there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest

from kvlinker.errors import ContractError, StoreError, StoreTimeoutError
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.store import Hold, Integrity, ObjectKey, ReadStatus, Store, WriteStatus
from kvlinker.stores.host_pages import ObjectRanges
from kvlinker.stores.pending import Lease, PendingObject, PendingObjects
from kvlinker.stores.tiered import TieredStore
from kvlinker.stores.wrapped import WrappedStore
from kvlinker.stores.write_back import WriteBackLimits
from kvlinker.testing import (
    Call,
    CapabilityChoices,
    FaultStore,
    Gate,
    Hang,
    MemoryStore,
    Raise,
    Rule,
    page_keys,
)
from kvlinker.testing.shelves import LAYERS, Shelf, allow, object_keys
from kvlinker.testing.small_linkers import SmallLinker
from kvlinker.testing.waiting import wait_for

OK, MISS = ReadStatus.OK, ReadStatus.MISS
WRITTEN, EXISTS, FULL = WriteStatus.WRITTEN, WriteStatus.EXISTS, WriteStatus.FULL
PAGE = 640


class Tiers:
    """Two stores in memory that can go wrong, and what is written back between them."""

    def __init__(
        self,
        *,
        near_bytes: int | None = None,
        far_bytes: int | None = None,
        max_bytes: int = 1 << 20,
        max_objects: int = 1000,
        pause_seconds: float = 30.0,
        far: CapabilityChoices | None = None,
    ) -> None:
        self.near_memory = MemoryStore(capacity_bytes=near_bytes)
        self.far_memory = MemoryStore(capacity_bytes=far_bytes, **(far or {}))
        self.near, self.far = FaultStore(self.near_memory), FaultStore(self.far_memory)
        limits = WriteBackLimits(max_bytes=max_bytes, max_objects=max_objects, pause_seconds=0.01)
        self.store = TieredStore(
            self.near,
            self.far,
            names=("ram", "disk"),
            write_back=limits,
            pause_seconds=pause_seconds,
        )
        self.shelf = Shelf(self.store)

    def hang_far(self) -> Gate:
        """Let the next write to the far store hang in front of it until the gate is opened."""
        gate = Gate(limit_seconds=60)
        self.far.script.add(Rule(call=Call.WRITE, fault=Hang(gate=gate), times=1))
        return gate

    def count(self, event: str) -> int:
        return self.store.stats().counters.get(event, 0)


# ---- what is written ------------------------------------------------------------------------------


def test_a_write_is_answered_when_it_is_near_and_far_behind_that() -> None:
    tiers = Tiers()
    keys = object_keys(3)

    with tiers.hang_far() as gate:
        statuses = tiers.shelf.write(keys)
        gate.wait_for_arrivals()

        assert statuses == (WRITTEN,) * 3
        assert tiers.near_memory.exists(keys) == (True,) * 3
        assert tiers.far_memory.exists(keys) == (False,) * 3
        assert tiers.count("write_back_pending") == 3
        assert tiers.shelf.read(keys) == (OK,) * 3

    assert tiers.store.flush(60)
    assert all(tiers.far_memory.payload(key) == tiers.shelf.payload(key) for key in keys)
    assert (tiers.count("written_back"), tiers.count("write_back_pending")) == (3, 0)


def test_what_is_far_later_is_read_by_layer_like_what_was_written_there() -> None:
    tiers = Tiers(far={"whole_reads": False})
    keys = object_keys(2)
    tiers.shelf.stock(keys)
    assert tiers.store.flush(60)
    tiers.near_memory.delete(keys)

    with tiers.shelf.open(keys) as session:
        for layer in range(LAYERS):
            assert tiers.shelf.read(keys, session=session, layer=layer) == (OK, OK)


def test_t3_what_is_not_far_yet_is_held_near_and_let_go_afterwards() -> None:
    tiers = Tiers(near_bytes=4 * PAGE)
    keys, others = object_keys(3), object_keys(8, chain="others")

    with tiers.hang_far() as gate:
        tiers.shelf.stock(keys)
        gate.wait_for_arrivals()
        assert tiers.near_memory.kept() == 3
        for key in others:
            tiers.near_memory.write(
                [tiers.shelf.batch([key])], tiers.shelf.access, may_publish=allow
            )
        assert tiers.near_memory.exists(keys) == (True,) * 3

    assert tiers.store.flush(60)
    assert tiers.near_memory.kept() == 0


def test_objects_arrive_far_in_the_order_in_which_they_were_written() -> None:
    tiers = Tiers()
    calls = [object_keys(2, chain=f"call {number}") for number in range(5)]

    with tiers.hang_far() as gate:
        for keys in calls:
            tiers.shelf.stock(keys)
        gate.wait_for_arrivals()

    assert tiers.store.flush(60)
    assert tiers.far_memory.keys() == tuple(key for keys in calls for key in keys)


def test_what_does_not_fit_the_queue_is_written_through_and_counted() -> None:
    tiers = Tiers(max_bytes=4 * PAGE)
    first, second = object_keys(3), object_keys(2, chain="second")

    with tiers.hang_far() as gate:
        tiers.shelf.stock(first)
        gate.wait_for_arrivals()
        assert tiers.shelf.write(second) == (WRITTEN, WRITTEN)
        assert tiers.far_memory.exists(second) == (True, True)
        assert tiers.near_memory.exists(second) == (True, True)
        assert tiers.count("written_through") == 2

    assert tiers.store.flush(60)


def test_more_objects_than_the_queue_takes_are_written_through() -> None:
    tiers = Tiers(max_objects=2)
    keys = object_keys(3)

    tiers.shelf.stock(keys)

    assert tiers.far_memory.exists(keys) == (True,) * 3
    assert tiers.count("written_through") == 3


def test_what_the_near_store_has_no_room_for_is_written_through_with_one_question() -> None:
    tiers = Tiers(near_bytes=2 * PAGE)
    keys = object_keys(4)
    asked: list[None] = []

    def may_publish() -> bool:
        asked.append(None)
        return True

    statuses = tiers.shelf.write(keys, may_publish=may_publish)

    assert statuses == (WRITTEN,) * 4
    assert len(asked) == 1
    assert tiers.shelf.read(keys) == (OK,) * 4


def test_a_near_store_that_fails_costs_no_write() -> None:
    tiers = Tiers()
    tiers.near.script.add(Rule(call=Call.WRITE, fault=Raise(error=StoreError("no memory"))))
    keys = object_keys(2)

    assert tiers.shelf.write(keys) == (WRITTEN, WRITTEN)
    assert tiers.far_memory.exists(keys) == (True, True)


def test_what_the_near_store_cannot_hold_is_not_believed_stored_there() -> None:
    tiers = Tiers()
    tiers.near.script.add(Rule(call=Call.HOLD, fault=Raise(error=StoreError("no leases now"))))
    keys = object_keys(2)

    assert tiers.shelf.write(keys) == (WRITTEN, WRITTEN)
    assert tiers.far_memory.exists(keys) == (True, True)
    assert tiers.count("write_back_pending") == 0


def test_l7_without_permission_nothing_is_near_or_far() -> None:
    tiers = Tiers()
    keys = object_keys(2)

    statuses = tiers.shelf.write(keys, may_publish=lambda: False)

    assert statuses == (WriteStatus.DISCARDED,) * 2
    assert tiers.store.flush(60)
    assert tiers.store.exists(keys) == (False, False)


def test_an_object_too_long_for_the_far_store_is_refused_and_not_near_either() -> None:
    tiers = Tiers(far={"max_object_bytes": PAGE - 1})
    keys = object_keys(1)

    assert tiers.shelf.write(keys) == (WriteStatus.FAILED,)
    assert tiers.store.exists(keys) == (False,)


# ---- removing -------------------------------------------------------------------------------------


def _delete(store: Store, keys: Sequence[ObjectKey]) -> None:
    assert store.delete(keys) == (True,) * len(keys)


def _clear(store: Store, keys: Sequence[ObjectKey]) -> None:
    assert store.clear(keys[0][:NAMESPACE_BYTES]) == len(keys)


@pytest.mark.parametrize("remove", [_delete, _clear])
def test_what_is_removed_while_it_is_pending_never_arrives(
    remove: Callable[[Store, Sequence[ObjectKey]], None],
) -> None:
    tiers = Tiers()
    first, rest = object_keys(1), object_keys(3, chain="rest")

    with tiers.hang_far() as gate:
        tiers.shelf.stock(first)
        gate.wait_for_arrivals()
        tiers.shelf.stock(rest)
        remove(tiers.store, [*first, *rest])
        assert tiers.count("write_back_pending") == 0

    tiers.shelf.stock(object_keys(1, chain="after"))
    assert tiers.store.flush(60)
    assert tiers.far_memory.exists([*first, *rest]) == (False,) * 4
    assert tiers.store.exists([*first, *rest]) == (False,) * 4
    assert tiers.near_memory.kept() == 0


def test_a_removal_of_others_delays_a_copy_and_loses_none() -> None:
    tiers = Tiers()
    keys, others = object_keys(3), object_keys(1, chain="others")

    with tiers.hang_far() as gate:
        tiers.shelf.stock(keys)
        gate.wait_for_arrivals()
        tiers.store.delete(others)

    assert tiers.store.flush(60)
    assert tiers.far_memory.exists(keys) == (True,) * 3


class _LosingStore(WrappedStore):
    """A store that has lost an object when it is asked to hold it."""

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        self._inner.delete(keys[:1])
        return super().hold(keys, seconds=seconds)


def test_what_the_near_store_has_lost_before_it_was_held_is_written_through() -> None:
    near, far = MemoryStore(), MemoryStore()
    store = TieredStore(_LosingStore(near), far, write_back=WriteBackLimits())
    shelf, keys = Shelf(store), object_keys(3)

    assert shelf.write(keys) == (WRITTEN,) * 3

    assert store.stats().counters["written_through"] == 1
    assert store.flush(60)
    assert far.exists(keys) == (True,) * 3
    assert store.stats().counters["write_back_dropped"] == 0


def test_a_copy_of_an_object_that_was_written_anew_meanwhile_settles_the_older_one_alone() -> None:
    (key,) = object_keys(1)
    older, newer = (
        PendingObject(
            key=key,
            fingerprint=b"layout",
            ranges=ObjectRanges.of_sizes("kv", [PAGE]),
            lease=Lease(MemoryStore().hold([key], seconds=60), 1),
        )
        for _ in range(2)
    )
    pending = PendingObjects(max_bytes=4 * PAGE, max_objects=4)
    pending.add([older])
    pending.add([newer])

    assert pending.settle([older]) == 0
    assert len(pending) == 1
    assert pending.settle([newer]) == 1
    assert len(pending) == 0


# ---- a far store that takes nothing -----------------------------------------------------------------


def test_t6_objects_wait_for_a_far_store_that_is_down_and_arrive_when_it_is_back() -> None:
    tiers = Tiers(pause_seconds=0.02)
    tiers.far.script.add(Rule(call=Call.WRITE, fault=Raise(error=StoreTimeoutError("no answer"))))
    keys = object_keys(3)

    assert tiers.shelf.write(keys) == (WRITTEN,) * 3

    wait_for(lambda: tiers.far.count(Call.WRITE) > 1, "another try")
    assert not tiers.store.flush(0)
    tiers.far.script.clear()
    assert tiers.store.flush(60)
    assert tiers.far_memory.exists(keys) == (True,) * 3
    assert tiers.count("write_back_dropped") == 0


def test_an_object_that_the_far_store_refuses_again_and_again_stays_near_alone() -> None:
    tiers = Tiers(far_bytes=PAGE)
    blocker, refused = object_keys(1), object_keys(1, chain="refused")
    tiers.shelf.stock(blocker)
    assert tiers.store.flush(60)
    hold = tiers.far_memory.hold(blocker, seconds=600)

    assert tiers.shelf.write(refused) == (WRITTEN,)

    assert tiers.store.flush(60)
    assert tiers.count("write_back_dropped") == 1
    assert tiers.near_memory.kept() == 0
    assert tiers.shelf.read(refused) == (OK,)
    hold.release()


def test_an_object_that_is_damaged_near_before_it_is_far_is_dropped_and_counted() -> None:
    tiers = Tiers()
    first, damaged = object_keys(1), object_keys(1, chain="damaged")

    with tiers.hang_far() as gate:
        tiers.shelf.stock(first)
        gate.wait_for_arrivals()
        tiers.shelf.stock(damaged)
        tiers.near_memory.tamper(damaged[0], bytes(PAGE))

    assert tiers.store.flush(60)
    assert tiers.count("write_back_dropped") == 1
    assert tiers.far_memory.exists([*first, *damaged]) == (True, False)


def test_a_lease_that_runs_out_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlinker.stores.pending.LEASE_SECONDS", 0.0)
    tiers = Tiers(pause_seconds=0.02)
    tiers.far.script.add(Rule(call=Call.WRITE, fault=Raise(error=StoreTimeoutError("no answer"))))

    tiers.shelf.stock(object_keys(2))

    wait_for(lambda: tiers.near.count(Call.HOLD) > 2, "another hold")
    tiers.far.script.clear()
    assert tiers.store.flush(60)
    assert tiers.near_memory.kept() == 0


class _CountingStore(WrappedStore):
    """A store that says what a namespace has."""

    def namespace_bytes(self, namespace: bytes) -> int | None:
        assert len(namespace) == NAMESPACE_BYTES
        return self.stats().used_bytes


def test_a_namespace_has_what_is_far_and_what_will_be() -> None:
    far = FaultStore(MemoryStore())
    store = TieredStore(MemoryStore(), _CountingStore(far), write_back=WriteBackLimits())
    shelf, first, second = Shelf(store), object_keys(2), object_keys(3, chain="second")
    other = object_keys(1, model="other")
    shelf.stock(first)
    assert store.flush(60)
    gate = Gate(limit_seconds=60)
    far.script.add(Rule(call=Call.WRITE, fault=Hang(gate=gate), times=1))

    with gate:
        shelf.stock([*second, *other])
        gate.wait_for_arrivals()
        assert store.namespace_bytes(first[0][:NAMESPACE_BYTES]) == 5 * PAGE

    store.close()


# ---- life time --------------------------------------------------------------------------------------


def test_closing_copies_what_is_pending() -> None:
    far = MemoryStore()
    keep = FaultStore(far)
    keep.script.add(Rule(call=Call.CLOSE, fault=Raise(error=StoreError("stay open"))))
    store = TieredStore(MemoryStore(), keep, write_back=WriteBackLimits())
    keys = object_keys(4)
    Shelf(store).stock(keys)

    with pytest.raises(StoreError, match="stay open"):
        store.close()

    assert far.exists(keys) == (True,) * 4


def test_closing_beside_a_far_store_that_is_down_ends_and_says_what_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiers = Tiers()
    tiers.far.script.add(Rule(call=Call.WRITE, fault=Raise(error=StoreTimeoutError("gone"))))
    tiers.shelf.stock(object_keys(2))
    wait_for(lambda: tiers.count("disk_failed"), "a copy that fails")

    with caplog.at_level(logging.WARNING):
        tiers.store.close()

    assert "2 objects were written to tier ram and not to disk" in caplog.text
    assert tiers.count("write_back_dropped") == 2


@pytest.mark.parametrize(
    ("able", "why"),
    [({"leases": False}, "has no leases"), ({"overwrite": True}, "replaces objects")],
)
def test_a_near_store_that_cannot_keep_objects_is_refused(
    able: CapabilityChoices, why: str
) -> None:
    with pytest.raises(ContractError, match=f"tier near {why}.*write through"):
        TieredStore(MemoryStore(**able), MemoryStore(), write_back=WriteBackLimits())


def test_what_is_written_back_promises_no_more_than_the_near_store_keeps() -> None:
    far = MemoryStore(integrity=Integrity.LENGTH, leases=False)
    able = TieredStore(MemoryStore(), far, write_back=WriteBackLimits()).capabilities

    assert not able.persistent
    assert able.integrity is Integrity.LENGTH
    assert not able.overwrite


# ---- under a linker ---------------------------------------------------------------------------------


def test_a_linker_loads_what_is_near_at_once_and_what_is_far_after_a_restart() -> None:
    tiers = Tiers()
    keys = page_keys(3)
    gate = tiers.hang_far()

    with SmallLinker(tiers.store) as linker:
        assert linker.offload(keys)
        assert tiers.far_memory.stats().objects == 0
        assert linker.lookup(keys) == [1, 2, 3]
        assert linker.load(keys)
    gate.open()
    assert tiers.store.flush(60)
    tiers.near_memory.delete(tiers.near_memory.keys())

    with SmallLinker(tiers.store) as linker:
        assert linker.lookup(keys) == [1, 2, 3]
        assert linker.load(keys)
