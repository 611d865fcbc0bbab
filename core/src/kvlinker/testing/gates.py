"""Gates and events let a test decide when something happens, without sleeping."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

__all__ = ["Gate", "HostEvent"]


class Gate:
    """Holds whoever comes until it is opened.

    A gate that is forgotten opens with a TimeoutError in the waiting thread: a test fails and never hangs.
    """

    def __init__(self, *, limit_seconds: float = 30.0) -> None:
        """Make a closed gate that holds nobody longer than the limit."""
        self._limit = limit_seconds
        self._open = False
        self._arrived = 0
        self._changed = threading.Condition()

    @property
    def arrived(self) -> int:
        """How many have come so far."""
        return self._arrived

    @property
    def is_open(self) -> bool:
        """Whether the gate holds nobody."""
        return self._open

    def open(self) -> None:
        """Let everybody through from here on. Idempotent."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def close(self) -> None:
        """Hold whoever comes from here on. Idempotent."""
        with self._changed:
            self._open = False

    def pass_through(self) -> None:
        """Wait until the gate is open.

        Raises:
            TimeoutError: nobody opened it within the limit.
        """
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._open, self._limit):
                msg = f"nobody opened the gate within {self._limit} s"
                raise TimeoutError(msg)

    def wait_for_arrivals(self, count: int = 1) -> None:
        """Wait until so many have come, through the open gate or to the closed one.

        Raises:
            TimeoutError: fewer came within the limit.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived >= count, self._limit):
                msg = f"{self._arrived} of {count} came to the gate within {self._limit} s"
                raise TimeoutError(msg)

    def __enter__(self) -> Self:
        """Return the gate."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Open the gate, so that no thread outlives the test."""
        self.open()


class HostEvent:
    """A point in an engine's stream that a test reaches when it says so."""

    def __init__(self, *, done: bool = False, error: BaseException | None = None) -> None:
        """Make an event.

        Args:
            done: whether the point is reached already.
            error: what `query` raises, for an event of a broken device.
        """
        self._done = done
        self._error = error
        self._queries = 0

    @property
    def queries(self) -> int:
        """How often somebody asked."""
        return self._queries

    def set(self) -> None:
        """Reach the point. Idempotent."""
        self._done = True

    def query(self) -> bool:
        """Return whether the point is reached; raises the event's error, if it has one."""
        self._queries += 1
        if self._error is not None:
            raise self._error
        return self._done
