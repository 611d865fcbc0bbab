"""Tests of the kit for stores: what a full store does, and what keeps an object in it."""

from __future__ import annotations

import time

import pytest

from kvlinker.errors import KVLinkerError
from kvlinker.store import ObjectKey, ReadStatus, Store, WriteStatus
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker.testing.store_fixtures import DEADLINE_S, OpenStore, StoreFixtures
from kvlinker.testing.verdicts import expect, fail

__all__ = ["StoreCapacityTests", "fill", "roomy_shelf"]

OK, MISS = ReadStatus.OK, ReadStatus.MISS
_OBJECTS = 24
"""Objects that a store takes at most: enough to evict some and to keep some."""
_MAX_CAPACITY = 64 << 20
_UNIT = 32
_POLL_SECONDS = 0.01


def roomy_shelf(store: Store) -> Shelf:
    """Return a shelf of pages so large that about 24 of them fill the store; of small ones where it has no limit."""
    capacity = store.stats().capacity_bytes
    if capacity is None:
        return Shelf(store)
    if capacity > _MAX_CAPACITY:
        fail(f"the store under test has room for {capacity} B; open it with 64 MiB or less")
    return Shelf(store, page_bytes=max(640, capacity // _OBJECTS // _UNIT * _UNIT))


def fill(shelf: Shelf, *, rounds: int = 3, chain: str = "filling") -> tuple[ObjectKey, ...]:
    """Write objects one by one, several times what fits, and return the keys of those that were written.

    Raises:
        AssertionError: the store holds more than its capacity at any time, or refuses in another way than FULL.
    """
    stored = []
    for key in object_keys(rounds * _OBJECTS, chain=chain):
        (status,) = shelf.write([key])
        if status.is_stored:
            stored.append(key)
        elif status is not WriteStatus.FULL:
            fail(f"a write into a full store answered {status}; evict something, or answer FULL")
        check_capacity(shelf.store)
    return tuple(stored)


def check_capacity(store: Store) -> None:
    """Fail if the store holds more bytes than it may."""
    stats = store.stats()
    if stats.capacity_bytes is not None and stats.used_bytes > stats.capacity_bytes:
        fail(f"the store holds {stats.used_bytes} B, over its capacity of {stats.capacity_bytes} B")


class StoreCapacityTests(StoreFixtures):
    """What holds for a store that is full; one without a limit just keeps everything."""

    def test_t3_b78_capacity_is_never_exceeded_and_what_is_left_is_right(
        self, reopen: OpenStore
    ) -> None:
        """Writing three times what fits evicts whole objects, or is refused."""
        shelf = roomy_shelf(reopen())
        stored = fill(shelf)
        thirds = stored[:_OBJECTS], stored[_OBJECTS : 2 * _OBJECTS], stored[2 * _OBJECTS :]
        found = [status for part in thirds for status in shelf.read(part) if status is OK]
        if not found:
            fail("nothing is left of what was written; a full store keeps what fits")
        if shelf.store.stats().capacity_bytes is None and len(found) < len(stored):
            fail(f"{len(stored) - len(found)} objects are gone from a store that has no capacity")

    def test_l3_a_hold_names_what_there_is_and_can_be_released_twice(self, shelf: Shelf) -> None:
        """A store that has no leases says so, and one that has them answers by position."""
        present, absent = object_keys(2)
        shelf.stock([present])
        if not shelf.store.capabilities.leases:
            with pytest.raises(KVLinkerError):
                shelf.store.hold([present], seconds=60)
            return
        hold = shelf.store.hold([absent, present], seconds=60)
        expect("hold(...).present", hold.present, (False, True))
        hold.release()
        hold.release()

    def test_t3_l3_held_objects_stay_until_they_are_released(self, reopen: OpenStore) -> None:
        """A boundary that was promised is still there when its load comes."""
        shelf = roomy_shelf(reopen())
        if not shelf.store.capabilities.leases:
            return
        held = object_keys(4, chain="held")
        shelf.stock(held)
        hold = shelf.store.hold(held, seconds=600)
        fill(shelf)
        expect(
            "a read of held objects, after others filled the store,", shelf.read(held), (OK,) * 4
        )
        hold.release()
        fill(shelf, chain="after")
        if shelf.store.stats().capacity_bytes is not None and all(shelf.store.exists(held)):
            fail(
                "objects that were released outlive everything that was written since; let them be evicted"
            )

    def test_t3_a_store_full_of_held_objects_says_so_and_loses_none(
        self, reopen: OpenStore
    ) -> None:
        """FULL is an answer: the offload fails, and the engine goes on."""
        shelf = roomy_shelf(reopen())
        if not shelf.store.capabilities.leases or shelf.store.stats().capacity_bytes is None:
            return
        held, holds, refused = [], [], 0
        for key in object_keys(2 * _OBJECTS):
            (status,) = shelf.write([key])
            if status.is_stored:
                held.append(key)
                holds.append(shelf.store.hold([key], seconds=600))
            else:
                expect("a write into a store full of held objects", status, WriteStatus.FULL)
                expect("exists", shelf.store.exists([key]), (False,))
                refused += 1
            check_capacity(shelf.store)
        if not refused:
            fail(
                f"{len(held)} held objects fit into a store for {_OBJECTS}; a hold keeps its object"
            )
        for key in held:
            expect("a read of a held object", shelf.read([key]), (OK,))
        for hold in holds:
            hold.release()
        (status,) = shelf.write(object_keys(1, chain="after"))
        expect("a write after the release", status, WriteStatus.WRITTEN)

    def test_l3_a_hold_ends_by_itself(self, reopen: OpenStore) -> None:
        """A request that was aborted between lookup and load leaves nothing that must be released."""
        shelf = roomy_shelf(reopen())
        if not shelf.store.capabilities.leases or shelf.store.stats().capacity_bytes is None:
            return
        held = object_keys(4, chain="held")
        shelf.stock(held)
        shelf.store.hold(held, seconds=0.05)
        end = time.monotonic() + DEADLINE_S
        for number in range(1_000_000):
            fill(shelf, rounds=1, chain=f"after {number}")
            if not all(shelf.store.exists(held)):
                return
            if time.monotonic() > end:
                fail(f"objects that were held for 0.05 s are still kept after {DEADLINE_S} s")
            time.sleep(_POLL_SECONDS)

    def test_t3_objects_that_are_being_read_stay_readable(self, reopen: OpenStore) -> None:
        """An open session keeps its objects, or reads misses; never another object's bytes."""
        shelf = roomy_shelf(reopen())
        keys = object_keys(3, chain="read")
        shelf.stock(keys)
        with shelf.open(keys) as session:
            fill(shelf)
            statuses = shelf.read(keys, session=session)
        expect("a read of an open session, after others filled the store,", statuses, (OK,) * 3)
