"""A retrying store asks the store in it again where that failed for a moment, within bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvlinker.device import DeviceAccess
from kvlinker.errors import ContractError
from kvlinker.integers import as_integer
from kvlinker.store import (
    Hold,
    ObjectKey,
    ReadRequest,
    ReadSession,
    Store,
    StoreStats,
    WriteBatch,
    WriteStatus,
)
from kvlinker.stores.retried_reads import RetryingReadSession
from kvlinker.stores.retries import Retries
from kvlinker.stores.retry_budget import RetryBudget
from kvlinker.stores.tier import EventCounts
from kvlinker.stores.wrapped import WrappedStore

__all__ = ["RetryingStore"]

_ATTEMPTS, _MAX_ATTEMPTS = 3, 100
_FIRST_SECONDS = 0.02
_LOOKUP_SECONDS, _TRANSFER_SECONDS = 0.5, 10.0
_SHARE = 0.1
_MAX_SECONDS = 3600.0


class RetryingStore(WrappedStore):
    """A store whose failed calls are made again, but for a write that was about to be published, and removals."""

    def __init__(
        self,
        store: Store,
        *,
        attempts: int = _ATTEMPTS,
        first_seconds: float = _FIRST_SECONDS,
        lookup_seconds: float = _LOOKUP_SECONDS,
        transfer_seconds: float = _TRANSFER_SECONDS,
        share: float = _SHARE,
    ) -> None:
        """Take over an open store.

        Args:
            store: is asked again where it raises a StoreError that may pass, or answers that a read failed.
            attempts: of a call at most, the first one included.
            first_seconds: a wait is of random length, the first one up to this, each further one up to twice as long.
            lookup_seconds: how long after its beginning a lookup or hold is made again; less than whoever asks waits.
            transfer_seconds: the same for reads and writes.
            share: of all calls that may be repeated, from 0 to 1; ten in a row may be, whatever came before.

        Raises:
            ContractError: a value is out of bounds.
            UnsupportedOperationError: the package that waits is not installed.
        """
        super().__init__(store)
        count = as_integer(attempts, "attempts", at_least=1, at_most=_MAX_ATTEMPTS)
        self._lookup_seconds = _checked(lookup_seconds, "lookup_seconds", at_most=_MAX_SECONDS)
        self._transfer_seconds = _checked(
            transfer_seconds, "transfer_seconds", at_most=_MAX_SECONDS
        )
        self._counts = EventCounts()
        self._retries = Retries(
            RetryBudget(_checked(share, "share", at_most=1.0)),
            self._counts,
            attempts=count,
            first_seconds=_checked(first_seconds, "first_seconds", at_most=_MAX_SECONDS),
        )

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        return self._retries.call(lambda: self._inner.exists(keys), seconds=self._lookup_seconds)

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        """See Store; what a failed attempt held is held until it expires."""
        return self._retries.call(
            lambda: self._inner.hold(keys, seconds=seconds), seconds=self._lookup_seconds
        )

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store; made again as long as nobody was asked for the permission, which is asked once."""
        asked: list[bool] = []

        def may_publish_once() -> bool:
            asked.append(True)
            return may_publish()

        return self._retries.call(
            lambda: self._inner.write(batches, memory, may_publish=may_publish_once),
            seconds=self._transfer_seconds,
            may_repeat=lambda: not asked,
        )

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        return RetryingReadSession(
            self._inner, request, retries=self._retries, seconds=self._transfer_seconds
        )

    def stats(self) -> StoreStats:
        """See Store; counts `retried`, `recovered` calls, and retries that were `retry_refused` by the budget."""
        stats = self._inner.stats()
        return replace(stats, counters={**stats.counters, **self._counts.snapshot()})

    def close(self) -> None:
        """See Store; whoever waits to ask again is told why."""
        self._retries.close()
        self._inner.close()


def _checked(value: float, name: str, *, at_most: float) -> float:
    if not (math.isfinite(value) and 0 <= value <= at_most):
        msg = f"{name} must be from 0 to {at_most:g}, got {value!r}"
        raise ContractError(msg)
    return value
