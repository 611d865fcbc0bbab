"""A fault script says which calls go wrong, in which way, and remembers which did."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from kvlinker.device import DeviceAccess
from kvlinker.errors import ContractError
from kvlinker.store import ObjectKey, Store
from kvlinker.testing.gates import Gate

__all__ = ["Answers", "Call", "Fault", "FaultScript", "FaultedCall", "Landing", "Rule"]

Answers: TypeAlias = list[object] | None
"""What a call answers, one item per object; None where it answers with None instead."""


class Call(Enum):
    """A call that can go wrong."""

    EXISTS = "exists"
    HOLD = "hold"
    RELEASE = "release"
    """Of a hold."""
    WRITE = "write"
    OPEN_READ = "open_read"
    READ = "read"
    CLOSE_READ = "close_read"
    """Of a read session."""
    DELETE = "delete"
    CLEAR = "clear"
    STATS = "stats"
    REGISTER = "register"
    UNREGISTER = "unregister"
    CLOSE = "close"
    COPY_IN = "copy_in"
    """Of a device access: host to pool memory."""
    COPY_OUT = "copy_out"
    """Of a device access: pool memory to host."""


class Landing:
    """A call that went on after its caller was told that it had failed."""

    def __init__(self, proceed: Callable[[], Answers], gate: Gate) -> None:
        """Start a thread that proceeds once the gate opens."""
        self._proceed = proceed
        self._gate = gate
        self._lock = threading.Lock()
        self._afterwards: list[Callable[[], None]] = []
        self._ended = False
        self.answers: Answers = None
        """What the call answered to nobody."""
        self.error: BaseException | None = None
        """What it raised, such as TransferRevokedError where the caller had taken its permission back."""
        self._thread = threading.Thread(target=self._run, name="late-landing", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._gate.pass_through()
            self.answers = self._proceed()
        except BaseException as error:  # noqa: BLE001 - kept for the test to look at
            self.error = error
        with self._lock:
            self._ended = True
            afterwards = tuple(self._afterwards)
        for run in afterwards:
            run()

    def afterwards(self, run: Callable[[], None]) -> None:
        """Run something once the call has ended, at once if it has."""
        with self._lock:
            if not self._ended:
                self._afterwards.append(run)
                return
        run()

    def join(self, *, seconds: float = 30.0) -> None:
        """Wait for the end; TimeoutError if it does not come."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            msg = f"the late call did not end within {seconds} s; was its gate opened?"
            raise TimeoutError(msg)


@dataclass(slots=True, kw_only=True, eq=False)
class FaultedCall:
    """One call on its way to what is wrapped; faults change it or what it answers."""

    call: Call
    pool: str = ""
    """Pool of the plan; empty where the call names none."""
    keys: tuple[ObjectKey, ...] = ()
    """Objects that the call is about, over all batches; empty for a device access."""
    count: int = 0
    """Items that a right answer has."""
    rows: tuple[tuple[str, int], ...] = ()
    """Pool and first pool row of each item's page, where the call moves pages."""
    store: Store | None = None
    """What is wrapped, where that is a store."""
    memory: DeviceAccess | None = None
    """Access that is handed on, where the call moves pages; a fault may replace it."""
    may_publish: Callable[[], bool] | None = None
    """Question that a write asks before it publishes; a fault may replace it."""
    skip: set[int] = field(default_factory=set)
    """Items that the wrapped store is not asked for."""
    landings: list[Landing] = field(default_factory=list)
    """Calls that go on in the background."""


class Fault(ABC):
    """One way in which a call goes wrong; a test may write its own."""

    @property
    @abstractmethod
    def calls(self) -> frozenset[Call]:
        """Calls that it changes; a rule for another call is refused, for it would test nothing."""

    def prepare(self, call: FaultedCall, affected: frozenset[int]) -> None:
        """Change what is handed on.

        Args:
            call: the call.
            affected: numbers of its items that the rule chose.
        """
        del call, affected

    def around(
        self, call: FaultedCall, affected: frozenset[int], proceed: Callable[[], Answers]
    ) -> Answers:
        """Return what is answered; `proceed` makes the call."""
        del call, affected
        return proceed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When a fault happens: at which calls, and to which of their items."""

    call: Call
    fault: Fault
    first: int = 1
    """Number of the first call that it happens at, among those that fit the rule; from 1."""
    every: int = 1
    """From there on, every so many calls."""
    times: int | None = None
    """At most so often; None without end."""
    chance: float = 1.0
    """Probability at each of those calls, from the script's seed."""
    pool: str | None = None
    """Only calls about this pool."""
    keys: frozenset[ObjectKey] | None = None
    """Only calls about one of these objects, and only to these."""
    positions: frozenset[int] | None = None
    """Only to the items with these numbers within the call."""
    share: float = 1.0
    """Probability of each of those items, from the script's seed."""

    def __post_init__(self) -> None:
        if self.call not in self.fault.calls:
            fitting = sorted(call.value for call in self.fault.calls)
            msg = (
                f"{type(self.fault).__name__} does nothing to {self.call.value}; it fits {fitting}"
            )
            raise ContractError(msg)
        if self.first < 1 or self.every < 1:
            msg = f"calls are counted from 1, got first {self.first} and every {self.every}"
            raise ContractError(msg)

    def fits(self, call: FaultedCall) -> bool:
        """Return whether the rule is about such a call."""
        return (
            self.call is call.call
            and self.pool in (None, call.pool)
            and (self.keys is None or not self.keys.isdisjoint(call.keys))
        )

    def chooses(self, call: FaultedCall, number: int) -> bool:
        """Return whether the rule is about that item of the call."""
        if self.positions is not None and number not in self.positions:
            return False
        return self.keys is None or call.keys[number] in self.keys


class _Turn:
    """How often a rule's calls came, and how often it happened."""

    def __init__(self, rule: Rule, seed: str) -> None:
        self.rule = rule
        self.calls = 0
        self.fired = 0
        # A generator of its own, so that other calls do not change its choices.
        self._random = random.Random(seed)  # noqa: S311 - chooses faults, not secrets

    def is_due(self, call: FaultedCall) -> bool:
        rule = self.rule
        if not rule.fits(call):
            return False
        self.calls += 1
        waited = self.calls - rule.first
        if waited < 0 or waited % rule.every or self.fired == rule.times:
            return False
        if rule.chance < 1.0 and self._random.random() >= rule.chance:
            return False
        self.fired += 1
        return True

    def affected(self, call: FaultedCall) -> frozenset[int]:
        """Return the numbers of the items that it happens to."""
        share = self.rule.share
        return frozenset(
            number
            for number in range(call.count)
            if self.rule.chooses(call, number) and (share >= 1.0 or self._random.random() < share)
        )


class FaultScript:
    """Rules, counted and drawn from a seed, so that the same calls meet the same faults again."""

    def __init__(self, rules: Iterable[Rule] = (), *, seed: int = 0) -> None:
        """Keep the rules; more can be added at any time."""
        self._seed = seed
        self._lock = threading.Lock()
        self._turns: list[_Turn] = []
        self._fired: list[Rule] = []
        self.add(*rules)

    def add(self, *rules: Rule) -> None:
        """Add rules; each counts calls from now on."""
        with self._lock:
            for rule in rules:
                self._turns.append(_Turn(rule, f"{self._seed}/{len(self._turns)}"))

    def clear(self) -> None:
        """Forget all rules; what happened stays remembered."""
        with self._lock:
            self._turns.clear()

    @property
    def fired(self) -> tuple[Rule, ...]:
        """The rules that happened, in order, once for each time."""
        with self._lock:
            return tuple(self._fired)

    def times_fired(self, kind: type[Fault]) -> int:
        """Return how often faults of a kind happened: a test that expects one asserts that it did."""
        return sum(isinstance(rule.fault, kind) for rule in self.fired)

    def run(self, call: FaultedCall, make: Callable[[], Answers]) -> Answers:
        """Make a call with the faults that are due; the first rule is the outermost."""
        with self._lock:
            due = [turn for turn in self._turns if turn.is_due(call)]
            self._fired.extend(turn.rule for turn in due)
            chosen = [(turn.rule.fault, turn.affected(call)) for turn in due]
        for fault, affected in chosen:
            fault.prepare(call, affected)
        return _nested(call, chosen, make)


def _nested(
    call: FaultedCall,
    chosen: Sequence[tuple[Fault, frozenset[int]]],
    make: Callable[[], Answers],
) -> Answers:
    if not chosen:
        return make()
    fault, affected = chosen[0]
    return fault.around(call, affected, lambda: _nested(call, chosen[1:], make))
