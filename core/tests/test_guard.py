"""A guarded store answers in the right type and count or is refused, and is left alone while it is down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pytest

from kvlinker.device import DeviceAccess
from kvlinker.errors import (
    DeviceCopyError,
    StalePoolError,
    StoreContractError,
    StoreError,
    StoreTimeoutError,
    TransferRevokedError,
)
from kvlinker.guard import Breaker, GuardedStore, checked_read
from kvlinker.plans import TransferPlan
from kvlinker.store import (
    Hold,
    ObjectKey,
    ReadRequest,
    ReadSession,
    ReadStatus,
    Store,
    WriteBatch,
    WriteStatus,
)
from kvlinker.testing import (
    AnswerNone,
    Answers,
    Call,
    Fault,
    FaultedCall,
    FaultStore,
    MemoryStore,
    Miscount,
    OpaqueMemory,
    Raise,
    Rule,
    fake_group,
)

OBJECTS: tuple[ObjectKey, ...] = (b"a" * 32, b"b" * 32)
PAUSE = 5.0


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Echo(MemoryStore):
    """A store that answers each question with one object, as stores without types may."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer
        self.released = 0

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        super().exists(keys)
        return cast("tuple[bool, ...]", self._said())

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        return EchoHold(super().hold(keys, seconds=seconds), self)

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        super().write(batches, memory, may_publish=may_publish)
        return cast("tuple[tuple[WriteStatus, ...], ...]", self._said())

    def open_read(self, request: ReadRequest) -> ReadSession:
        super().open_read(request).close()
        return cast("ReadSession", self._said())

    def _said(self) -> object:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@dataclass(frozen=True, slots=True)
class Say(Fault):
    """Answers a read with one object, whatever that is."""

    answer: object

    @property
    def calls(self) -> frozenset[Call]:
        return frozenset({Call.READ})

    def around(
        self, call: FaultedCall, affected: frozenset[int], proceed: Callable[[], Answers]
    ) -> Answers:
        del call, affected
        proceed()
        return cast("Answers", self.answer)


class EchoHold(Hold):
    """A hold whose answer is the store's."""

    def __init__(self, hold: Hold, store: Echo) -> None:
        self._hold = hold
        self._store = store

    @property
    def present(self) -> tuple[bool, ...]:
        return self._store.exists(())

    def release(self) -> None:
        self._hold.release()
        self._store.released += 1


def guarded(store: Store, breaker: Breaker | None = None) -> GuardedStore:
    return GuardedStore(store, breaker or Breaker(pause_seconds=PAUSE))


def never() -> bool:
    return False


def two_pages() -> tuple[TransferPlan, DeviceAccess]:
    pools = fake_group(memory=OpaqueMemory())
    entry = pools.group.entries[0]
    pages = entry.prepare_locations(pools.slots("kv", [0, 1]))
    return entry.page_plan(pages), pools.access()


# ---- answers ----------------------------------------------------------------------------------


def test_t4_right_answers_are_handed_on() -> None:
    store = guarded(MemoryStore())
    plan, memory = two_pages()
    batch = WriteBatch(keys=OBJECTS, plan=plan, fingerprint=b"f")

    written = store.write([batch], memory, may_publish=lambda: True)
    hold, held = store.hold([*OBJECTS, b"c" * 32], seconds=9)
    request = ReadRequest(keys=OBJECTS, object_bytes=plan.object_bytes, fingerprint=b"f")
    with store.open_read(request) as session:
        statuses = checked_read(store.name, session, plan, memory)

    assert written == ((WriteStatus.WRITTEN,) * 2,)
    assert held == (True, True, False)
    assert statuses == (ReadStatus.OK, ReadStatus.OK)
    assert store.exists([*OBJECTS, b"c" * 32]) == (True, True, False)
    assert store.name == "MemoryStore"
    hold.release()
    store.delete(OBJECTS)
    assert store.exists(OBJECTS) == (False, False)


@pytest.mark.parametrize(
    "answer",
    [None, b"", "", (), (True,), (True, True, True), 2, {True, False}, iter((True, True))],
    ids=["none", "bytes", "text", "empty", "short", "long", "number", "set", "iterator"],
)
def test_t4_b81_no_answer_or_a_wrong_count_is_refused(answer: object) -> None:
    store = Echo(answer)

    with pytest.raises(StoreContractError, match=r"Echo.exists must answer with 2 booleans"):
        guarded(store).exists(OBJECTS)
    with pytest.raises(StoreContractError, match=r"Echo.hold must answer with 2 booleans"):
        guarded(store).hold(OBJECTS, seconds=1)
    assert store.released == 1


@pytest.mark.parametrize("value", [1, 1.0, "yes", b"\x01", None, np.bool_(True), object()])
def test_x05_b81_only_a_true_true_says_that_an_object_exists(value: object) -> None:
    assert guarded(Echo([value, True])).exists(OBJECTS) == (False, True)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        (),
        ((),),
        (None,),
        ((WriteStatus.WRITTEN,),),
        ((WriteStatus.WRITTEN,) * 3,),
        ((WriteStatus.WRITTEN,) * 2, ()),
        (("written", "written"),),
        ((True, True),),
        ((ReadStatus.OK,) * 2,),
    ],
    ids=repr,
)
def test_t4_statuses_of_a_write_have_the_shape_of_the_batches(answer: object) -> None:
    plan, memory = two_pages()
    batch = WriteBatch(keys=OBJECTS, plan=plan, fingerprint=b"f")

    with pytest.raises(StoreContractError, match=r"Echo.write must answer with"):
        guarded(Echo(answer)).write([batch], memory, may_publish=never)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        (),
        (ReadStatus.OK,),
        (ReadStatus.OK,) * 3,
        (True, True),
        (None, ReadStatus.OK),
        ("ok", "ok"),
    ],
    ids=repr,
)
def test_t4_b58_statuses_of_a_read_are_one_for_each_object(answer: object) -> None:
    plan, memory = two_pages()

    rule = Rule(call=Call.READ, fault=Say(answer))
    request = ReadRequest(keys=OBJECTS, object_bytes=plan.object_bytes, fingerprint=b"f")
    session = FaultStore(MemoryStore(), [rule]).open_read(request)

    with pytest.raises(StoreContractError, match=r"read of pool 'kv' must answer with 2 of"):
        checked_read("FaultStore", session, plan, memory)


@pytest.mark.parametrize("answer", [None, True, b"", object()])
def test_t4_a_session_that_is_none_is_refused(answer: object) -> None:
    request = ReadRequest(keys=OBJECTS, object_bytes=1, fingerprint=b"f")

    with pytest.raises(StoreContractError, match=r"open_read must answer with a ReadSession"):
        guarded(Echo(answer)).open_read(request)


@pytest.mark.parametrize("fault", [AnswerNone(), Miscount(change=1)], ids=["none", "more"])
def test_t4_a_delete_may_answer_anything(fault: AnswerNone | Miscount) -> None:
    store = FaultStore(MemoryStore(), [Rule(call=Call.DELETE, fault=fault)])

    guarded(store).delete(OBJECTS)

    assert store.count(Call.DELETE) == 1


@pytest.mark.parametrize(
    ("revocable", "device_memory", "expected"),
    [(True, False, True), (False, False, False), (True, True, False), (False, True, False)],
)
def test_l5_a_store_that_moves_device_memory_itself_cannot_be_revoked_whatever_it_says(
    *, revocable: bool, device_memory: bool, expected: bool
) -> None:
    able = replace(MemoryStore().capabilities, revocable=revocable, device_memory=device_memory)

    assert guarded(FaultStore(MemoryStore(), capabilities=able)).is_revocable is expected


# ---- breaker ----------------------------------------------------------------------------------


def test_t6_a_timeout_opens_the_breaker_at_once() -> None:
    clock = Clock()
    breaker = Breaker(pause_seconds=PAUSE, clock=clock)

    breaker.trip()

    assert breaker.is_open
    assert not breaker.allow()


def test_t6_calls_to_a_store_that_is_down_are_refused_without_asking_it() -> None:
    breaker = Breaker(pause_seconds=PAUSE, clock=Clock())
    store = FaultStore(MemoryStore())
    breaker.trip()

    with pytest.raises(StoreTimeoutError, match="FaultStore did not answer lately"):
        guarded(store, breaker).exists(OBJECTS)

    assert store.records == ()


def test_t6_after_the_pause_one_call_may_try_and_the_others_wait_for_its_outcome() -> None:
    clock = Clock()
    breaker = Breaker(pause_seconds=PAUSE, clock=clock)
    breaker.trip()
    clock.now += PAUSE

    assert not breaker.is_open
    assert [breaker.allow() for _ in range(3)] == [True, False, False]


def test_t6_an_answer_to_the_try_closes_the_breaker() -> None:
    clock = Clock()
    breaker = Breaker(pause_seconds=PAUSE, clock=clock)
    store = guarded(MemoryStore(), breaker)
    breaker.trip()
    clock.now += PAUSE

    assert store.exists(OBJECTS) == (False, False)
    assert store.exists(OBJECTS) == (False, False)
    assert not breaker.is_open


def test_t6_an_error_at_the_try_opens_the_breaker_again() -> None:
    clock = Clock()
    breaker = Breaker(pause_seconds=PAUSE, clock=clock)
    store = guarded(Echo(StoreError("still down")), breaker)
    breaker.trip()
    clock.now += PAUSE

    with pytest.raises(StoreError, match="still down"):
        store.exists(OBJECTS)

    assert breaker.is_open


def test_t6_a_try_that_hangs_lets_another_one_try_after_another_pause() -> None:
    clock = Clock()
    breaker = Breaker(pause_seconds=PAUSE, clock=clock)
    breaker.trip()
    clock.now += PAUSE
    assert breaker.allow()
    clock.now += PAUSE

    assert breaker.allow()


def test_t6_five_errors_in_a_row_open_the_breaker_and_an_answer_starts_the_count_anew() -> None:
    breaker = Breaker(pause_seconds=PAUSE, clock=Clock())
    store = Echo(StoreError("down"))
    asked = guarded(store, breaker)

    def fail(times: int) -> None:
        store.answer = StoreError("down")
        for _ in range(times):
            with pytest.raises(StoreError, match="down"):
                asked.exists(OBJECTS)

    fail(4)
    store.answer = [True, True]
    assert asked.exists(OBJECTS) == (True, True)
    fail(4)
    assert not breaker.is_open
    fail(1)

    assert breaker.is_open


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_t6_whatever_a_store_raises_counts_as_an_error(error: type[BaseException]) -> None:
    breaker = Breaker(pause_seconds=PAUSE, clock=Clock())
    store = guarded(FaultStore(MemoryStore(), [failing(error())]), breaker)

    for _ in range(5):
        with pytest.raises(error):
            store.exists(OBJECTS)

    assert breaker.is_open


@pytest.mark.parametrize("error", [DeviceCopyError, StalePoolError, TransferRevokedError])
def test_t6_what_pools_and_linker_fail_at_is_not_the_stores_fault(
    error: type[Exception],
) -> None:
    breaker = Breaker(pause_seconds=PAUSE, clock=Clock())
    store = guarded(FaultStore(MemoryStore(), [failing(error("gone"))]), breaker)

    for _ in range(9):
        with pytest.raises(error):
            store.exists(OBJECTS)

    assert not breaker.is_open


def test_t6_a_late_answer_does_not_close_the_breaker() -> None:
    clock = Clock()
    breaker = Breaker(pause_seconds=PAUSE, clock=clock)

    class Slow(Echo):
        def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
            breaker.trip()  # the caller's deadline passes meanwhile
            return super().exists(keys)

    assert guarded(Slow((True, True)), breaker).exists(OBJECTS) == (True, True)

    assert breaker.is_open


def failing(error: BaseException) -> Rule:
    return Rule(call=Call.EXISTS, fault=Raise(error=error))
