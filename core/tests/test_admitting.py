"""Admission: what is offered once stays out, what is offered again goes in, and little memory says which is which."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from linker_rig import errors_of, linked

from kvlinker.errors import ContractError
from kvlinker.selftest import self_test
from kvlinker.store import ReadStatus, Store, WriteStatus
from kvlinker.stores.admitting import AdmittingStore
from kvlinker.stores.recent_keys import RecentKeys
from kvlinker.testing import Call, Family, FaultAccess, MemoryStore, Raise, Report, Rule, page_keys
from kvlinker.testing.shelves import Shelf, allow, object_keys

WRITTEN, EXISTS, NOT_ADMITTED = WriteStatus.WRITTEN, WriteStatus.EXISTS, WriteStatus.NOT_ADMITTED


@pytest.fixture
def inner() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def store(inner: MemoryStore) -> Iterator[Store]:
    yield (store := AdmittingStore(inner))
    store.close()


def test_an_object_is_written_when_it_is_offered_the_second_time(
    store: Store, inner: MemoryStore
) -> None:
    shelf, keys = Shelf(store), object_keys(3)

    first = shelf.write(keys)
    found = inner.exists(keys)
    second = shelf.write(keys)

    assert first == (NOT_ADMITTED,) * 3
    assert found == (False,) * 3
    assert second == (WRITTEN,) * 3
    assert shelf.read(keys) == (ReadStatus.OK,) * 3
    assert store.stats().counters["not_admitted"] == 3


def test_what_is_not_admitted_is_neither_copied_nor_asked_permission_for(store: Store) -> None:
    shelf, keys = Shelf(store), object_keys(2)
    untouched = FaultAccess(
        shelf.access, [Rule(call=Call.COPY_OUT, fault=Raise(error=MemoryError("copied")))]
    )
    asked: list[bool] = []

    def may_publish() -> bool:
        asked.append(True)
        return True

    assert shelf.write(keys, memory=untouched, may_publish=may_publish) == (NOT_ADMITTED,) * 2
    assert not asked


def test_t4_of_several_batches_every_answer_stands_at_its_place(
    store: Store, inner: MemoryStore
) -> None:
    shelf = Shelf(store)
    known, stored, new = object_keys(3)
    Shelf(inner).stock([stored])
    shelf.write([known])

    batches = [
        shelf.batch([new]),
        shelf.batch([stored, known], first_page=1),
        shelf.batch([], first_page=3),
        shelf.batch([new, known], first_page=3),
    ]
    statuses = store.write(batches, shelf.access, may_publish=allow)

    assert statuses == ((NOT_ADMITTED,), (EXISTS, WRITTEN), (), (NOT_ADMITTED, EXISTS))
    assert shelf.read([known]) == (ReadStatus.OK,)


def test_what_was_offered_too_long_ago_is_new_again() -> None:
    store = AdmittingStore(MemoryStore(), remember=8)
    shelf = Shelf(store)
    old, *others = object_keys(17)

    shelf.write([old])
    shelf.write(others[:3])
    assert shelf.write([others[0]]) == (WRITTEN,)
    for key in others[3:]:
        shelf.write([key])

    assert shelf.write([old]) == (NOT_ADMITTED,)


def test_what_was_admitted_and_could_not_be_written_is_admitted_again(store: Store) -> None:
    shelf, keys = Shelf(store), object_keys(1)
    shelf.write(keys)

    assert shelf.write(keys, may_publish=lambda: False) == (WriteStatus.DISCARDED,)
    assert shelf.write(keys) == (WRITTEN,)


@pytest.mark.parametrize("remember", [1, 0, -1, True, 2.5, 1 << 33])
def test_a_memory_of_less_than_two_offers_is_refused(remember: int) -> None:
    with pytest.raises(ContractError, match="remember"):
        AdmittingStore(MemoryStore(), remember=remember)


# ---- the memory -------------------------------------------------------------------------------


def test_recent_keys_hold_the_last_half_for_certain_and_no_more_than_all() -> None:
    recent = RecentKeys(1000)
    keys = object_keys(3000)

    for first in range(0, 3000, 50):
        recent.note(keys[first : first + 50])
        lately = keys[max(0, first - 450) : first + 50]
        assert all(recent.contain(lately))

    assert sum(recent.contain(keys[:2000])) < 40


def test_strange_keys_are_rarely_taken_for_noted_ones() -> None:
    recent = RecentKeys(2000)
    recent.note(object_keys(2000))

    strange = recent.contain(object_keys(20_000, chain="strange"))

    assert sum(strange) < 20_000 / 100


def test_short_keys_and_none_are_taken_too() -> None:
    recent = RecentKeys(2)

    recent.note([])
    recent.note([b"a"])

    assert recent.contain([]) == ()
    assert recent.contain([b"a"]) == (True,)


# ---- under a linker ---------------------------------------------------------------------------


def test_l8_what_is_not_admitted_completes_false_and_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = page_keys(4)
    with linked(Family.DSA) as rig:
        rule = Rule(call=Call.WRITE, fault=Report(status=NOT_ADMITTED))
        rig.store.script.add(rule)
        rig.offer(keys)
        assert not rig.completion()
        events = rig.linker.metrics.snapshot().events
        assert not errors_of(rig.linker)
        assert (events["objects_not_admitted"], events["offloads_put_off"]) == (8, 1)
        assert "offloads_failed" not in events
        assert not caplog.records
        assert rig.linker.lookup("a", rig.asked(keys)) == []
        rig.store.script.clear()

        rig.offload(keys)

        assert rig.restore("b", keys)


def test_l8_a_failure_beside_what_is_not_admitted_is_one() -> None:
    with linked(Family.MHA) as rig:
        for status, positions in ((NOT_ADMITTED, {0}), (WriteStatus.FULL, {1})):
            fault = Report(status=status)
            rule = Rule(call=Call.WRITE, fault=fault, positions=frozenset(positions))
            rig.store.script.add(rule)
        rig.offer(page_keys(4))

        assert not rig.completion()

        assert errors_of(rig.linker) == {"offload_errors": 1}
        assert rig.linker.metrics.snapshot().events["offloads_failed"] == 1


def test_t5_the_self_test_offers_its_object_twice(store: Store) -> None:
    report = self_test(store)

    assert report.has_passed, report.problems
    assert store.stats().objects == 0
