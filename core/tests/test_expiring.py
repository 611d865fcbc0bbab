"""Expiry: an object is found for half of its time at least and never beyond it, and then it is removed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvlinker.errors import ContractError, StoreError
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.store import ObjectKey, ReadStatus, WriteStatus
from kvlinker.stores.expiring import ExpiringStore
from kvlinker.testing import MemoryStore
from kvlinker.testing.shelves import Shelf, object_keys

OK, MISS = ReadStatus.OK, ReadStatus.MISS
HOUR = 3600.0
BEGIN = 1_000_000 * HOUR
"""The beginning of a period of every length that is used here."""


@dataclass
class Clock:
    seconds: float = BEGIN

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inner() -> MemoryStore:
    return MemoryStore()


def opened(inner: MemoryStore, clock: Clock, seconds: float = 2 * HOUR) -> ExpiringStore:
    """Return a store as one more process or a restart would open it."""
    return ExpiringStore(inner, seconds=seconds, clock=clock)


@pytest.mark.parametrize("into", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("age", [0.0, 0.25, 0.49, 0.9, 0.999, 1.0, 1.2, 5.0])
def test_an_object_lives_for_half_of_its_time_at_least_and_never_longer(
    inner: MemoryStore, clock: Clock, into: float, age: float
) -> None:
    time_to_live = 2 * HOUR
    clock.seconds = BEGIN + into * HOUR
    keys = object_keys(2)
    Shelf(opened(inner, clock)).stock(keys)

    clock.seconds += age * time_to_live
    store = opened(inner, clock)
    found, read = store.exists(keys), Shelf(store).read(keys)

    periods = int((into * HOUR + age * time_to_live) // HOUR)
    assert read == (OK if periods < 2 else MISS,) * 2
    assert set(found) <= {read[0] is OK, False}
    if age < 0.49:
        assert found == (True, True)
    if age >= 1:
        assert read == (MISS, MISS)


def test_what_a_lookup_finds_can_be_read_for_a_minute(inner: MemoryStore, clock: Clock) -> None:
    store = opened(inner, clock)
    shelf, keys = Shelf(store), object_keys(1)
    shelf.stock(keys)

    clock.seconds = BEGIN + 2 * HOUR - 61
    early = store.exists(keys)
    clock.seconds += 60
    late, read = store.exists(keys), shelf.read(keys)

    assert (early, late, read) == ((True,), (False,), (OK,))


def test_what_has_expired_is_removed(inner: MemoryStore, clock: Clock) -> None:
    store = opened(inner, clock)
    shelf, keys = Shelf(store), object_keys(5)
    shelf.stock(keys)
    clock.seconds += HOUR
    fresh = object_keys(2, chain="fresh")
    shelf.stock(fresh)
    assert inner.stats().objects == 7

    clock.seconds += HOUR
    assert store.wait_for_removals(60)

    assert inner.stats().objects == 2
    assert store.stats().counters["expired"] == 5
    assert shelf.read(fresh) == (OK, OK)


def test_what_another_process_wrote_is_removed_by_who_has_seen_it(
    inner: MemoryStore, clock: Clock
) -> None:
    keys = object_keys(3)
    Shelf(opened(inner, clock)).stock(keys)
    store = opened(inner, clock)
    assert store.exists(keys[:2]) == (True, True)

    clock.seconds += 2 * HOUR
    assert store.wait_for_removals(60)

    assert inner.stats().objects == 1


def test_an_object_that_is_still_there_is_not_written_again(
    inner: MemoryStore, clock: Clock
) -> None:
    store = opened(inner, clock)
    shelf, keys = Shelf(store), object_keys(1)
    shelf.stock(keys)

    clock.seconds += HOUR
    assert store.exists(keys) == (True,)

    assert shelf.write(keys) == (WriteStatus.EXISTS,)
    assert inner.stats().objects == 1


def test_an_object_that_was_cleared_is_written_anew_and_lives_as_long_as_a_new_one(
    inner: MemoryStore, clock: Clock
) -> None:
    store = opened(inner, clock)
    shelf, keys = Shelf(store), object_keys(1)
    shelf.stock(keys)

    clock.seconds += HOUR
    assert store.clear(keys[0][:NAMESPACE_BYTES]) == 1
    shelf.stock(keys)
    clock.seconds += HOUR

    assert shelf.read(keys) == (OK,)


def test_an_object_that_expired_is_written_anew_and_lives_again(
    inner: MemoryStore, clock: Clock
) -> None:
    store = opened(inner, clock)
    shelf, keys = Shelf(store), object_keys(1)
    shelf.stock(keys)
    clock.seconds += 2 * HOUR
    assert store.exists(keys) == (False,)

    assert shelf.write(keys) == (WriteStatus.WRITTEN,)

    clock.seconds += HOUR
    assert shelf.read(keys) == (OK,)


def test_of_two_copies_the_newer_one_is_read_and_both_are_deleted(
    inner: MemoryStore, clock: Clock
) -> None:
    keys = object_keys(1)
    Shelf(opened(inner, clock), seed=b"old").stock(keys)
    clock.seconds += HOUR
    other = opened(inner, clock)
    Shelf(other, seed=b"new").stock(keys)
    assert inner.stats().objects == 2
    store = opened(inner, clock)

    assert Shelf(store, seed=b"new").read(keys) == (OK,)
    assert store.delete(keys) == (True,)
    assert (inner.stats().objects, store.delete(keys)) == (0, (False,))


def test_clocks_that_jump_cause_misses_and_nothing_else(inner: MemoryStore, clock: Clock) -> None:
    store = opened(inner, clock)
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)

    clock.seconds = BEGIN - 30 * HOUR
    assert (store.exists(keys), shelf.read(keys)) == ((False,) * 2, (MISS,) * 2)
    clock.seconds = BEGIN + 30 * HOUR
    assert (store.exists(keys), shelf.read(keys)) == ((False,) * 2, (MISS,) * 2)
    shelf.stock(keys)
    assert shelf.read(keys) == (OK, OK)


@pytest.mark.parametrize("seconds", [BEGIN, 100.0], ids=["long_ago", "first_period_of_both"])
def test_another_time_to_live_is_another_store(
    inner: MemoryStore, clock: Clock, seconds: float
) -> None:
    clock.seconds = seconds
    keys = object_keys(1)
    Shelf(opened(inner, clock)).stock(keys)

    assert Shelf(opened(inner, clock, seconds=4 * HOUR)).read(keys) == (MISS,)


def test_k4_names_stay_in_the_namespace_of_their_keys(inner: MemoryStore, clock: Clock) -> None:
    store = opened(inner, clock)
    keys = object_keys(3)
    Shelf(store).stock(keys)

    names = inner.keys()

    assert {name[:NAMESPACE_BYTES] for name in names} == {keys[0][:NAMESPACE_BYTES]}
    assert not set(names) & set(keys)
    assert store.clear(keys[0][:NAMESPACE_BYTES]) == 3


def test_l3_a_hold_keeps_an_object_of_the_period_before(inner: MemoryStore, clock: Clock) -> None:
    store = opened(inner, clock)
    present, absent = object_keys(2)
    Shelf(store).stock([present])
    clock.seconds += HOUR

    hold = opened(inner, clock).hold([absent, present], seconds=60)

    assert hold.present == (False, True)
    assert inner.kept() == 1
    hold.release()


class Stubborn(MemoryStore):
    """Removes nothing."""

    def delete(self, keys: tuple[ObjectKey, ...]) -> tuple[bool, ...]:  # type: ignore[override]  # as it is called
        msg = f"{len(keys)} objects stay"
        raise StoreError(msg)


def test_a_removal_that_fails_is_counted_and_expired_objects_stay_misses(clock: Clock) -> None:
    inner = Stubborn()
    store = opened(inner, clock)
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)

    clock.seconds += 2 * HOUR
    assert store.wait_for_removals(60)

    assert store.stats().counters["expiry_failed"] == 2
    assert shelf.read(keys) == (MISS, MISS)


@pytest.mark.parametrize("seconds", [0, 0.5, -1, float("nan"), float("inf"), 1e12])
def test_a_time_that_is_none_is_refused(inner: MemoryStore, seconds: float) -> None:
    with pytest.raises(ContractError, match="1 second to 10 years"):
        ExpiringStore(inner, seconds=seconds)
