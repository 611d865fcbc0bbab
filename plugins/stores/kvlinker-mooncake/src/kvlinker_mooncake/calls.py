"""Calls of the client, each with a deadline of this store's own, or counted while it touches memory of others.

The client waits for a dead master longer than an engine can, and a call after its `close` is a fault of memory. So
what needs the master alone is asked on a thread that can be left behind; what touches the pools is waited for; and
the client is closed when no call is under way any more.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from kvlinker.errors import KVLinkerError, StoreClosedError, StoreError, StoreTimeoutError
from kvlinker.guard import Breaker
from kvlinker.lanes import Lane, LaneTask

__all__ = ["Calls"]

_T = TypeVar("_T")
_MAX_HANGING = 16
"""Calls that may hang at once; with so many, no further one is made."""


class Calls:
    """The calls of one store that are under way, and whether the master answers."""

    def __init__(
        self,
        label: str,
        *,
        pause_seconds: float,
        wait: Callable[[LaneTask, float], bool] = LaneTask.wait,
    ) -> None:
        """Count nothing yet.

        Args:
            label: names the store in messages.
            pause_seconds: how long a master is left alone that did not answer.
            wait: waits for a call for some seconds at most, and returns whether it has ended.
        """
        self._label = label
        self._wait = wait
        # One clock for all of this module, which tests replace.
        self._breaker = Breaker(pause_seconds=pause_seconds, clock=time.monotonic)
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._numbers = itertools.count()
        self._under_way: set[int] = set()
        """Numbers of calls."""
        self._moves = 0
        """How many of those may write into the pools."""
        self._is_closing = False
        self._is_closed = False
        self._idle: list[Lane] = []
        self._hanging: list[LaneTask] = []

    def __str__(self) -> str:
        """Return the store's name, for messages."""
        return self._label

    # ---- what is under way ------------------------------------------------------------------------

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked from the one that the client belongs to."""
        return self._process != os.getpid()

    def check_open(self) -> None:
        """Do nothing while calls can be made.

        Raises:
            StoreClosedError: the store was closed, or belongs to the process that this one was forked from.
        """
        self._check(is_open=not self._is_closing)

    def _check(self, *, is_open: bool) -> None:
        if not is_open or self.is_foreign:
            why = "a forked process has no client" if is_open else "the store was closed"
            msg = f"{self}: {why}; open it again"
            raise StoreClosedError(msg)

    def _enter(self, *, is_local: bool = False) -> int:
        with self._lock:
            self._check(is_open=not (self._is_closed if is_local else self._is_closing))
            number = next(self._numbers)
            self._under_way.add(number)
            return number

    def _leave(self, number: int) -> None:
        with self._lock:
            self._under_way.remove(number)
            self._changed.notify_all()

    def under_way(self) -> frozenset[int]:
        """Return the numbers of the calls that are under way, also of those that nobody waits for any more."""
        with self._lock:
            return frozenset(self._under_way)

    def end_moves(self, seconds: float | None) -> bool:
        """Begin nothing but local calls, and wait until nothing is written into the pools any more.

        Returns:
            False when the time is over first.
        """
        with self._lock:
            self._is_closing = True
            return self._changed.wait_for(lambda: not self._moves, seconds)

    def close(self) -> None:
        """Make no more calls. Idempotent."""
        with self._lock:
            self._is_closing = self._is_closed = True
            idle, self._idle = self._idle, []
        for lane in idle:
            lane.close(0)

    def wait(self, seconds: float | None) -> bool:
        """Wait until no call is under way; False when the time is over first."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._under_way, seconds)

    # ---- whether it answers -----------------------------------------------------------------------

    def _admit(self) -> int:
        """Return how many timeouts there were so far.

        Raises:
            StoreTimeoutError: the master did not answer lately, or too many calls hang.
        """
        with self._lock:
            self._hanging = [task for task in self._hanging if not task.has_ended]
            is_choked = len(self._hanging) >= _MAX_HANGING
        if is_choked or not self._breaker.allow():
            msg = f"{self}: the master did not answer lately and is not asked again yet"
            raise StoreTimeoutError(msg)
        return self._breaker.timeouts

    def give_up(self, what: str, why: str) -> StoreTimeoutError:
        """Leave the master alone for a while, and return the error that says so."""
        self._breaker.trip()
        return StoreTimeoutError(
            f"{self}: {what}: {why}; is the master up? it is left alone for a while"
        )

    # ---- calls ------------------------------------------------------------------------------------

    def ask(
        self,
        what: str,
        call: Callable[[], _T],
        *,
        seconds: float,
        on_late: Callable[[_T], object] | None = None,
    ) -> _T:
        """Return what a call returns, which touches no memory that is not the store's own.

        Args:
            what: the call, for messages.
            call: runs on a thread of its own; it is left behind when the time is over.
            seconds: how long to wait.
            on_late: what is done, there, with an answer that nobody waits for any more.

        Raises:
            StoreClosedError: the store was closed.
            StoreTimeoutError: no answer came in time, now or lately.
        """
        self.check_open()
        timeouts = self._admit()
        number = self._enter()
        asked = _Asked(lambda: _typed(what, call), partial(self._leave, number), on_late)
        lane = self._take_lane()
        task = lane.submit(asked.run)
        if task.was_dropped:
            self._leave(number)
            msg = f"{self}: {what}: there is no thread to ask with"
            raise StoreTimeoutError(msg)
        if not self._wait(task, seconds) and asked.is_left_behind():
            lane.abandon(task)
            if task.was_dropped:  # before it began
                self._leave(number)
            with self._lock:
                self._hanging.append(task)
            raise self.give_up(what, f"no answer within {seconds} s")
        self._give_lane(lane)
        answer = asked.answer()
        self._breaker.succeed(timeouts=timeouts)
        return answer

    def move(
        self, what: str, call: Callable[[], _T], *, seconds: float, of_pools: bool = True
    ) -> _T:
        """Return what a call returns that touches pool memory, however long it takes.

        What it writes must not land after the answer, and it cannot be taken back. Where it takes longer than
        `seconds`, the next calls are not made for a while. What touches memory of the store's own may do so on a
        thread that somebody waits for, and is left behind when the store is closed.

        Raises:
            StoreClosedError: the store was closed.
            StoreTimeoutError: the master did not answer lately.
        """
        self.check_open()
        if self._breaker.is_open:
            msg = f"{self}: {what}: the master did not answer lately and is not asked again yet"
            raise StoreTimeoutError(msg)
        with self._lock:
            number = self._enter()
            self._moves += of_pools
        began = time.monotonic()
        try:
            return _typed(what, call)
        finally:
            with self._lock:
                self._moves -= of_pools
                self._leave(number)
            if time.monotonic() - began > seconds:
                self._breaker.trip()

    def local(self, call: Callable[[], _T]) -> _T:
        """Return what a call returns that asks nobody.

        Raises:
            StoreClosedError: the store was closed.
        """
        number = self._enter(is_local=True)
        try:
            return _typed("a local call", call)
        finally:
            self._leave(number)

    def _take_lane(self) -> Lane:
        with self._lock:
            return self._idle.pop() if self._idle else Lane("mooncake")

    def _give_lane(self, lane: Lane) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(lane)
                return
        lane.close(0)


def _typed(what: str, call: Callable[[], _T]) -> _T:
    """Return what a call returns.

    Raises:
        StoreError: the client raised something of its own.
    """
    try:
        return call()
    except KVLinkerError:
        raise
    except Exception as error:  # the client's errors have no base of their own
        msg = f"mooncake store: {what}: the client raised {type(error).__name__}: {error}"
        raise StoreError(msg) from error


class _Asked(Generic[_T]):
    """One call on another thread, which somebody waits for, or no more."""

    def __init__(
        self,
        call: Callable[[], _T],
        leave: Callable[[], None],
        on_late: Callable[[_T], object] | None,
    ) -> None:
        self._call = call
        self._leave = leave
        self._on_late = on_late
        self._lock = threading.Lock()
        self._is_left = False
        self._has_ended = False
        self._answers: list[_T] = []
        self._errors: list[BaseException] = []

    def run(self) -> None:
        try:
            try:
                self._answers.append(self._call())
            except BaseException as error:  # noqa: BLE001  # raised again where it is waited for
                self._errors.append(error)
            with self._lock:
                self._has_ended = True
                is_late = self._is_left
            if is_late and self._on_late is not None and self._answers:
                self._on_late(self._answers[0])
        finally:
            self._leave()

    def is_left_behind(self) -> bool:
        """Wait no more; False where it has ended after all."""
        with self._lock:
            self._is_left = not self._has_ended
            return self._is_left

    def answer(self) -> _T:
        if self._errors:
            raise self._errors[0]
        return self._answers[0]
