"""Calls that go on in a thread while their caller does something else: bytes move while others are copied and checked.

NIXL's POSIX backend, and UCX between two processes of a machine, move bytes within the call that begins a transfer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeAlias

from kvlinker.moving import current_mover

__all__ = ["LEAST_BYTES", "Aside", "Begun"]

_Call: TypeAlias = Callable[[], object]
LEAST_BYTES = 1 << 20
"""With less, a thread takes as long as it saves."""
_AHEAD = 2
"""One call is under way, and another waits, so that the thread has something to do at once."""


class Begun:
    """A call that somebody was asked to make; it is made once, or given up before that."""

    def __init__(self, call: _Call) -> None:
        """Note what is to be done."""
        self._call: _Call | None = call
        self._error: BaseException | None = None
        self._is_over = False
        self._then: _Call | None = None
        self._lock = threading.Lock()
        self._ended = threading.Lock()  # held until the call is over
        self._ended.acquire()

    def run(self) -> None:
        """Make the call, unless it was given up."""
        with self._lock:
            call, self._call = self._call, None
        if call is None:
            return
        self._error = _error_of(call)
        with self._lock:
            self._is_over, then = True, self._then
        self._ended.release()
        if then is not None:
            then()

    def finish(self) -> None:
        """Wait for the call, and raise what it raised, once; nobody asks for a call that was given up."""
        with self._ended:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def give_up(self, then: _Call) -> None:
        """Make the call no more, and do something once it is not under way: now, or behind it in its thread."""
        with self._lock:
            is_waiting, self._call = self._call is not None, None
            if not is_waiting and not self._is_over:
                self._then = then
                return
        then()


class Aside:
    """A thread that makes calls one after the other, from the first one on until it is stopped.

    As a context manager it is there for the length of a block, and no call is under way behind it.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._calls: SimpleQueue[Begun | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._is_left = False

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what is under way; nobody asks any more whether it fails, and what waits is not done."""
        self._is_left = True
        self.stop()
        self.join(None)

    def offer(self, call: _Call) -> Begun | None:
        """Let a call go on behind those that were begun before.

        Returns:
            None where no thread can be had, such as while the process ends, or behind `stop`: nothing was begun.
        """
        begun = Begun(call)
        with self._lock:
            if not self._has_thread():
                return None
            self._calls.put(begun)
        return begun

    def begin(self, call: _Call) -> Begun:
        """Do the same, and make the call at once where no thread can be had."""
        begun = self.offer(call)
        if begun is None:
            begun = Begun(call)
            begun.run()
        return begun

    def in_turn(self, calls: Sequence[_Call]) -> Iterator[None]:
        """Make calls, the next two while the caller does something behind one; yield when each is over.

        A single call is the caller's own.
        """
        if len(calls) == 1:
            calls[0]()
            yield
            return
        waiting, begun = deque(calls), deque[Begun]()
        while waiting or begun:
            while waiting and len(begun) <= _AHEAD:
                begun.append(self.begin(waiting.popleft()))
            begun.popleft().finish()
            yield

    def _has_thread(self) -> bool:
        if self._thread is None and not self._is_stopped:
            thread = threading.Thread(target=self._run, name="kvlinker-nixl-aside", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # too many threads, or the interpreter ends
                self._is_stopped = True
            else:
                self._thread = thread
        return not self._is_stopped

    def stop(self) -> None:
        """Begin no more calls; the thread ends behind those that were begun. Idempotent."""
        with self._lock:
            self._is_stopped = True
            self._calls.put(None)

    def join(self, seconds: float | None) -> None:
        """Wait until the thread has ended, or so long; it does not behind a call that hangs."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (begun := self._calls.get()) is not None:
            if not self._is_left:
                with _without_its_core():
                    begun.run()


def _without_its_core() -> AbstractContextManager[None]:
    """Leave the thread that moves bytes a core, which copies of others would take a helper for."""
    mover = current_mover()
    return nullcontext() if mover is None else mover.beside_work()


def _error_of(call: _Call) -> BaseException | None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001  # it is the caller's, in whose name this was done
        return error
    return None
