"""A guarded store checks every answer and stops asking a store that is down.

Deadlines are kept by whoever waits; they tell the breaker, so that a dead server costs one timeout, not one per call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvlinker.device import DeviceAccess
from kvlinker.errors import (
    DeviceCopyError,
    StalePoolError,
    StoreContractError,
    StoreTimeoutError,
    TransferRevokedError,
)
from kvlinker.plans import TransferPlan
from kvlinker.store import (
    Hold,
    ObjectKey,
    ReadRequest,
    ReadSession,
    ReadStatus,
    Store,
    StoreCapabilities,
    WriteBatch,
    WriteStatus,
)

__all__ = [
    "Breaker",
    "BreakerOpenError",
    "GuardedStore",
    "checked_flags",
    "checked_hold",
    "checked_read",
    "checked_write",
]

_T = TypeVar("_T")
_ERRORS_TO_OPEN = 5
"""Failed calls in a row after which a store is taken for down; one timeout is enough."""


class BreakerOpenError(StoreTimeoutError):
    """The store is down and was not asked; what was found out about it was reported before."""


class Breaker:
    """Open after a timeout or several errors in a row; lets one call try after a pause."""

    def __init__(
        self, *, pause_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Make a closed breaker that stays open for `pause_seconds` once it opens."""
        self._pause = pause_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._errors = 0
        self._open_until: float | None = None
        self.timeouts = 0
        """Timeouts noted so far: a call tells by it whether it was given up meanwhile."""

    @property
    def is_open(self) -> bool:
        """Whether calls are refused now."""
        until = self._open_until
        return until is not None and self._clock() < until

    def allow(self) -> bool:
        """Return whether a call may be made; after the pause one caller may try."""
        with self._lock:
            if self._open_until is None:
                return True
            if self._clock() < self._open_until:
                return False
            # The others stay refused until the trial has an outcome.
            self._open_until = self._clock() + self._pause
            return True

    def succeed(self, *, timeouts: int) -> None:
        """Note an answer: the store is up, unless somebody timed out since the call was made.

        Args:
            timeouts: as they were then. A late answer would let the next caller run into the same wait.
        """
        with self._lock:
            if timeouts == self.timeouts:
                self._errors = 0
                self._open_until = None

    def fail(self) -> None:
        """Note an error; the breaker opens after several in a row."""
        with self._lock:
            self._errors += 1
            if self._errors >= _ERRORS_TO_OPEN or self._open_until is not None:
                self._open_until = self._clock() + self._pause

    def trip(self) -> None:
        """Note a timeout: open at once."""
        with self._lock:
            self.timeouts += 1
            self._open_until = self._clock() + self._pause


class GuardedStore:
    """A store behind a breaker, whose answers have the right type and count or are refused."""

    def __init__(self, store: Store, breaker: Breaker) -> None:
        """Guard a store; the breaker is shared by all its callers."""
        self.name = type(store).__name__
        self.capabilities: StoreCapabilities = store.capabilities
        # What moves device memory itself cannot be stopped by a refused copy.
        self.is_revocable = self.capabilities.revocable and not self.capabilities.device_memory
        self.breaker = breaker
        self._store = store

    def _call(self, ask: Callable[[], _T]) -> _T:
        if not self.breaker.allow():
            msg = f"{self.name} did not answer lately and is not asked again yet"
            raise BreakerOpenError(msg)
        timeouts = self.breaker.timeouts
        try:
            answer = ask()
        except (DeviceCopyError, StalePoolError, TransferRevokedError):
            raise  # the pools or the linker stopped the call; the store is not to blame
        except BaseException:
            self.breaker.fail()
            raise
        self.breaker.succeed(timeouts=timeouts)
        return answer

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Return one hint per key; only a true `True` counts as one."""
        answer: object = self._call(lambda: self._store.exists(keys))
        return checked_flags(self.name, "exists", answer, len(keys))

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> tuple[Hold, tuple[bool, ...]]:
        """Hold the keys; return the hold and which of them exist.

        Raises:
            StoreContractError: the counts differ; the hold was released.
        """
        hold = self._call(lambda: self._store.hold(keys, seconds=seconds))
        return hold, checked_hold(self.name, hold, len(keys))

    def open_read(self, request: ReadRequest) -> ReadSession:
        """Open a read; the session's answers are to be checked by `checked_read`."""
        session: object = self._call(lambda: self._store.open_read(request))
        if not isinstance(session, ReadSession):
            raise _wrong(self.name, "open_read", "a ReadSession", session)
        return session

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """Write the batches; one status per object in their shape."""
        answer: object = self._call(
            lambda: self._store.write(batches, memory, may_publish=may_publish)
        )
        return checked_write(self.name, answer, batches)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects; what the store says about each is not needed."""
        self._call(lambda: self._store.delete(keys))


def checked_read(
    name: str, session: ReadSession, plan: TransferPlan, memory: DeviceAccess
) -> tuple[ReadStatus, ...]:
    """Read the plan; one status per object.

    Raises:
        StoreContractError: the store answered with something else.
    """
    answer: object = session.read(plan, memory)
    return _statuses(name, f"read of pool {plan.pool!r}", answer, plan.num_pages, ReadStatus)


def checked_write(
    name: str, answer: object, batches: Sequence[WriteBatch]
) -> tuple[tuple[WriteStatus, ...], ...]:
    """Return what a store answers to a write.

    Raises:
        StoreContractError: it is something else than a status for each object, in the shape of the batches.
    """
    if not isinstance(answer, Sequence) or len(answer) != len(batches):
        raise _wrong(name, "write", f"{len(batches)} batches of statuses", answer)
    return tuple(
        _statuses(name, "write", item, len(batch.keys), WriteStatus)
        for item, batch in zip(answer, batches, strict=True)
    )


_Status = TypeVar("_Status", ReadStatus, WriteStatus)


def _statuses(
    name: str, call: str, answer: object, count: int, kind: type[_Status]
) -> tuple[_Status, ...]:
    if type(answer) is tuple and len(answer) == count and set(map(type, answer)) <= {kind}:
        return answer  # as it should be, and found out without a loop in Python
    if isinstance(answer, Sequence):
        statuses = tuple(item for item in answer if isinstance(item, kind))
        if len(answer) == len(statuses) == count:
            return statuses
    raise _wrong(name, call, f"{count} of {kind.__name__}", answer)


def checked_flags(name: str, call: str, answer: object, count: int) -> tuple[bool, ...]:
    """Return what a store answers about so many keys; only a true `True` counts as one.

    Raises:
        StoreContractError: it is something else, or of another count.
    """
    if isinstance(answer, Sequence) and len(answer) == count:
        return tuple(item is True for item in answer)
    raise _wrong(name, call, f"{count} booleans", answer)


def checked_hold(name: str, hold: Hold, count: int) -> tuple[bool, ...]:
    """Return which of so many keys a store's hold names.

    Raises:
        StoreContractError: it says something else, or of another count; the hold was released.
    """
    try:
        return checked_flags(name, "hold", hold.present, count)
    except BaseException:
        hold.release()
        raise


def _wrong(name: str, call: str, expected: str, answer: object) -> StoreContractError:
    size = f" of {len(answer)}" if isinstance(answer, Sequence) else ""
    return StoreContractError(
        f"{name}.{call} must answer with {expected}, got {type(answer).__name__}{size}; its store plugin is at fault"
    )
