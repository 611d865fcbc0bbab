"""A store lane is one direction of a store's calls: lookups and loads take one, offloads another, so that none waits.

Each has a breaker of its own: a dead server costs one wait in each direction, and not one for each call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from kvlinker.errors import StoreClosedError, StoreTimeoutError
from kvlinker.guard import Breaker

__all__ = ["StoreLane"]

_T = TypeVar("_T")


class StoreLane:
    """A direction, open until it is closed; a subclass makes the calls, and bounds each by a deadline."""

    def __init__(
        self, label: str, *, pause_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Make an open lane.

        Args:
            label: names the store and the direction in messages.
            pause_seconds: how long a server is not asked again after a call was given up.
            clock: seconds.
        """
        self._label = label
        self._breaker = Breaker(pause_seconds=pause_seconds, clock=clock)
        self._is_closed = False

    def __str__(self) -> str:
        """Return the store and the direction, for messages."""
        return self._label

    def check_open(self) -> None:
        """Do nothing while the store is open.

        Raises:
            StoreClosedError: it was closed.
        """
        if self._is_closed:
            msg = f"{self}: the store was closed; open it again"
            raise StoreClosedError(msg)

    def check_up(self) -> None:
        """Do nothing while the store is open and its server not known to be down.

        Raises:
            StoreClosedError: the store was closed.
            StoreTimeoutError: the server could not be reached lately.
        """
        self.check_open()
        if self._breaker.is_open:
            raise self._down()

    def _down(self) -> StoreTimeoutError:
        msg = f"{self}: the server could not be reached lately and is not asked again yet"
        return StoreTimeoutError(msg)

    def guarded(self, call: Callable[[], _T]) -> _T:
        """Return what a call returns, unless the server is known to be down.

        Raises:
            StoreClosedError: the store was closed, before the call or under it.
            StoreTimeoutError: the server could not be reached lately, and is not asked again yet.
        """
        self.check_open()
        if not self._breaker.allow():
            raise self._down()
        timeouts = self._breaker.timeouts
        try:
            answer = call()
        except Exception:
            self.check_open()  # what is closed under a call fails in any way
            raise
        self._breaker.succeed(timeouts=timeouts)
        return answer

    def give_up(self) -> None:
        """Note that a call was given up: the server is not asked again for a while."""
        self._breaker.trip()

    def close(self) -> None:
        """Refuse every further call. Idempotent."""
        self._is_closed = True
