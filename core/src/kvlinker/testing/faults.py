"""Ways in which stores and devices go wrong, each seen in the field."""

from __future__ import annotations

import copy
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from kvlinker.errors import ContractError, StoreTimeoutError
from kvlinker.store import ObjectKey, ReadStatus, WriteStatus
from kvlinker.testing.altered_access import CopyingPart, FlippingAccess
from kvlinker.testing.gates import Gate
from kvlinker.testing.script import Answers, Call, Fault, FaultedCall, Landing

__all__ = [
    "AnswerNone",
    "CopyHalf",
    "Evict",
    "FlipBytes",
    "Hang",
    "LandLate",
    "Lie",
    "Miscount",
    "Moment",
    "Raise",
    "Report",
    "Slow",
    "Tamper",
    "TamperKind",
    "TamperableStore",
]

_ALL = frozenset(Call)
_COUNTED = frozenset({Call.EXISTS, Call.HOLD, Call.WRITE, Call.READ, Call.DELETE})
_MOVING = frozenset({Call.READ, Call.WRITE})
_COPIES = frozenset({Call.COPY_IN, Call.COPY_OUT})
_ABOUT_OBJECTS = frozenset({Call.EXISTS, Call.HOLD, Call.WRITE, Call.OPEN_READ, Call.READ})


class Moment(Enum):
    """When, during a call, something happens."""

    BEFORE = "before"
    BEFORE_PUBLISH = "before_publish"
    """In a write, when the bytes were copied and nothing is visible yet."""
    AFTER = "after"
    """The work is done, and the caller does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interruption(Fault):
    """Something that happens at a moment of any call."""

    moment: Moment = Moment.BEFORE

    @property
    def calls(self) -> frozenset[Call]:
        """See Fault."""
        return frozenset({Call.WRITE}) if self.moment is Moment.BEFORE_PUBLISH else _ALL

    @abstractmethod
    def interrupt(self) -> None:
        """Do it."""

    def prepare(self, call: FaultedCall, affected: frozenset[int]) -> None:
        """See Fault."""
        del affected
        ask = call.may_publish
        if self.moment is Moment.BEFORE_PUBLISH and ask is not None:

            def interrupted() -> bool:
                self.interrupt()
                return ask()

            call.may_publish = interrupted

    def around(
        self, call: FaultedCall, affected: frozenset[int], proceed: Callable[[], Answers]
    ) -> Answers:
        """See Fault."""
        del call, affected
        if self.moment is Moment.BEFORE:
            self.interrupt()
        answers = proceed()
        if self.moment is Moment.AFTER:
            self.interrupt()
        return answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise(_Interruption):
    """Raises; any exception there is, SystemExit and such included."""

    error: BaseException
    """A copy of it is raised each time, so that no traceback keeps the last one's frames alive."""

    def interrupt(self) -> None:
        """Raise a copy of the error."""
        raise copy.copy(self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang(_Interruption):
    """Hangs until its gate is opened."""

    gate: Gate

    def interrupt(self) -> None:
        """Wait at the gate."""
        self.gate.pass_through()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(_Interruption):
    """Takes its time."""

    seconds: float

    def interrupt(self) -> None:
        """Sleep."""
        time.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class AnswerNone(Fault):
    """Does its work and answers with None."""

    @property
    def calls(self) -> frozenset[Call]:
        """See Fault."""
        return _COUNTED | {Call.OPEN_READ, Call.CLEAR, Call.STATS}

    def around(
        self, call: FaultedCall, affected: frozenset[int], proceed: Callable[[], Answers]
    ) -> Answers:
        """See Fault."""
        del call, affected
        proceed()
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Miscount(Fault):
    """Answers with too many or too few items."""

    change: int
    """Items more (the last one repeated), or fewer where negative."""

    @property
    def calls(self) -> frozenset[Call]:
        """See Fault."""
        return _COUNTED

    def around(
        self, call: FaultedCall, affected: frozenset[int], proceed: Callable[[], Answers]
    ) -> Answers:
        """See Fault."""
        del call, affected
        answers = proceed()
        if not answers:
            return answers
        return answers[: self.change] if self.change < 0 else answers + answers[-1:] * self.change


@dataclass(frozen=True, slots=True, kw_only=True)
class Lie(Fault):
    """Says of objects that they exist, or that they do not, whatever is true."""

    exists: bool

    @property
    def calls(self) -> frozenset[Call]:
        """See Fault."""
        return frozenset({Call.EXISTS, Call.HOLD})

    def around(
        self, call: FaultedCall, affected: frozenset[int], proceed: Callable[[], Answers]
    ) -> Answers:
        """See Fault."""
        del call
        return _replaced(proceed(), affected, self.exists)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Fault):
    """Reports a status for objects: of a read or a write that failed in part, or that did not happen."""

    status: ReadStatus | WriteStatus
    done: bool = False
    """The work was done nevertheless; otherwise the objects are left out of the call."""

    @property
    def calls(self) -> frozenset[Call]:
        """See Fault."""
        return frozenset({Call.READ if isinstance(self.status, ReadStatus) else Call.WRITE})

    def prepare(self, call: FaultedCall, affected: frozenset[int]) -> None:
        """See Fault."""
        if not self.done:
            call.skip |= affected

    def around(
        self, call: FaultedCall, affected: frozenset[int], proceed: Callable[[], Answers]
    ) -> Answers:
        """See Fault."""
        del call
        return _replaced(proceed(), affected, self.status)


def _replaced(answers: Answers, affected: frozenset[int], item: object) -> Answers:
    if answers is None:
        return None
    return [item if number in affected else answer for number, answer in enumerate(answers)]


@dataclass(frozen=True, slots=True)
class FlipBytes(Fault):
    """Flips the first byte of every range on its way, where no checksum of the store can see it."""

    @property
    def calls(self) -> frozenset[Call]:
        """See Fault."""
        return _MOVING | _COPIES

    def prepare(self, call: FaultedCall, affected: frozenset[int]) -> None:
        """See Fault."""
        if call.memory is not None:
            rows = frozenset(call.rows[number] for number in affected)
            call.memory = FlippingAccess(call.memory, rows)


class TamperKind(Enum):
    """What a bad disk made of an object; a checksum can see all of it."""

    FLIP = "flip"
    """One byte changed."""
    SHORTEN = "shorten"
    """One byte lost."""
    LENGTHEN = "lengthen"
    """One byte more."""
    EMPTY = "empty"
    """Nothing left, and still there."""

    def apply(self, payload: bytes) -> bytes:
        """Return what is left of a payload."""
        match self:
            case TamperKind.FLIP:
                return bytes([payload[0] ^ 0xFF]) + payload[1:]
            case TamperKind.SHORTEN:
                return payload[:-1]
            case TamperKind.LENGTHEN:
                return payload + b"\0"
            case TamperKind.EMPTY:
                return b""


@runtime_checkable
class TamperableStore(Protocol):
    """A store whose objects a test can change behind its back, such as MemoryStore."""

    def payload(self, key: ObjectKey) -> bytes:
        """Return an object's bytes; KeyError if absent."""
        ...

    def tamper(self, key: ObjectKey, payload: bytes) -> None:
        """Replace an object's bytes and not its checksum; KeyError if absent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tamper(Fault):
    """Changes stored objects before the call, where the store's integrity check can see it."""

    kind: TamperKind = TamperKind.FLIP

    @property
    def calls(self) -> frozenset[Call]:
        """See Fault."""
        return _ABOUT_OBJECTS

    def prepare(self, call: FaultedCall, affected: frozenset[int]) -> None:
        """See Fault."""
        store = call.store
        if not isinstance(store, TamperableStore):
            msg = f"{type(store).__name__} cannot be tampered with; see TamperableStore"
            raise ContractError(msg)
        for number in affected:
            try:
                payload = store.payload(call.keys[number])
            except KeyError:
                continue
            store.tamper(call.keys[number], self.kind.apply(payload))


@dataclass(frozen=True, slots=True)
class Evict(Fault):
    """Removes objects before the call: what a lookup has promised may be gone at the load."""

    @property
    def calls(self) -> frozenset[Call]:
        """See Fault."""
        return _ABOUT_OBJECTS

    def prepare(self, call: FaultedCall, affected: frozenset[int]) -> None:
        """See Fault."""
        if call.store is not None and affected:
            call.store.delete([call.keys[number] for number in sorted(affected)])


@dataclass(frozen=True, slots=True, kw_only=True)
class LandLate(Fault):
    """Fails at once and does its work later, in another thread, when its gate is opened."""

    gate: Gate
    error: BaseException = field(default_factory=lambda: StoreTimeoutError("no answer in time"))

    @property
    def calls(self) -> frozenset[Call]:
        """See Fault."""
        return _MOVING

    def around(
        self, call: FaultedCall, affected: frozenset[int], proceed: Callable[[], Answers]
    ) -> Answers:
        """See Fault."""
        del affected
        call.landings.append(Landing(proceed, self.gate))
        raise copy.copy(self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyHalf(Fault):
    """Copies half of the pages, rounded down, and raises: pool memory is torn."""

    error: BaseException

    @property
    def calls(self) -> frozenset[Call]:
        """See Fault."""
        return _MOVING | _COPIES

    def prepare(self, call: FaultedCall, affected: frozenset[int]) -> None:
        """See Fault."""
        del affected
        if call.memory is not None:
            call.memory = CopyingPart(call.memory, self.error)
