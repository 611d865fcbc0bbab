"""Counts of events are there from the start, and those of wrappers in wrappers add up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvlinker.event_counts import EventCounts
from kvlinker.store import Store, StoreStats
from kvlinker.stores.admitting import AdmittingStore
from kvlinker.stores.compressed import CompressedStore
from kvlinker.stores.encrypted import EncryptedStore
from kvlinker.stores.expiring import ExpiringStore
from kvlinker.stores.pinned import PinningStore
from kvlinker.stores.quota import QuotaStore
from kvlinker.stores.retrying import RetryingStore
from kvlinker.stores.tiered import TieredStore
from kvlinker.stores.wrapped import WrappedStore
from kvlinker.stores.write_back import WriteBackLimits
from kvlinker.testing import MemoryStore

WRAPPERS: dict[str, tuple[Callable[[Store], Store], set[str]]] = {
    "admitting": (AdmittingStore, {"not_admitted"}),
    "compressed": (CompressedStore, {"bytes_in", "bytes_out", "kept_as_they_are", "undecodable"}),
    "encrypted": (lambda store: EncryptedStore(store, bytes(32)), {"unsealable", "undeleted"}),
    "expiring": (lambda store: ExpiringStore(store, seconds=60), {"expired", "expiry_failed"}),
    "pinning": (
        lambda store: PinningStore(store, max_bytes=1 << 20, uses=2),
        {"pinned", "unpinned", "pin_failed", "pin_lost", "pin_refused"},
    ),
    "quota": (lambda store: QuotaStore(store, max_bytes=1 << 20), {"over_quota"}),
    "retrying": (RetryingStore, {"retried", "recovered", "retry_refused"}),
}


def test_a_snapshot_stays_what_it_was() -> None:
    counts = EventCounts(["written"])

    before = counts.snapshot()
    counts.add("written", 3)

    assert (dict(before), dict(counts.snapshot())) == ({"written": 0}, {"written": 3})


class _Counting(WrappedStore):
    """A store that has counted everything three times."""

    def __init__(self, events: set[str]) -> None:
        super().__init__(MemoryStore())
        self._counters = dict.fromkeys(events, 3)

    def stats(self) -> StoreStats:
        return replace(self._inner.stats(), counters=self._counters)


def test_named_events_are_zero_from_the_start_and_others_from_the_first_one() -> None:
    counts = EventCounts(["read"])
    counts.add("written", 0)

    assert counts.snapshot() == {"read": 0}
    counts.add("written")
    counts.add("read", 2)

    assert counts.snapshot() == {"read": 2, "written": 1}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_shows_its_counters_before_anything_happened(name: str) -> None:
    wrap, events = WRAPPERS[name]
    store = wrap(MemoryStore())

    counters = store.stats().counters
    store.close()

    assert {event: counters.get(event) for event in events} == dict.fromkeys(events, 0)


def test_tiers_show_their_counters_before_anything_happened() -> None:
    store = TieredStore(MemoryStore(), MemoryStore(), write_back=WriteBackLimits())

    counters = store.stats().counters
    store.close()

    assert set(counters.values()) == {0}
    assert counters.keys() >= {"near_hits", "far_failed", "missed", "promoted", "written_back"}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_adds_its_counts_to_those_of_the_store_in_it(name: str) -> None:
    wrap, events = WRAPPERS[name]
    store = wrap(_Counting(events))

    counters = store.stats().counters
    store.close()

    assert {event: counters[event] for event in events} == dict.fromkeys(events, 3)
