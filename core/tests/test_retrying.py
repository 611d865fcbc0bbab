"""Retries: what fails for a moment is asked again, within a number, a time and a budget; writes are published once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
from linker_rig import Waiter

from kvlinker.device import DeviceAccess
from kvlinker.errors import (
    ContractError,
    DeviceCopyError,
    StoreClosedError,
    StoreContractError,
    StoreError,
    StoreFullError,
    StoreTimeoutError,
    TransferRevokedError,
)
from kvlinker.guard import BreakerOpenError
from kvlinker.store import ReadStatus, WriteBatch, WriteStatus
from kvlinker.stores.retry_budget import RetryBudget
from kvlinker.stores.retrying import RetryBounds, RetryingStore
from kvlinker.testing import (
    Call,
    CopyHalf,
    Fault,
    FaultAccess,
    FaultStore,
    MemoryStore,
    Miscount,
    Raise,
    Report,
    Rule,
)
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker.testing.waiting import wait_for

OK, MISS, FAILED = ReadStatus.OK, ReadStatus.MISS, ReadStatus.FAILED
WRITTEN = WriteStatus.WRITTEN
DOWN = StoreError("no answer now")


def faulty(*rules: Rule) -> FaultStore:
    return FaultStore(MemoryStore(), rules)


def retrying(
    store: FaultStore, *, attempts: int = 3, seconds: float = 60.0, share: float = 0.1
) -> RetryingStore:
    bounds = RetryBounds(
        attempts=attempts,
        first_seconds=0.001,
        lookup_seconds=seconds,
        transfer_seconds=seconds,
        share=share,
    )
    return RetryingStore(store, bounds)


def fails(call: Call, *, times: int, error: Exception = DOWN) -> Rule:
    return Rule(call=call, fault=Raise(error=error), times=times)


@pytest.mark.parametrize("error", [DOWN, StoreTimeoutError("too late")], ids=["error", "timeout"])
@pytest.mark.parametrize("call", [Call.EXISTS, Call.HOLD, Call.WRITE, Call.OPEN_READ, Call.READ])
def test_a_call_that_fails_twice_is_answered_the_third_time(call: Call, error: Exception) -> None:
    inner = faulty()
    store = retrying(inner)
    shelf, keys = Shelf(store), object_keys(3)
    shelf.stock(keys)
    inner.script.add(fails(call, times=2, error=error))

    assert store.exists(keys) == (True,) * 3
    assert store.hold(keys, seconds=5).present == (True,) * 3
    assert shelf.write(object_keys(1, chain="new")) == (WRITTEN,)
    assert shelf.read(keys) == (OK,) * 3

    counters = store.stats().counters
    assert (counters["retried"], counters["recovered"]) == (2, 1)


@pytest.mark.parametrize("call", [Call.EXISTS, Call.WRITE, Call.OPEN_READ, Call.READ])
def test_the_last_attempt_s_error_is_the_call_s(call: Call) -> None:
    inner = faulty()
    store = retrying(inner)
    shelf, keys = Shelf(store), object_keys(1)
    shelf.stock(keys)
    inner.script.add(Rule(call=call, fault=Raise(error=StoreTimeoutError("still down"))))
    calls: dict[Call, Callable[[], object]] = {
        Call.EXISTS: lambda: store.exists(keys),
        Call.WRITE: lambda: shelf.write(keys),
        Call.OPEN_READ: lambda: shelf.read(keys),
        Call.READ: lambda: shelf.read(keys),
    }

    with pytest.raises(StoreTimeoutError, match="still down"):
        calls[call]()

    assert len(inner.script.fired) == 3
    assert store.stats().counters["recovered"] == 0


def test_objects_that_failed_are_read_again_alone() -> None:
    inner = faulty()
    store = retrying(inner)
    shelf, keys = Shelf(store), object_keys(5)
    shelf.stock([*keys[:2], *keys[3:]])
    inner.script.add(
        Rule(
            call=Call.READ,
            fault=Report(status=FAILED),
            positions=frozenset({1, 4}),
            times=1,
        )
    )

    assert shelf.read(keys) == (OK, OK, MISS, OK, OK)

    asked = [record.keys for record in inner.records if record.call is Call.READ]
    assert asked == [keys, (keys[1], keys[4])]


def test_objects_that_fail_to_the_end_are_failed_and_the_others_are_read() -> None:
    inner = faulty()
    store = retrying(inner)
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)
    inner.script.add(Rule(call=Call.READ, fault=Report(status=FAILED), positions=frozenset({0})))

    assert shelf.read(keys) == (FAILED, OK)

    assert len(inner.script.fired) == 3


def test_a_read_by_layers_goes_on_in_the_session_that_was_opened_anew() -> None:
    memory = MemoryStore()
    inner = FaultStore(memory)
    store = retrying(inner)
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)
    inner.script.add(fails(Call.READ, times=1))

    with shelf.open(keys) as session:
        statuses = [shelf.read(keys, session=session, layer=layer) for layer in range(4)]

    assert statuses == [(OK, OK)] * 4
    assert sum(record.call is Call.OPEN_READ for record in inner.records) == 2
    assert memory.kept() == 0


@pytest.mark.parametrize(
    "error",
    [
        StoreFullError("no space"),
        StoreClosedError("closed"),
        BreakerOpenError("it is down"),
        DeviceCopyError("the device is gone"),
        TransferRevokedError("taken back"),
        RuntimeError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_does_not_pass_is_not_asked_again(error: Exception) -> None:
    inner = faulty(Rule(call=Call.EXISTS, fault=Raise(error=error)))
    store = retrying(inner)

    with pytest.raises(type(error)):
        store.exists(object_keys(1))

    assert len(inner.script.fired) == 1


# ---- writes -----------------------------------------------------------------------------------


class FailsWhilePublishing(MemoryStore):
    """Asks for the permission, and fails then."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store."""
        del batches, memory
        self.writes += 1
        may_publish()
        raise DOWN


def test_t2_a_write_is_not_made_again_once_the_permission_was_asked() -> None:
    store = RetryingStore(inner := FailsWhilePublishing())
    shelf = Shelf(store)
    asked: list[bool] = []

    def may_publish() -> bool:
        asked.append(True)
        return True

    with pytest.raises(StoreError, match="no answer"):
        shelf.write(object_keys(1), may_publish=may_publish)

    assert (inner.writes, asked) == (1, [True])


def test_a_write_that_is_made_again_copies_its_bytes_anew() -> None:
    inner = faulty(fails(Call.WRITE, times=2))
    store = retrying(inner)
    shelf, keys = Shelf(store), object_keys(3)
    asked: list[bool] = []

    def may_publish() -> bool:
        asked.append(True)
        return True

    assert shelf.write(keys, may_publish=may_publish) == (WRITTEN,) * 3
    assert asked == [True]
    assert shelf.read(keys) == (OK,) * 3


def test_l5_a_read_that_was_taken_back_is_not_made_again() -> None:
    store = retrying(faulty())
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)
    fault: Fault = CopyHalf(error=TransferRevokedError("taken back"))
    access = FaultAccess(shelf.access, [Rule(call=Call.COPY_IN, fault=fault)])

    with pytest.raises(TransferRevokedError):
        shelf.read(keys, memory=access)

    assert len(access.script.fired) == 1


# ---- bounds -----------------------------------------------------------------------------------


def test_nothing_is_asked_again_when_the_time_is_over() -> None:
    inner = faulty(Rule(call=Call.EXISTS, fault=Raise(error=DOWN)))
    store = retrying(inner, attempts=100, seconds=0.0)

    with pytest.raises(StoreError, match="no answer"):
        store.exists(object_keys(1))

    assert len(inner.script.fired) == 1


def test_when_everything_fails_little_more_is_asked_than_before() -> None:
    inner = faulty(Rule(call=Call.EXISTS, fault=Raise(error=DOWN)))
    store = retrying(inner, attempts=5)

    for _ in range(200):
        with pytest.raises(StoreError):
            store.exists(object_keys(1))

    assert 200 < len(inner.script.fired) <= 200 + 10 + 200 * 0.1
    counters = store.stats().counters
    assert counters["retried"] == len(inner.script.fired) - 200
    assert counters["retry_refused"] > 100


def test_a_budget_is_earned_by_calls_and_never_more_than_ten() -> None:
    budget = RetryBudget(0.5)
    first = [budget.spend() for _ in range(11)]
    budget.earn()
    second = budget.spend()
    budget.earn()
    third = budget.spend()
    for _ in range(1000):
        budget.earn()

    assert first == [True] * 10 + [False]
    assert (second, third) == (False, True)
    assert [budget.spend() for _ in range(11)] == first


def test_closing_ends_the_wait_for_the_next_attempt() -> None:
    inner = faulty(Rule(call=Call.EXISTS, fault=Raise(error=DOWN)))
    bounds = RetryBounds(
        attempts=100, first_seconds=3600, lookup_seconds=3600, transfer_seconds=3600
    )
    store = RetryingStore(inner, bounds)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            store.exists(object_keys(1))
        except StoreError as error:
            errors.append(error)

    asking = Waiter(ask)
    wait_for(lambda: inner.script.fired, "the first question")
    assert asking.still_waits()
    store.close()

    assert asking.returns()
    assert [type(error) for error in errors] == [StoreClosedError]
    assert len(inner.script.fired) == 1


class Permission:
    """Permits to publish."""

    def __call__(self) -> bool:
        return True


def test_l12_nothing_of_a_call_stays_in_memory_behind_its_retries() -> None:
    inner = faulty()
    store = retrying(inner)
    shelf, keys = Shelf(store), object_keys(1)
    inner.script.add(fails(Call.WRITE, times=1), fails(Call.READ, times=1))
    permission, access = Permission(), FaultAccess(shelf.access)
    kept = weakref.ref(permission), weakref.ref(access)
    gc.disable()
    try:
        assert shelf.write(keys, may_publish=permission) == (WRITTEN,)
        assert shelf.read(keys, memory=access) == (OK,)
        del permission, access
        alive = kept[0](), kept[1]()
    finally:
        gc.enable()

    assert alive == (None, None)
    assert store.stats().counters["recovered"] == 2


def test_t4_a_read_of_a_wrong_count_is_refused_and_not_made_again() -> None:
    inner = faulty()
    store = retrying(inner)
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)
    inner.script.add(Rule(call=Call.READ, fault=Miscount(change=1)))

    with shelf.open(keys) as session, pytest.raises(StoreContractError, match="2 of ReadStatus"):
        session.read(shelf.plan([40, 41]), shelf.access)

    assert len(inner.script.fired) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"attempts": 0},
        {"attempts": 101},
        {"attempts": True},
        {"first_seconds": -1.0},
        {"lookup_seconds": float("nan")},
        {"transfer_seconds": 1e9},
        {"share": 1.5},
    ],
    ids=str,
)
def test_bounds_that_are_none_are_refused_by_name(options: dict[str, float]) -> None:
    (name,) = options

    with pytest.raises(ContractError, match=name):
        RetryBounds(**options)  # type: ignore[arg-type]  # as the test has them
