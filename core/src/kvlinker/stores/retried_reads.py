"""Reads that are made again: everything where a store raised, and those objects alone that it says have failed."""

from __future__ import annotations

import threading
from dataclasses import replace

from kvlinker.device import DeviceAccess
from kvlinker.errors import StoreClosedError, StoreError
from kvlinker.guard import checked_read
from kvlinker.plans import TransferPlan
from kvlinker.store import ReadRequest, ReadSession, ReadStatus, Store
from kvlinker.stores.retries import Retries

__all__ = ["RetryingReadSession"]


class _SomeFailedError(StoreError):
    """The store failed to read some objects, and says so; they are asked for again."""


class RetryingReadSession(ReadSession):
    """A session of a store, which is opened anew where a read of it raises."""

    def __init__(
        self, store: Store, request: ReadRequest, *, retries: Retries, seconds: float
    ) -> None:
        """Open the session.

        Args:
            store: is read from.
            request: what is to be read.
            retries: how often and when it is asked again.
            seconds: how long after its beginning a read is made again.
        """
        self.store, self.request = store, request
        self.name = type(store).__name__
        self._retries, self._seconds = retries, seconds
        self._lock = threading.Lock()
        self._is_closed = False
        self._session = retries.call(lambda: store.open_read(request), seconds=seconds)

    def session(self, *, anew: bool) -> ReadSession:
        """Return the store's session: the one that was opened last, or a new one in its place.

        Raises:
            StoreClosedError: this one was closed meanwhile.
        """
        if not anew:
            return self._session
        fresh = self.store.open_read(self.request)
        with self._lock:
            old, is_closed = self._session, self._is_closed
            if not is_closed:
                self._session = fresh
        (fresh if is_closed else old).close()
        if is_closed:
            msg = "this read session was closed while it was read again; open another"
            raise StoreClosedError(msg)
        return fresh

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession; what fails to the end is FAILED, or raises where nothing was read at all."""
        reading = _Reading(self, plan, memory)
        try:
            self._retries.call(reading.attempt, seconds=self._seconds)
        except StoreError:
            if not reading.statuses:
                raise
        return tuple(reading.statuses)

    def close(self) -> None:
        """See ReadSession."""
        with self._lock:
            self._is_closed = True
            session = self._session
        session.close()


class _Reading:
    """One plan that is read, and what became of its objects so far."""

    def __init__(
        self, session: RetryingReadSession, plan: TransferPlan, memory: DeviceAccess
    ) -> None:
        self._session, self._plan, self._memory = session, plan, memory
        self._was_asked = False
        self.statuses: list[ReadStatus] = []

    def attempt(self) -> None:
        """Read what was not read yet.

        Raises:
            StoreError: something failed and may be asked for again.
        """
        if self.statuses:
            self._read_failed()
        else:
            session = self._session.session(anew=self._was_asked)
            self._was_asked = True
            self.statuses += checked_read(self._session.name, session, self._plan, self._memory)
        if ReadStatus.FAILED in self.statuses:
            msg = f"pool {self._plan.pool!r}: the store failed to read some objects"
            raise _SomeFailedError(msg)

    def _read_failed(self) -> None:
        failed = [i for i, status in enumerate(self.statuses) if status is ReadStatus.FAILED]
        keys = tuple(self._session.request.keys[i] for i in failed)
        with self._session.store.open_read(replace(self._session.request, keys=keys)) as session:
            chosen = self._plan.select(failed)
            answers = checked_read(self._session.name, session, chosen, self._memory)
        for i, status in zip(failed, answers, strict=True):
            self.statuses[i] = status
