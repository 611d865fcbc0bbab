"""A self-test finds out what a store cannot do, whichever step fails, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from linker_rig import threads_named, wait_for

from kvlinker.device import DeviceAccess
from kvlinker.errors import RegistrationError, StoreError
from kvlinker.keys import KeyNamespace
from kvlinker.selftest import SelfTestReport, run_self_test, self_test
from kvlinker.store import ReadStatus, StoreCapabilities, WriteBatch, WriteStatus
from kvlinker.testing import (
    AnswerNone,
    Call,
    FaultStore,
    FlipBytes,
    Gate,
    Hang,
    Lie,
    MemoryStore,
    Miscount,
    Raise,
    Report,
    Rule,
    Tamper,
)

STEPS = ["capabilities", "put", "exists", "ranged get", "whole get", "delete"]


def names(store: FaultStore | MemoryStore) -> list[str]:
    return [step.name for step in self_test(store).steps]


def test_t5_a_store_that_works_passes_step_by_step_and_keeps_nothing() -> None:
    store = MemoryStore()

    report = self_test(store)

    assert report.has_passed
    assert report.store == "MemoryStore"
    assert [step.name for step in report.steps] == STEPS
    assert all(step.seconds >= 0 for step in report.steps)
    assert store.keys() == ()
    assert store.kept() == 0
    report.check()
    run_self_test(store)


def test_t5_a_store_is_asked_only_for_what_it_says_it_can_do() -> None:
    whole, ranged = MemoryStore(ranged_reads=False), MemoryStore(whole_reads=False)

    assert names(whole) == ["capabilities", "put", "exists", "whole get", "delete"]
    assert names(ranged) == ["capabilities", "put", "exists", "ranged get", "delete"]


def test_t5_a_store_that_registers_memory_gets_the_tests_own_and_forgets_it() -> None:
    store = FaultStore(MemoryStore(registers_memory=True))

    report = self_test(store)

    assert report.has_passed
    assert [step.name for step in report.steps] == [
        "capabilities",
        "register",
        *STEPS[1:],
        "unregister",
    ]
    assert store.count(Call.UNREGISTER) == 1


def test_t5_the_object_is_in_a_namespace_of_its_own_and_no_two_tests_share_a_key() -> None:
    store = FaultStore(MemoryStore())
    run_self_test(store)
    run_self_test(store)

    written = {key for record in store.records if record.call is Call.WRITE for key in record.keys}

    own = KeyNamespace(model_id="kvlinker self-test", producer="kvlinker").digest
    assert len(written) == 2
    assert {key[:12] for key in written} == {own}


def test_t5_a_store_without_room_is_named_with_what_it_has_taken_of_what() -> None:
    store = FaultStore(
        MemoryStore(capacity_bytes=4096),
        [Rule(call=Call.WRITE, fault=Report(status=WriteStatus.FULL))],
    )

    with pytest.raises(
        StoreError, match=r"no room for an object of 1024 B, with 0 of 4096 B taken"
    ):
        run_self_test(store)


FAILING: dict[str, tuple[Rule, str, str]] = {
    "put raises": (
        Rule(call=Call.WRITE, fault=Raise(error=OSError("disk"))),
        "put",
        "OSError: disk",
    ),
    "put exits": (Rule(call=Call.WRITE, fault=Raise(error=SystemExit(3))), "put", "SystemExit: 3"),
    "put is none": (Rule(call=Call.WRITE, fault=AnswerNone()), "put", "got NoneType"),
    "put is full": (
        Rule(call=Call.WRITE, fault=Report(status=WriteStatus.FULL)),
        "put",
        "StoreFullError: no room for an object of 1024 B, with 0 B taken; free space where the store keeps its objects",
    ),
    "put knows it already": (
        Rule(call=Call.WRITE, fault=Report(status=WriteStatus.EXISTS, done=True)),
        "put",
        "StoreContractError: answered exists",
    ),
    "put forgets": (
        Rule(call=Call.WRITE, fault=Report(status=WriteStatus.WRITTEN)),
        "exists",
        "exists says False, expected True",
    ),
    "exists raises": (
        Rule(call=Call.EXISTS, fault=Raise(error=OSError("down")), times=1),
        "exists",
        "OSError: down",
    ),
    "exists lies": (
        Rule(call=Call.EXISTS, fault=Lie(exists=False), times=1),
        "exists",
        "exists says False, expected True",
    ),
    "exists counts wrong": (
        Rule(call=Call.EXISTS, fault=Miscount(change=1), times=1),
        "exists",
        "must answer with 1 booleans",
    ),
    "open fails": (
        Rule(call=Call.OPEN_READ, fault=Raise(error=OSError("gone"))),
        "ranged get",
        "OSError: gone",
    ),
    "second layer fails": (
        Rule(call=Call.READ, fault=Report(status=ReadStatus.FAILED), first=2),
        "ranged get",
        "answered failed; what the store has logged says why",
    ),
    "ranged bytes are wrong": (
        Rule(call=Call.READ, fault=FlipBytes(), times=1),
        "ranged get",
        "read other bytes than written",
    ),
    "whole bytes are wrong": (
        Rule(call=Call.READ, fault=FlipBytes(), first=3),
        "whole get",
        "read other bytes than written",
    ),
    "whole object is corrupt": (
        Rule(call=Call.READ, fault=Tamper(), first=3),
        "whole get",
        "answered corrupt",
    ),
    "nothing is read": (
        Rule(call=Call.READ, fault=Report(status=ReadStatus.OK)),
        "ranged get",
        "read other bytes than written",
    ),
    "close fails": (
        Rule(call=Call.CLOSE_READ, fault=Raise(error=OSError("close")), first=2),
        "whole get",
        "OSError: close",
    ),
    "delete raises": (
        Rule(call=Call.DELETE, fault=Raise(error=OSError("read-only"))),
        "delete",
        "OSError: read-only",
    ),
    "delete does nothing": (
        Rule(call=Call.EXISTS, fault=Lie(exists=True), first=2),
        "delete",
        "exists says True, expected False",
    ),
}


@pytest.mark.parametrize(
    ("rule", "step", "problem"),
    FAILING.values(),
    ids=[name.replace(" ", "-") for name in FAILING],
)
def test_t5_b110_a_store_that_fails_at_a_step_is_told_by_that_step(
    rule: Rule, step: str, problem: str
) -> None:
    store = FaultStore(MemoryStore(), [rule])

    report = self_test(store)

    assert not report.has_passed
    assert report.problems[0].name == step
    assert problem in report.problems[0].problem
    with pytest.raises(StoreError, match=f"FaultStore: the self-test failed at '{step}'"):
        report.check()


@pytest.mark.parametrize("rule", [rule for rule, step, _ in FAILING.values() if step != "delete"])
def test_t5_b110_a_test_that_failed_leaves_nothing_behind(rule: Rule) -> None:
    inner = MemoryStore()
    store = FaultStore(inner, [rule])

    with pytest.raises(StoreError):
        run_self_test(store)

    assert inner.keys() == ()
    assert store.records[-1].call in {Call.DELETE, Call.EXISTS}


def test_t5_a_store_that_publishes_without_asking_is_found_out() -> None:
    class Eager(MemoryStore):
        def write(
            self,
            batches: Sequence[WriteBatch],
            memory: DeviceAccess,
            *,
            may_publish: Callable[[], bool],
        ) -> tuple[tuple[WriteStatus, ...], ...]:
            del may_publish
            return super().write(batches, memory, may_publish=lambda: True)

    (problem,) = self_test(Eager()).problems

    assert problem.name == "put"
    assert "published without asking" in problem.problem


def test_t5_a_store_that_cannot_say_what_it_can_do_is_found_out() -> None:
    class Broken(MemoryStore):
        @property
        def capabilities(self) -> StoreCapabilities:
            msg = "no client"
            raise StoreError(msg)

    report = self_test(Broken())

    assert [(step.name, step.problem) for step in report.steps] == [
        ("capabilities", "StoreError: no client")
    ]


def test_t5_b110_a_registration_that_fails_ends_the_test_before_anything_is_written() -> None:
    error = RegistrationError("no such device")
    rule = Rule(call=Call.REGISTER, fault=Raise(error=error))
    store = FaultStore(MemoryStore(registers_memory=True), [rule])

    report = self_test(store)

    assert [step.name for step in report.steps] == ["capabilities", "register", "unregister"]
    assert [step.problem for step in report.problems] == ["RegistrationError: no such device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HungTest:
    """A self-test of a store that hung in a call, and goes on by now."""

    inner: MemoryStore
    report: SelfTestReport
    has_hung: bool
    """Whether it came to that call before its time was over."""


def hung_in(call: Call, *, seconds: float) -> HungTest:
    inner = MemoryStore()
    with Gate() as gate:
        store = FaultStore(inner, [Rule(call=call, fault=Hang(gate=gate))])
        report = self_test(store, seconds=seconds)
        return HungTest(inner=inner, report=report, has_hung=gate.arrived > 0)


def test_t6_a_store_that_hangs_is_a_finding_and_cleans_up_when_it_comes_back() -> None:
    seconds = 0.05
    test = hung_in(Call.OPEN_READ, seconds=seconds)
    if not test.has_hung:  # a machine that is too busy for that
        seconds = 10
        test = hung_in(Call.OPEN_READ, seconds=seconds)

    steps = [step.name for step in test.report.steps]
    assert steps == ["capabilities", "put", "exists", "ranged get"]
    assert test.report.problems[0].problem == f"no answer within {seconds} s"
    wait_for(lambda: not threads_named("kvlinker-self-test"), "the end of the test's thread")
    assert test.inner.keys() == ()
