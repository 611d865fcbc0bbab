"""The lifetime of an open store: calls that run keep it open, and only in the process that opened it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType

from kvlinker.errors import StoreClosedError, StoreTimeoutError

__all__ = ["Lifetime"]


class Lifetime(AbstractContextManager[None]):
    """Whether a store is open, and which calls run; as a context, one call more runs inside.

    It is that context itself: an object for each call, and more so a generator, takes time in every read of a layer.
    """

    def __init__(self, path: Path, *, close_seconds: float) -> None:
        """Begin a life; `close_seconds` is how long its end waits for calls."""
        self._path = path
        self._seconds = close_seconds
        self._idle = threading.Condition()
        self._calls = 0
        self._is_closing = False
        self._is_closed = False
        self._owner = os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether this process opened the store; a forked child did not."""
        return os.getpid() == self._owner

    def using(self) -> AbstractContextManager[None]:
        """Keep the store open for the length of a call.

        Raises:
            StoreClosedError: when the block is entered: it was closed, or opened by another process.
        """
        return self

    def __enter__(self) -> None:
        """Begin a call; see `using`."""
        if not self.is_own:
            msg = (
                f"file store {self._path}: was opened by process {self._owner}, this is process "
                f"{os.getpid()}; a fork does not take a store along, open it in a process of its own"
            )
            raise StoreClosedError(msg)
        with self._idle:
            if self._is_closing:
                msg = f"file store {self._path}: was closed; open it again"
                raise StoreClosedError(msg)
            self._calls += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the call."""
        self._end_call()

    @contextmanager
    def letting_go(self) -> Iterator[bool]:
        """Keep the store open for the length of a release; False where it is closed, or the parent's, already."""
        if not self.is_own:
            yield False
            return
        with self._idle:
            is_open = not self._is_closed
            self._calls += is_open
        try:
            yield is_open
        finally:
            if is_open:
                self._end_call()

    def _end_call(self) -> None:
        with self._idle:
            self._calls -= 1
            if not self._calls:
                self._idle.notify_all()

    def end(self) -> bool:
        """Let no call begin any more and wait for those that run; False where that was done before.

        Raises:
            StoreTimeoutError: calls still run; ending it again waits again.
        """
        with self._idle:
            self._is_closing = True
            if self._is_closed:
                return False
            if not self._idle.wait_for(lambda: not self._calls, self._seconds):
                msg = (
                    f"file store {self._path}: {self._calls} calls still run after "
                    f"{self._seconds} s; it stays open"
                )
                raise StoreTimeoutError(msg)
            self._is_closed = True
        return True
