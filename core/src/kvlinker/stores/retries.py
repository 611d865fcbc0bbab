"""Retries ask a store again that failed for a moment: after a while, a few times, and within a time and a budget."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from kvlinker.errors import (
    RegistrationError,
    StoreBusyError,
    StoreClosedError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    UnsupportedOperationError,
)
from kvlinker.event_counts import EventCounts
from kvlinker.guard import BreakerOpenError
from kvlinker.stores.retry_budget import RetryBudget

if TYPE_CHECKING:
    from tenacity import RetryCallState

__all__ = ["Retries"]

_T = TypeVar("_T")
_LASTING = (
    BreakerOpenError,
    RegistrationError,
    StoreBusyError,
    StoreClosedError,
    StoreFormatError,
    StoreFullError,
)
"""Errors that say that asking again is of no use now."""


class Retries:
    """How the calls of one store are asked again."""

    def __init__(
        self, budget: RetryBudget, counts: EventCounts, *, attempts: int, first_seconds: float
    ) -> None:
        """Keep the bounds.

        Args:
            budget: of which each retry takes one.
            counts: `retried`, `recovered` and `retry_refused` by the budget.
            attempts: of a call at most, the first one included.
            first_seconds: what the first wait is at most; each further one is at most twice as long.

        Raises:
            UnsupportedOperationError: the package that waits is not installed.
        """
        if importlib.util.find_spec("tenacity") is None:
            msg = "a retrying store needs a package; pip install 'kvlinker[retries]'"
            raise UnsupportedOperationError(msg)
        self._budget, self._counts = budget, counts
        self._attempts, self._first_seconds = attempts, first_seconds
        self._closing = threading.Event()

    def close(self) -> None:
        """Ask nobody again; who waits to do so is told that the store was closed."""
        self._closing.set()

    def call(
        self,
        ask: Callable[[], _T],
        *,
        seconds: float,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> _T:
        """Return what `ask` returns, in this attempt or a later one, and else raise its last error.

        Args:
            ask: one attempt.
            seconds: how long after its beginning it is asked again.
            may_repeat: whether it can be asked again at all, now that it failed.

        Raises:
            StoreError: the last attempt's, or that this was closed before.
        """
        self._check_open()
        until = time.monotonic() + seconds
        self._budget.earn()
        failed: list[StoreError] = []
        try:
            return ask()
        except StoreError as error:
            if not _is_transient(error) or not may_repeat():
                raise
            failed.append(error)
        return self._again(failed, ask, until, may_repeat)

    def _again(
        self,
        first: list[StoreError],
        ask: Callable[[], _T],
        until: float,
        may_repeat: Callable[[], bool],
    ) -> _T:
        """Go on behind a first attempt.

        Its error is taken out of a list: with its frames, what keeps it would keep pool memory and itself.
        """
        from tenacity import (
            Retrying,
            retry_if_exception,
            sleep_using_event,
            wait_random_exponential,
        )

        def attempt() -> _T:
            if first:
                raise first.pop()
            self._check_open()
            return ask()

        retrying = Retrying(
            stop=lambda state: self._must_stop(state, until),
            wait=wait_random_exponential(multiplier=self._first_seconds),
            retry=retry_if_exception(lambda error: _is_transient(error) and may_repeat()),
            sleep=sleep_using_event(self._closing),
            reraise=True,
        )
        answer = retrying(attempt)
        self._counts.add("recovered")
        return answer

    def _check_open(self) -> None:
        if self._closing.is_set():
            msg = "the store was closed and is not asked again; open it anew"
            raise StoreClosedError(msg)

    def _must_stop(self, state: RetryCallState, until: float) -> bool:
        if self._closing.is_set() or state.attempt_number >= self._attempts:
            return True
        if time.monotonic() + state.upcoming_sleep > until:
            return True
        if not self._budget.spend():
            self._counts.add("retry_refused")
            return True
        self._counts.add("retried")
        return False


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, StoreError) and not isinstance(error, _LASTING)
