"""Quotas: no namespace has more bytes than it may, as far as the store tells or this process knows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvlinker.errors import ContractError, DeviceCopyError, StoreError
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.store import ObjectKey, ReadStatus, Store, WriteStatus
from kvlinker.stores.quota import QuotaStore
from kvlinker.stores.tiered import TieredStore
from kvlinker.testing import Call, FaultAccess, FaultStore, MemoryStore, Raise, Rule
from kvlinker.testing.shelves import Shelf, object_keys

OK, MISS = ReadStatus.OK, ReadStatus.MISS
WRITTEN, EXISTS, FULL = WriteStatus.WRITTEN, WriteStatus.EXISTS, WriteStatus.FULL
PAGE = 640
MINE, OTHER = (
    object_keys(1)[0][:NAMESPACE_BYTES],
    object_keys(1, model="other")[0][:NAMESPACE_BYTES],
)


class TellingStore(MemoryStore):
    """Says how many bytes a namespace has."""

    def namespace_bytes(self, namespace: bytes) -> int | None:
        """See Store."""
        return sum(len(self.payload(key)) for key in self.keys() if key.startswith(namespace))


every_inner = pytest.mark.parametrize("kind", [MemoryStore, TellingStore])


def bytes_of(store: MemoryStore, namespace: bytes = MINE) -> int:
    keys = store.keys()
    return sum(len(store.payload(key)) for key in keys if key.startswith(namespace))


@every_inner
def test_what_would_be_over_the_quota_is_answered_as_by_a_full_store(
    kind: type[MemoryStore],
) -> None:
    inner = kind()
    store = QuotaStore(inner, max_bytes=3 * PAGE + 100)
    shelf, keys, others = Shelf(store), object_keys(5), object_keys(3, model="other")

    statuses, beside = shelf.write(keys), shelf.write(others)

    assert statuses == (WRITTEN, WRITTEN, WRITTEN, FULL, FULL)
    assert beside == (WRITTEN,) * 3
    assert (bytes_of(inner), bytes_of(inner, OTHER)) == (3 * PAGE, 3 * PAGE)
    assert store.stats().counters["over_quota"] == 2
    assert shelf.read(keys) == (OK, OK, OK, MISS, MISS)


@every_inner
def test_what_is_there_is_there_whatever_the_quota_says(kind: type[MemoryStore]) -> None:
    inner = kind()
    keys = object_keys(4)
    Shelf(inner).stock(keys)
    store = QuotaStore(inner, max_bytes=PAGE)

    statuses = Shelf(store).write(keys)

    assert set(statuses) == {EXISTS}
    assert store.stats().counters["over_quota"] == 0


@every_inner
def test_room_that_is_deleted_cleared_or_evicted_can_be_used_again(kind: type[MemoryStore]) -> None:
    inner = kind()
    store = QuotaStore(inner, max_bytes=2 * PAGE)
    shelf = Shelf(store)
    a, b, c, d = (object_keys(2, chain=chain) for chain in "abcd")
    shelf.stock(a)

    assert store.delete(a[:1]) == (True,)
    assert shelf.write(b) == (WRITTEN, FULL)
    assert store.clear(MINE) == 2
    assert shelf.write(c) == (WRITTEN, WRITTEN)
    inner.delete(c)  # as another process would, or eviction
    assert shelf.write(d) == (WRITTEN, WRITTEN)
    assert bytes_of(inner) == 2 * PAGE


def test_a_store_that_tells_counts_what_lay_there_before() -> None:
    inner = TellingStore()
    Shelf(inner).stock(object_keys(2, chain="before"))

    store = QuotaStore(inner, max_bytes=3 * PAGE)

    assert Shelf(store).write(object_keys(2)) == (WRITTEN, FULL)


def test_named_namespaces_have_quotas_of_their_own() -> None:
    store = QuotaStore(MemoryStore(), namespaces={MINE: PAGE})
    shelf = Shelf(store)

    assert shelf.write(object_keys(2)) == (WRITTEN, FULL)
    assert shelf.write(object_keys(4, model="other")) == (WRITTEN,) * 4


@every_inner
def test_writers_at_once_do_not_pass_a_quota_together(kind: type[MemoryStore]) -> None:
    inner = kind()
    store = QuotaStore(inner, max_bytes=10 * PAGE)
    shelves: list[Shelf] = []
    for _ in range(4):
        shelves.append(shelves[-1].beside() if shelves else Shelf(store))

    def fill(number: int) -> Sequence[WriteStatus]:
        keys = object_keys(24, chain=f"writer {number}")
        return [shelves[number].write([key])[0] for key in keys]

    with ThreadPoolExecutor(4) as pool:
        answers = [status for part in pool.map(fill, range(4)) for status in part]

    assert bytes_of(inner) == 10 * PAGE
    assert (answers.count(WRITTEN), answers.count(FULL)) == (10, 86)


@every_inner
def test_a_write_that_goes_wrong_gives_its_room_back(kind: type[MemoryStore]) -> None:
    store = QuotaStore(kind(), max_bytes=2 * PAGE)
    shelf, keys = Shelf(store), object_keys(2)
    broken = FaultAccess(
        shelf.access, [Rule(call=Call.COPY_OUT, fault=Raise(error=DeviceCopyError("gone")))]
    )

    with pytest.raises(DeviceCopyError):
        shelf.write(keys, memory=broken)
    assert shelf.write(keys, may_publish=lambda: False) == (WriteStatus.DISCARDED,) * 2

    assert shelf.write(keys) == (WRITTEN, WRITTEN)


def test_an_object_of_another_length_takes_the_place_of_its_own() -> None:
    inner = MemoryStore()
    store = QuotaStore(inner, max_bytes=2 * PAGE)
    short = Shelf(store)
    long, keys = short.beside(page_bytes=2 * PAGE), object_keys(1)
    short.stock(keys)

    long.stock(keys)

    assert bytes_of(inner) == 2 * PAGE
    assert short.write(object_keys(1, chain="more")) == (FULL,)


def test_a_key_that_is_named_twice_counts_once() -> None:
    store = QuotaStore(MemoryStore(), max_bytes=2 * PAGE)
    shelf = Shelf(store)
    key, other, third = object_keys(3)

    statuses = shelf.write([key, key, other])

    assert all(status.is_stored for status in statuses)
    assert shelf.write([third]) == (FULL,)


class Watched(MemoryStore):
    """Counts how often it is looked at, and may take its time for it."""

    looks = 0
    seconds = 0.0

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        self.looks += 1
        time.sleep(self.seconds)
        return super().exists(keys)


class WatchedTelling(TellingStore):
    """Counts how often it says what it has."""

    looks = 0

    def namespace_bytes(self, namespace: bytes) -> int | None:
        """See Store."""
        self.looks += 1
        return super().namespace_bytes(namespace)


@pytest.mark.parametrize("kind", [Watched, WatchedTelling])
def test_a_write_over_the_quota_looks_at_the_store_once_however_many_objects_it_has(
    kind: type[Watched | WatchedTelling],
) -> None:
    inner = kind()
    store = QuotaStore(inner, max_bytes=PAGE, refresh_seconds=600)
    shelf = Shelf(store)
    shelf.stock(object_keys(1, chain="before"))
    inner.looks = 0

    assert set(shelf.write(object_keys(32))) == {FULL}

    assert inner.looks <= 2  # and once for which of the objects are there already


def test_a_store_that_takes_long_to_look_at_is_not_looked_at_for_each_write() -> None:
    inner = Watched()
    store = QuotaStore(inner, max_bytes=PAGE)
    shelf = Shelf(store)
    shelf.stock(object_keys(1, chain="before"))
    inner.looks, inner.seconds = 0, 0.15

    for key in object_keys(3):
        assert shelf.write([key]) == (FULL,)

    assert inner.looks == 4  # once for what was counted, and for each object whether it is there


class Mute(MemoryStore):
    """Is down when it is asked for what it has."""

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        msg = f"no answer for {len(keys)} keys"
        raise StoreError(msg)


def test_a_store_that_is_down_is_no_reason_to_pass_a_quota() -> None:
    inner = Mute()
    store: Store = QuotaStore(inner, max_bytes=PAGE)
    shelf, keys = Shelf(store), object_keys(2)
    assert shelf.write(keys[:1]) == (WRITTEN,)

    with pytest.raises(StoreError, match="no answer"):
        shelf.write(keys[1:])

    assert bytes_of(inner) == PAGE


class Telling(FaultStore):
    """Says how many bytes a namespace has, unless it is down."""

    def namespace_bytes(self, namespace: bytes) -> int | None:
        """See Store."""
        return sum(self.exists(tuple(object_keys(8)))) * PAGE if namespace == MINE else 0


def test_what_tiers_have_counts_also_where_the_far_store_is_down_when_it_is_asked_first() -> None:
    far = Telling(MemoryStore())
    keys = object_keys(8)
    Shelf(far).stock(keys[:2])
    down = Rule(call=Call.EXISTS, fault=Raise(error=StoreError("down")))
    far.script.add(down)
    tiers = TieredStore(MemoryStore(), far, pause_seconds=0.001)
    shelf = Shelf(QuotaStore(tiers, max_bytes=3 * PAGE, refresh_seconds=0))

    with pytest.raises(StoreError, match="down"):
        shelf.write(keys[2:])
    far.script.clear()
    assert shelf.write(keys[2:4]) == (WRITTEN, FULL)
    far.script.add(down)
    assert shelf.write(keys[5:6]) == (FULL,)


@pytest.mark.parametrize(
    ("max_bytes", "namespaces", "text"),
    [
        (None, {}, "a quota needs"),
        (-1, None, "quota must be at least 0"),
        (1.5, None, "quota must be an integer"),
        (None, {b"short": 5}, "12 bytes, got 5"),
        (None, {MINE: -5}, f"quota of {MINE.hex()} must be at least 0"),
    ],
)
def test_a_quota_that_is_none_is_refused(
    max_bytes: int, namespaces: dict[bytes, int], text: str
) -> None:
    with pytest.raises(ContractError, match=text):
        QuotaStore(MemoryStore(), max_bytes=max_bytes, namespaces=namespaces)
