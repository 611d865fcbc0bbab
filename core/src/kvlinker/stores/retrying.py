"""A retrying store asks the store in it again where that failed for a moment, within bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlinker.device import DeviceAccess
from kvlinker.errors import ContractError
from kvlinker.event_counts import EventCounts
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
from kvlinker.stores.wrapped import WrappedStore, counting

__all__ = ["RetryBounds", "RetryingStore"]

_EVENTS = ("recovered", "retried", "retry_refused")
_MAX_ATTEMPTS = 100
_MAX_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBounds:
    """How often a call is made again, when, and of how many calls."""

    attempts: int = 3
    """Of a call at most, the first one included."""
    first_seconds: float = 0.02
    """A wait is of random length: the first one up to this, each further one up to twice as long."""
    lookup_seconds: float = 0.5
    """How long after its beginning a lookup or hold is made again; less than whoever asks waits."""
    transfer_seconds: float = 10.0
    """The same for reads and writes."""
    share: float = 0.1
    """Of all calls that may be repeated; ten in a row may be, whatever came before."""

    def __post_init__(self) -> None:
        as_integer(self.attempts, "attempts", at_least=1, at_most=_MAX_ATTEMPTS)
        for name, value, limit in (
            ("first_seconds", self.first_seconds, _MAX_SECONDS),
            ("lookup_seconds", self.lookup_seconds, _MAX_SECONDS),
            ("transfer_seconds", self.transfer_seconds, _MAX_SECONDS),
            ("share", self.share, 1.0),
        ):
            if not 0 <= value <= limit:
                msg = f"{name} must be from 0 to {limit:g}, got {value!r}"
                raise ContractError(msg)


class RetryingStore(WrappedStore):
    """A store whose failed calls are made again, but for a write that was about to be published, and removals."""

    def __init__(self, store: Store, bounds: RetryBounds | None = None) -> None:
        """Take over an open store.

        Args:
            store: is asked again where it raises a StoreError that may pass, or answers that a read failed.
            bounds: see RetryBounds.

        Raises:
            UnsupportedOperationError: the package that waits is not installed.
        """
        super().__init__(store)
        own = bounds or RetryBounds()
        self._lookup_seconds, self._transfer_seconds = own.lookup_seconds, own.transfer_seconds
        self._counts = EventCounts(_EVENTS)
        self._retries = Retries(
            RetryBudget(own.share),
            self._counts,
            attempts=own.attempts,
            first_seconds=own.first_seconds,
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
        return counting(self._inner.stats(), self._counts.snapshot())

    def close(self) -> None:
        """See Store; whoever waits to ask again is told why."""
        self._retries.close()
        self._inner.close()
