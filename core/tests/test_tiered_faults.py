"""Tiers of which one store is down, or at fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiers_rig import Tiers

from kvlinker.errors import StoreError, StoreTimeoutError
from kvlinker.store import ReadStatus, StoreStats, WriteStatus
from kvlinker.stores.tiered import TieredStore
from kvlinker.stores.wrapped import WrappedStore
from kvlinker.testing import (
    Call,
    MemoryStore,
    Miscount,
    Rule,
)
from kvlinker.testing.shelves import Shelf, object_keys

OK = ReadStatus.OK
WRITTEN = WriteStatus.WRITTEN


@pytest.mark.parametrize("down", ["near", "far"])
def test_what_one_store_cannot_remove_is_removed_from_the_other_and_the_error_told(
    down: str,
) -> None:
    tiers = Tiers()
    keys = object_keys(2)
    tiers.shelf.stock(keys)
    broken, sound = (
        (tiers.near, tiers.far_memory) if down == "near" else (tiers.far, tiers.near_memory)
    )
    tiers.fail(broken, Call.DELETE, StoreError("cannot"))

    with pytest.raises(StoreError, match="cannot"):
        tiers.store.delete(keys)

    assert sound.exists(keys) == (False, False)


def test_t6_a_store_that_is_down_costs_removals_one_timeout() -> None:
    tiers = Tiers()
    tiers.fail(tiers.far, Call.DELETE, StoreTimeoutError("no answer"))

    for _ in range(3):
        with pytest.raises(StoreTimeoutError):
            tiers.store.delete(object_keys(1))

    assert tiers.far.count(Call.DELETE) == 1


def test_figures_of_one_store_are_told_while_the_other_one_is_down() -> None:
    tiers = Tiers(near_bytes=64 << 10)
    tiers.shelf.stock(object_keys(3))
    tiers.fail(tiers.far, Call.STATS, StoreError("no answer"))

    stats = tiers.store.stats()

    assert stats.objects == 3
    assert stats.used_bytes == 3 * tiers.shelf.page_bytes
    assert stats.capacity_bytes is None
    assert stats.counters["ram_written"] == 3


def test_t6_figures_of_a_store_that_is_down_are_not_asked_for_and_end_no_pause() -> None:
    tiers = Tiers()
    tiers.shelf.stock(object_keys(1))
    tiers.fail(tiers.far, Call.EXISTS, StoreTimeoutError("no answer"))
    absent = object_keys(1, chain="absent")
    assert tiers.store.exists(absent) == (False,)

    for _ in range(3):
        assert tiers.store.stats().objects == 1
        tiers.store.exists(absent)

    assert tiers.far.count(Call.STATS) == 0
    assert tiers.far.count(Call.EXISTS) == 1


def test_a_session_that_cannot_be_closed_near_is_closed_far_and_promotes() -> None:
    tiers = Tiers()
    near, far = object_keys(1), object_keys(1, chain="far")
    tiers.shelf.stock([*near, *far])
    tiers.near_memory.delete(far)
    session = tiers.shelf.open([*near, *far])
    tiers.shelf.read([*near, *far], session=session)
    tiers.fail(tiers.near, Call.CLOSE_READ, StoreError("cannot"))

    with pytest.raises(StoreError, match="cannot"):
        session.close()

    tiers.promote()
    assert tiers.far_memory.kept() == 0
    assert tiers.near_memory.exists(far) == (True,)


@pytest.mark.parametrize("call", [Call.EXISTS, Call.READ, Call.WRITE, Call.HOLD])
def test_t4_a_near_store_that_answers_with_another_count_is_passed_over(call: Call) -> None:
    tiers = Tiers()
    keys = object_keys(3)
    tiers.shelf.stock(keys)
    tiers.near.script.add(Rule(call=call, fault=Miscount(change=-1)))

    assert tiers.shelf.write(object_keys(2, chain="more")) == (WRITTEN, WRITTEN)
    assert tiers.store.exists(keys) == (True,) * 3
    assert tiers.shelf.read(keys) == (OK,) * 3
    hold = tiers.store.hold(keys, seconds=60)
    assert hold.present == (True,) * 3
    hold.release()
    assert tiers.near_memory.kept() + tiers.far_memory.kept() == 0
    assert tiers.count("ram_failed") >= 1


class _CountingStore(WrappedStore):
    """A store that counts hits itself."""

    def stats(self) -> StoreStats:
        return replace(super().stats(), counters={"hits": 7})


def test_counters_of_a_store_and_of_its_tier_are_told_apart() -> None:
    store = TieredStore(_CountingStore(MemoryStore()), MemoryStore())
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)

    shelf.read(keys)

    counters = store.stats().counters
    assert (counters["near_own_hits"], counters["near_hits"]) == (7, 2)
