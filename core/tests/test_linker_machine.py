"""The linker keeps its promises whatever is called in whatever order, and whatever goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from linker_model import CHAIN_PAGES, Engine, EngineOptions, opening_gate

from kvlinker.errors import StoreTimeoutError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing import (
    AnswerNone,
    Call,
    CopyHalf,
    Evict,
    Family,
    Fault,
    Gate,
    Hang,
    HostMemory,
    LandLate,
    Lie,
    Miscount,
    Moment,
    OpaqueMemory,
    Raise,
    Report,
    Rule,
    Tamper,
    TamperKind,
)

_ERRORS: tuple[BaseException, ...] = (
    OSError("disk"),
    StoreTimeoutError("no answer"),
    ValueError("odd"),
    SystemExit(3),
)
_OBJECT_CALLS = (Call.EXISTS, Call.HOLD, Call.WRITE, Call.OPEN_READ, Call.READ)
_STORE_CALLS = (*_OBJECT_CALLS, Call.RELEASE, Call.CLOSE_READ, Call.DELETE)
_ANSWERED = (Call.EXISTS, Call.HOLD, Call.WRITE, Call.READ, Call.DELETE)
_MOVING = (Call.READ, Call.WRITE)
_LOOKING = (Call.EXISTS, Call.HOLD)
_ENDS = (Moment.BEFORE, Moment.AFTER)
_READ_FAILURES = (ReadStatus.MISS, ReadStatus.FAILED, ReadStatus.CORRUPT)
_WRITE_STATUSES = (WriteStatus.FULL, WriteStatus.FAILED, WriteStatus.EXISTS)
Make = Callable[[Gate], Fault]
_KINDS: tuple[tuple[tuple[Call, Make], ...], ...] = (
    tuple(
        (call, partial(lambda error, moment, _: Raise(error=error, moment=moment), error, moment))
        for call, error, moment in product(_STORE_CALLS, _ERRORS, _ENDS)
    ),
    tuple(
        (call, partial(lambda moment, gate: Hang(gate=gate, moment=moment), moment))
        for call, moment in product(_STORE_CALLS, _ENDS)
    ),
    ((Call.WRITE, lambda gate: Hang(gate=gate, moment=Moment.BEFORE_PUBLISH)),),
    tuple((call, lambda _: AnswerNone()) for call in (*_ANSWERED, Call.OPEN_READ)),
    tuple(
        (call, partial(lambda change, _: Miscount(change=change), change))
        for call, change in product(_ANSWERED, (1, -1))
    ),
    tuple(
        (call, partial(lambda exists, _: Lie(exists=exists), exists))
        for call, exists in product(_LOOKING, (True, False))
    ),
    tuple(
        (Call.READ, partial(lambda status, _: Report(status=status), status))
        for status in _READ_FAILURES
    ),
    tuple(
        (Call.WRITE, partial(lambda status, _: Report(status=status), status))
        for status in _WRITE_STATUSES
    ),
    ((Call.READ, lambda _: Report(status=ReadStatus.OK)),),
    ((Call.WRITE, lambda _: Report(status=WriteStatus.WRITTEN)),),
    tuple((call, lambda _: Evict()) for call in _OBJECT_CALLS),
    tuple(
        (call, partial(lambda kind, _: Tamper(kind=kind), kind))
        for call, kind in product(_OBJECT_CALLS, TamperKind)
    ),
    tuple((call, lambda gate: LandLate(gate=gate)) for call in _MOVING),
    tuple((call, lambda _: CopyHalf(error=OSError("cable"))) for call in _MOVING),
)
"""Every fault at every call that it fits, kind by kind."""
_DEVICE_KINDS: list[Callable[[], Fault]] = [
    lambda: Raise(error=RuntimeError("device lost")),
    lambda: Raise(error=RuntimeError("device lost"), moment=Moment.AFTER),
    lambda: CopyHalf(error=RuntimeError("device lost")),
    lambda: Hang(gate=opening_gate(0.02)),
    lambda: Hang(gate=opening_gate(0.3), moment=Moment.AFTER),
]
_NUMBERS = st.integers(0, 5)
_STORE_FAULTS = st.tuples(
    st.sampled_from(_KINDS).flatmap(st.sampled_from),
    st.integers(1, 2),
    st.sampled_from((1.0, 0.5)),
)
_DEVICE_FAULTS = st.tuples(
    st.sampled_from(_DEVICE_KINDS),
    st.sampled_from((Call.COPY_IN, Call.COPY_OUT)),
    st.integers(1, 6),
)
_RIDS = st.sampled_from(("r1", "r2", "r3"))


class LinkerMachine(RuleBasedStateMachine):
    """Calls in random order, with faults; see Engine for what is checked.

    What is drawn never depends on what happened: threads and deadlines may decide differently next time.
    """

    engine: Engine
    drain: bool

    @initialize(
        family=st.sampled_from(Family),
        opaque=st.booleans(),
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        bounded=st.booleans(),
        seed=st.integers(0, 99),
        drain=st.booleans(),
        store_faults=st.lists(_STORE_FAULTS, min_size=1, max_size=5),
        device_faults=st.lists(_DEVICE_FAULTS, max_size=2),
    )
    def begin(
        self,
        *,
        family: Family,
        opaque: bool,
        flags: tuple[bool, bool, bool],
        bounded: bool,
        seed: int,
        drain: bool,
        store_faults: list[tuple[tuple[Call, Make], int, float]],
        device_faults: list[tuple[Callable[[], Fault], Call, int]],
    ) -> None:
        ranged, leases, atomic = flags
        self.drain = drain
        self.engine = Engine(
            EngineOptions(
                family=family,
                memory=OpaqueMemory() if opaque else HostMemory(),
                choices={
                    "ranged_reads": ranged,
                    "leases": leases,
                    "atomic_batches": atomic,
                },
                capacity_bytes=6000 if bounded else None,
                seed=seed,
            )
        )
        self.engine.offload(0, CHAIN_PAGES, 0)
        self.engine.offload(1, 2, 0)
        self.engine.drain()
        for store_fault in store_faults:
            self.break_store(store_fault)
        for device_fault in device_faults:
            self.break_device(device_fault)

    @rule(rid=_RIDS, chain=st.integers(0, 2), count=st.integers(1, CHAIN_PAGES))
    def lookup(self, rid: str, chain: int, count: int) -> None:
        self.engine.lookup(rid, chain, count)

    @rule(rid=_RIDS, choice=_NUMBERS)
    def load(self, rid: str, choice: int) -> None:
        self.engine.load(rid, choice)

    @rule(rid=_RIDS, chain=st.integers(0, 2), choice=_NUMBERS, kind=st.integers(0, 3))
    def look_load_and_start(self, rid: str, chain: int, choice: int, kind: int) -> None:
        self.engine.lookup(rid, chain, CHAIN_PAGES)
        self.engine.load(rid, choice)
        self.engine.start(kind)

    @rule(rid=_RIDS, chain=st.integers(0, 2), choice=_NUMBERS, layer=st.integers(0, 3))
    def serve(self, rid: str, chain: int, choice: int, layer: int) -> None:
        """Serve a request as an engine does when nothing goes wrong."""
        self.engine.lookup(rid, chain, CHAIN_PAGES)
        self.engine.load(rid, choice)
        self.engine.start(1)
        self.engine.wait(-2, layer)
        self.engine.finish(-2, ask_first=True)

    @rule(chain=st.integers(0, 2), count=st.integers(1, CHAIN_PAGES))
    def store(self, chain: int, count: int) -> None:
        """Store a prefix and free its pages as soon as that is allowed."""
        self.engine.offload(chain, count, 1)
        self.engine.drain_offloads()

    @rule(rid=_RIDS)
    def abort(self, rid: str) -> None:
        """Forget a request between lookup and load, and say nothing, as engines do."""
        self.engine.books.lookups.pop(rid, None)

    @rule(rid=_RIDS, chain=st.integers(0, 2), choice=_NUMBERS)
    def look_load_and_cancel(self, rid: str, chain: int, choice: int) -> None:
        self.engine.lookup(rid, chain, CHAIN_PAGES)
        self.engine.load(rid, choice)
        self.engine.cancel(rid)

    @rule(rid=_RIDS)
    def cancel(self, rid: str) -> None:
        self.engine.cancel(rid)

    @rule(kind=st.integers(0, 3))
    def start(self, kind: int) -> None:
        self.engine.start(kind)

    @rule(choice=_NUMBERS, layer=st.integers(0, 3))
    def wait(self, choice: int, layer: int) -> None:
        self.engine.wait(choice, layer)

    @rule(choice=_NUMBERS, ask_first=st.booleans())
    def finish(self, choice: int, *, ask_first: bool) -> None:
        self.engine.finish(choice, ask_first=ask_first)

    @rule(chain=st.integers(0, 2), count=st.integers(1, CHAIN_PAGES), kind=st.integers(0, 3))
    def offload(self, chain: int, count: int, kind: int) -> None:
        self.engine.offload(chain, count, kind)

    @rule()
    def take_completions(self) -> None:
        self.engine.take_completions()

    @rule()
    def set_events(self) -> None:
        self.engine.set_events()

    @rule()
    def open_gates(self) -> None:
        self.engine.open_gates()

    @rule(choice=_NUMBERS)
    def ask_nonsense(self, choice: int) -> None:
        self.engine.ask_nonsense(choice)

    @rule(fault=_STORE_FAULTS)
    def break_store(self, fault: tuple[tuple[Call, Make], int, float]) -> None:
        (call, make), first, share = fault
        gate = Gate()
        self.engine.gates.append(gate)
        happens = Rule(call=call, fault=make(gate), first=first, times=1, share=share)
        self.engine.store.script.add(happens)

    @rule(fault=_DEVICE_FAULTS)
    def break_device(self, fault: tuple[Callable[[], Fault], Call, int]) -> None:
        make, call, first = fault
        happens = Rule(call=call, fault=make(), first=first, times=1)
        self.engine.access.script.add(happens)

    @rule()
    def heal(self) -> None:
        self.engine.store.script.clear()
        self.engine.access.script.clear()

    @rule(chain=st.integers(0, 2), dice=st.integers(1, 4))
    def lose_objects(self, chain: int, dice: int) -> None:
        """Lose the store's content now and then; somebody stores something again."""
        if dice == 4:
            self.engine.lose_objects()
            self.store(chain, CHAIN_PAGES)

    @rule(chain=st.integers(0, 2), count=st.integers(1, CHAIN_PAGES), dice=st.integers(1, 4))
    def offload_and_reset(self, chain: int, count: int, dice: int) -> None:
        if dice == 4:
            self.engine.offload_and_reset(chain, count)

    @rule(dice=st.integers(1, 4))
    def reset(self, dice: int) -> None:
        if dice == 4:
            self.engine.reset()

    @rule(dice=st.integers(1, 20))
    def close(self, dice: int) -> None:
        if dice == 20:
            self.engine.close()

    @invariant()
    def promises_hold(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        self.engine.end(drain=self.drain and not self.engine.closed)


TestLinkerMachine = LinkerMachine.TestCase
TestLinkerMachine.settings = settings(stateful_step_count=30)


@pytest.mark.parametrize("memory", [HostMemory, OpaqueMemory])
@pytest.mark.parametrize("ranged_reads", [True, False])
@pytest.mark.parametrize("family", Family)
def test_without_faults_everything_promised_lands(
    family: Family, memory: type[HostMemory | OpaqueMemory], *, ranged_reads: bool
) -> None:
    engine = Engine(
        EngineOptions(
            family=family,
            memory=memory(),
            choices={"ranged_reads": ranged_reads},
            load_seconds=60.0,
        )
    )
    for count in range(1, CHAIN_PAGES + 1):
        engine.offload(0, count, 1)
        engine.drain()

    boundaries = engine.lookup("r1", 0, CHAIN_PAGES)
    engine.load("r1", CHAIN_PAGES - 1)
    engine.lookup("r2", 0, 2)
    engine.load("r2", 0)
    engine.start(2)
    engine.check()
    engine.set_events()
    engine.wait(0, 3)
    landed = engine.finish(0, ask_first=True)
    engine.check()
    engine.end(drain=True)

    assert boundaries == list(range(1, CHAIN_PAGES + 1))
    assert landed
    assert engine.books.completed == CHAIN_PAGES
