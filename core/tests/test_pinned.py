"""Pins: chosen objects stay while others come and go, up to a number of bytes, and no longer than their process."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvlinker.errors import ContractError, StoreError
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.store import Hold, ObjectKey, ReadStatus
from kvlinker.stores.pinned import PinningStore
from kvlinker.testing import Call, FaultStore, MemoryStore, Raise, Rule
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker.testing.waiting import wait_for

OK, MISS = ReadStatus.OK, ReadStatus.MISS
PAGE = 640
MINE = object_keys(1)[0][:NAMESPACE_BYTES]
LIMIT_SECONDS = 60.0


def crowd(shelf: Shelf, chain: str = "crowd") -> None:
    """Write several times what fits, of a namespace that nobody pins."""
    for key in object_keys(40, model="crowd", chain=chain):
        shelf.write([key])


def pinning(
    inner: MemoryStore | FaultStore,
    *,
    pages: int = 4,
    named: bool = False,
    uses: int | None = None,
    seconds: float = 600.0,
) -> PinningStore:
    return PinningStore(
        inner,
        max_bytes=pages * PAGE,
        namespaces=[MINE] if named else [],
        uses=uses,
        lease_seconds=seconds,
    )


class RunningTime:
    """Seconds in which the process ran: where it stood still between two looks, they count for little."""

    LONGEST_SECONDS = 0.01

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds, self._looked = 0.0, time.monotonic()

    def __call__(self) -> float:
        with self._lock:
            looked = time.monotonic()
            self._seconds += min(looked - self._looked, self.LONGEST_SECONDS)
            self._looked = looked
            return self._seconds


@pytest.fixture
def inner() -> MemoryStore:
    return MemoryStore(capacity_bytes=10 * PAGE)


def test_objects_of_a_named_namespace_stay_when_they_are_written(inner: MemoryStore) -> None:
    store = pinning(inner, named=True)
    shelf, keys = Shelf(store), object_keys(3)
    shelf.stock(keys)

    crowd(shelf)

    assert shelf.read(keys) == (OK,) * 3
    assert store.pinned_bytes == 3 * PAGE
    assert store.stats().counters["pinned"] == 3
    store.close()


def test_objects_that_lay_there_before_stay_from_their_first_read_on(inner: MemoryStore) -> None:
    keys = object_keys(3)
    Shelf(inner).stock(keys)
    store = pinning(inner, named=True)
    shelf = Shelf(store)

    assert shelf.read(keys[:2]) == (OK, OK)
    crowd(shelf)

    assert shelf.read(keys) == (OK, OK, MISS)
    store.close()


def test_objects_that_are_used_often_stay(inner: MemoryStore) -> None:
    store = pinning(inner, uses=3)
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)
    for _ in range(2):
        shelf.read(keys)
    assert store.pinned_bytes == 0
    shelf.read(keys[:1])

    crowd(shelf)

    assert shelf.read(keys) == (OK, MISS)
    store.close()


def test_over_the_cap_nothing_is_pinned_and_it_is_counted(inner: MemoryStore) -> None:
    store = pinning(inner, pages=2, named=True)
    shelf, keys = Shelf(store), object_keys(5)
    shelf.stock(keys)

    crowd(shelf)

    assert shelf.read(keys) == (OK, OK, MISS, MISS, MISS)
    counters = store.stats().counters
    assert (counters["pinned"], counters["pin_refused"]) == (2, 6)
    assert store.pinned_bytes == 2 * PAGE
    store.close()


def test_objects_can_be_pinned_and_unpinned_by_key(inner: MemoryStore) -> None:
    store = pinning(inner)
    shelf, keys, absent = Shelf(store), object_keys(2), object_keys(1, chain="absent")
    shelf.stock(keys)

    pinned = store.pin([*absent, *keys, keys[0]], object_bytes=PAGE)
    again = store.pin(keys, object_bytes=PAGE)
    crowd(shelf)
    stayed = shelf.read(keys)
    unpinned = store.unpin([keys[0], *absent])
    crowd(shelf, chain="more")

    assert (pinned, again, stayed, unpinned) == (2, 0, (OK, OK), 1)
    assert shelf.read(keys) == (MISS, OK)
    assert store.pinned_bytes == PAGE
    store.close()


def test_pinned_objects_can_be_deleted_and_make_room_for_other_pins(inner: MemoryStore) -> None:
    store = pinning(inner, pages=2, named=True)
    shelf = Shelf(store)
    first, second = object_keys(2), object_keys(2, chain="second")
    shelf.stock(first)

    assert store.delete(first) == (True, True)
    shelf.stock(second)
    crowd(shelf)

    assert shelf.read([*first, *second]) == (MISS, MISS, OK, OK)
    assert store.clear(MINE) == 2
    assert store.pinned_bytes == 0
    store.close()


def test_leases_are_renewed_before_they_end_and_end_with_the_store() -> None:
    clock = RunningTime()
    inner = MemoryStore(capacity_bytes=10 * PAGE, clock=clock)
    store = pinning(inner, named=True, seconds=0.9)
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)
    end = clock() + 1.8
    while clock() < end:
        crowd(shelf)
        assert inner.exists(keys) == (True, True)

    store.unpin(keys)

    crowd(shelf)
    assert inner.exists(keys) == (False, False)
    store.close()


def test_a_process_that_is_gone_pins_nothing_once_its_leases_have_ended(
    inner: MemoryStore,
) -> None:
    store = pinning(inner, named=True, seconds=0.05)
    Shelf(store).stock(object_keys(2))
    dead = weakref.ref(store)

    del store
    gc.collect()

    assert dead() is None
    wait_for(lambda: inner.kept() == 0, "the end of every hold")


def test_what_another_process_deleted_is_lost_and_its_room_is_free_again(
    inner: MemoryStore,
) -> None:
    store = pinning(inner, pages=2, named=True, seconds=0.03)
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)

    inner.delete(keys)

    wait_for(lambda: store.pinned_bytes == 0, "the loss of every pin")
    assert store.stats().counters["pin_lost"] == 2
    store.close()


def test_a_hold_that_fails_fails_no_write_and_no_read(inner: MemoryStore) -> None:
    faulty = FaultStore(
        inner, [Rule(call=Call.HOLD, fault=Raise(error=StoreError("no holds now")), times=2)]
    )
    store = pinning(faulty, named=True)
    shelf, keys = Shelf(store), object_keys(2)

    shelf.stock(keys)
    assert shelf.read(keys) == (OK, OK)

    assert store.stats().counters["pin_failed"] == 4
    assert store.pinned_bytes == 0
    assert shelf.read(keys) == (OK, OK)
    assert store.pinned_bytes == 2 * PAGE
    store.close()


def test_a_renewal_that_fails_keeps_the_leases_and_is_tried_again() -> None:
    inner = MemoryStore(capacity_bytes=10 * PAGE, clock=lambda: 0.0)  # no lease ends by itself
    faulty = FaultStore(inner)
    store = pinning(faulty, named=True, seconds=0.03)
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)

    faulty.script.add(Rule(call=Call.HOLD, fault=Raise(error=StoreError("no holds now"))))
    wait_for(lambda: store.stats().counters["pin_failed"] >= 2 * len(keys), "two renewals")
    crowd(shelf)
    stayed = inner.exists(keys)
    faulty.script.clear()
    held = faulty.count(Call.HOLD)
    wait_for(lambda: faulty.count(Call.HOLD) >= held + 2, "a renewal from begin to end")
    crowd(shelf)

    assert (stayed, inner.exists(keys)) == ((True, True), (True, True))
    assert store.pinned_bytes == 2 * PAGE
    store.close()


def test_leases_that_could_not_be_renewed_are_let_go_of_with_the_next(inner: MemoryStore) -> None:
    fault = Raise(error=StoreError("no holds now"))
    rules = [Rule(call=Call.HOLD, fault=fault, first=2, times=1)]
    store = pinning(FaultStore(inner, rules), named=True)
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)

    store.unpin(keys[:1])
    failed = inner.kept()
    store.unpin(keys[1:])

    assert (failed, inner.kept()) == (2, 0)
    store.close()


def test_a_store_without_leases_is_refused_with_the_reason() -> None:
    with pytest.raises(ContractError, match="MemoryStore has no leases"):
        pinning(MemoryStore(leases=False))


def test_pins_that_leave_too_little_room_are_refused(inner: MemoryStore) -> None:
    with pytest.raises(ContractError, match="at most 4800 B, three quarters"):
        pinning(inner, pages=8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_bytes", 0),
        ("uses", 0),
        ("uses", True),
        ("lease_seconds", 0.0),
        ("lease_seconds", float("nan")),
        ("namespaces", [b"short"]),
    ],
)
def test_a_value_that_is_none_is_refused_by_name(
    inner: MemoryStore, name: str, value: list[ObjectKey]
) -> None:
    options: dict[str, object] = {"max_bytes": PAGE, name: value}

    with pytest.raises(ContractError, match=f"{name}|a namespace has 12 bytes, got 5"):
        PinningStore(inner, **options)  # type: ignore[arg-type]  # as the test has them


class Unwilling(MemoryStore):
    """Raises what no store should when it is asked to hold, as often as it is told."""

    refusals = 0

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        """See Store."""
        if self.refusals:
            self.refusals -= 1
            msg = "a plugin at fault"
            raise RuntimeError(msg)
        return super().hold(keys, seconds=seconds)


def test_a_hold_that_raises_anything_fails_no_read_and_takes_no_room() -> None:
    inner, keys = Unwilling(), object_keys(2)
    store = pinning(inner, pages=2, named=True)
    shelf = Shelf(store)
    inner.refusals = 2

    shelf.stock(keys)
    assert shelf.read(keys) == (OK, OK)
    assert store.pinned_bytes == 0
    assert store.stats().counters["pin_failed"] == 4
    assert inner.kept() == 0

    assert shelf.read(keys) == (OK, OK)
    assert store.pinned_bytes == 2 * PAGE
    store.close()


def test_pins_are_renewed_after_a_renewal_that_raised_anything() -> None:
    clock = RunningTime()
    inner, keys = Unwilling(capacity_bytes=10 * PAGE, clock=clock), object_keys(2)
    store = pinning(inner, named=True, seconds=0.9)
    shelf = Shelf(store)
    shelf.stock(keys)
    inner.refusals = 1
    wait_for(lambda: not inner.refusals, "the last refusal")

    end = clock() + 1.2  # longer than any lease that was not renewed
    while clock() < end:
        crowd(shelf)

    assert shelf.read(keys) == (OK, OK)
    store.close()


def test_a_pin_that_ends_after_the_store_was_closed_is_let_go_of() -> None:
    class Slow(MemoryStore):
        def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
            held = super().hold(keys, seconds=seconds)
            begun.set()
            assert closed.wait(LIMIT_SECONDS)
            return held

        def close(self) -> None:
            closed.set()

    begun, closed = threading.Event(), threading.Event()
    inner, keys = Slow(), object_keys(2)
    store = pinning(inner)
    Shelf(inner).stock(keys)

    with ThreadPoolExecutor(1) as pool:
        pinned = pool.submit(lambda: store.pin(keys, object_bytes=PAGE))
        assert begun.wait(LIMIT_SECONDS)
        store.close()

    assert pinned.result() == 0
    assert (inner.kept(), store.pinned_bytes) == (0, 0)
