"""Rules happen at the calls that they name, drawn from a seed; gates and events do what a test says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvlinker.errors import (
    ContractError,
)
from kvlinker.store import (
    ReadStatus,
    Store,
    WriteStatus,
)
from kvlinker.testing import (
    AnswerNone,
    Answers,
    Call,
    Fault,
    FaultedCall,
    FaultStore,
    FlipBytes,
    Gate,
    HostEvent,
    LandLate,
    Lie,
    MemoryStore,
    Miscount,
    Moment,
    Raise,
    Report,
    Rule,
    page_keys,
)

KEYS = page_keys(8)
PAGE = 640
OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
WRITTEN, FAILED = WriteStatus.WRITTEN, WriteStatus.FAILED


def fired_at(rule: Rule, calls: int = 12, seed: int = 0) -> list[int]:
    """Numbers of the calls of `exists` that raised."""
    store = FaultStore(MemoryStore(), [rule], seed=seed)
    fired = []
    for number in range(1, calls + 1):
        try:
            store.exists(KEYS[:1])
        except OSError:
            fired.append(number)
    return fired


BOOM = Raise(error=OSError("boom"))


def test_b75_every_third_call_fails() -> None:
    assert fired_at(Rule(call=Call.EXISTS, fault=BOOM, first=3, every=3)) == [3, 6, 9, 12]


def test_a_rule_happens_from_its_first_call_on_and_so_often() -> None:
    assert fired_at(Rule(call=Call.EXISTS, fault=BOOM, first=5, times=2)) == [5, 6]
    assert fired_at(Rule(call=Call.EXISTS, fault=BOOM, times=0)) == []
    assert fired_at(Rule(call=Call.EXISTS, fault=BOOM)) == list(range(1, 13))


def test_chances_follow_from_the_seed_alone() -> None:
    rule = Rule(call=Call.EXISTS, fault=BOOM, chance=0.5)

    runs = [fired_at(rule, calls=40, seed=seed) for seed in (1, 1, 2)]

    assert runs[0] == runs[1] != runs[2]
    assert 5 < len(runs[0]) < 35
    assert fired_at(Rule(call=Call.EXISTS, fault=BOOM, chance=0.0)) == []


def test_a_rule_of_keys_counts_only_calls_about_them() -> None:
    keys = frozenset({KEYS[5]})
    store = FaultStore(MemoryStore(), [Rule(call=Call.EXISTS, fault=BOOM, keys=keys, first=2)])

    store.exists(KEYS[:4])
    store.exists(KEYS)
    store.exists(KEYS[:4])
    with pytest.raises(OSError, match="boom"):
        store.exists(KEYS[5:])


def test_several_faults_of_one_call_add_up() -> None:
    rules = [
        Rule(call=Call.EXISTS, fault=Miscount(change=1)),
        Rule(call=Call.EXISTS, fault=Lie(exists=True)),
    ]

    assert FaultStore(MemoryStore(), rules).exists(KEYS[:2]) == (True, True, True)


@pytest.mark.parametrize("outer", [Miscount(change=1), Lie(exists=True)])
def test_what_answers_none_has_no_items_to_change(outer: Fault) -> None:
    rules = [Rule(call=Call.EXISTS, fault=outer), Rule(call=Call.EXISTS, fault=AnswerNone())]
    store = FaultStore(MemoryStore(), rules)

    answer: object = store.exists(KEYS[:2])

    assert answer is None
    assert len(store.script.fired) == 2


def test_rules_can_come_and_go() -> None:
    store = FaultStore(MemoryStore(), [Rule(call=Call.EXISTS, fault=BOOM)])

    store.script.clear()
    quiet = store.exists(KEYS[:1])
    store.script.add(Rule(call=Call.EXISTS, fault=BOOM))
    with pytest.raises(OSError, match="boom"):
        store.exists(KEYS[:1])

    assert quiet == (False,)
    assert store.script.times_fired(Raise) == 1


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (Call.EXISTS, FlipBytes()),
        (Call.READ, Report(status=WRITTEN)),
        (Call.CLOSE, Miscount(change=1)),
        (Call.READ, Raise(error=OSError(), moment=Moment.BEFORE_PUBLISH)),
        (Call.COPY_IN, LandLate(gate=Gate())),
        (Call.WRITE, Lie(exists=True)),
    ],
)
def test_a_fault_that_would_do_nothing_is_refused(call: Call, fault: Fault) -> None:
    with pytest.raises(ContractError, match=f"does nothing to {call.value}"):
        Rule(call=call, fault=fault)


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)])
def test_calls_are_counted_from_one(numbers: tuple[int, int]) -> None:
    with pytest.raises(ContractError, match="counted from 1"):
        Rule(call=Call.EXISTS, fault=BOOM, first=numbers[0], every=numbers[1])


class Shout(Fault):
    """A fault of a third party: it answers True for everything, twice."""

    @property
    def calls(self) -> frozenset[Call]:
        return frozenset({Call.EXISTS})

    def around(
        self, call: FaultedCall, affected: frozenset[int], proceed: Callable[[], Answers]
    ) -> Answers:
        del call, affected
        answers: list[object] = [True for _ in proceed() or []]
        return answers * 2


def test_a_fault_of_ones_own() -> None:
    store = FaultStore(MemoryStore(), [Rule(call=Call.EXISTS, fault=Shout())])

    assert store.exists(KEYS[6:]) == (True,) * 4


def test_a_gate_that_nobody_opens_fails_the_test_and_does_not_hang() -> None:
    gate = Gate(limit_seconds=0.01)

    with pytest.raises(TimeoutError, match="nobody opened the gate within"):
        gate.pass_through()
    with pytest.raises(TimeoutError, match="1 of 2 came to the gate"):
        gate.wait_for_arrivals(2)

    assert (gate.arrived, gate.is_open) == (1, False)


def test_a_gate_opens_closes_and_opens_at_the_end_of_its_block() -> None:
    with Gate(limit_seconds=0.01) as gate:
        gate.open()
        gate.pass_through()
        gate.close()
        with pytest.raises(TimeoutError):
            gate.pass_through()

    gate.pass_through()
    assert gate.is_open


def test_events_are_reached_when_the_test_says_so() -> None:
    event, done = HostEvent(), HostEvent(done=True)
    broken = HostEvent(error=RuntimeError("device lost"))

    before = event.query()
    event.set()

    assert (before, event.query(), done.query()) == (False, True, True)
    assert event.queries == 2
    with pytest.raises(RuntimeError, match="device lost"):
        broken.query()


def test_a_fault_store_is_a_store() -> None:
    assert isinstance(FaultStore(MemoryStore()), Store)
