"""Calls that go on in a thread while their caller does something else: bytes move while others are copied and checked.

NIXL's POSIX backend, and UCX between two processes of a machine, move bytes within the call that begins a transfer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeAlias

from kvlinker.moving import current_mover

__all__ = ["Aside"]

_Call: TypeAlias = Callable[[], object]
_LEAST_BYTES = 1 << 20
"""With less, a thread takes as long as it saves."""


class Aside:
    """One call at a time in a thread, which is there for the length of a block; no call is under way after it.

    Where no thread can be had, such as while the process ends, the caller's own makes the call.
    """

    def __init__(self, total: int) -> None:
        """Begin with nothing; the first call brings the thread, where so many bytes are worth one."""
        self._is_worth_it = total >= _LEAST_BYTES
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._taken = ExitStack()
        """A core that copies of the caller leave to the thread."""

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what is under way; nobody asks any more whether it fails."""
        self._taken.close()
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()

    def begin(self, call: _Call) -> None:
        """Let a call go on; the one before it must have been waited for."""
        self._is_busy = True
        if self._has_thread():
            self._calls.put(call)
        else:
            self._ends.put(_error_of(call))

    def _has_thread(self) -> bool:
        if self._thread is None and self._is_worth_it:
            thread = threading.Thread(target=self._run, name="kvlinker-nixl-aside", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # too many threads, or the interpreter ends
                self._is_worth_it = False
            else:
                self._thread = thread
                if (mover := current_mover()) is not None:
                    self._taken.enter_context(mover.beside_work())
        return self._thread is not None

    def finish(self) -> None:
        """Wait for the call that was begun, and raise what it raised; do nothing where none was."""
        if not self._is_busy:
            return
        error = self._ends.get()
        self._is_busy = False
        if error is not None:
            raise error

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._ends.put(_error_of(call))


def _error_of(call: _Call) -> BaseException | None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001  # it is the caller's, in whose name this was done
        return error
    return None
