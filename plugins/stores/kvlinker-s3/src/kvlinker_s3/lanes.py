"""A lane is a client with connections and threads of its own: lookups and loads have one, offloads another.

So many requests run at once, the others wait. A request that the library gave up opens the lane's breaker: what
waits is given up too, and a dead server costs one wait and not one for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from kvlinker.errors import StoreClosedError, StoreError, StoreTimeoutError
from kvlinker.guard import Breaker
from kvlinker_s3.client import open_client
from kvlinker_s3.failures import Failure, brief, failure_of
from kvlinker_s3.options import S3StoreOptions

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["Lane", "RefusedRequestError"]

_T = TypeVar("_T")
_WORDS = {
    Failure.DOWN: "the server cannot be reached",
    Failure.REFUSED: "the server refuses",
    Failure.WRONG_RANGE: "the server does not answer with the range that it was asked for",
}
"""What is said of failures that concern every request; others concern one."""


class RefusedRequestError(StoreError):
    """A server refused one request, and may answer others."""

    def __init__(self, message: str, failure: Failure) -> None:
        """Say so, and what kind it is of."""
        super().__init__(message)
        self.failure = failure


class Lane:
    """Requests of one kind, to one place."""

    def __init__(self, options: S3StoreOptions, name: str) -> None:
        """Make a lane, whose client asks nothing before its first request.

        Raises:
            ContractError: see `open_client`.
            StoreError: see `open_client`.
        """
        self._label = f"s3 store {options.place}, {name}"
        self._breaker = Breaker(pause_seconds=options.pause_seconds)
        self._client = open_client(options)
        self._threads = ThreadPoolExecutor(options.concurrency, thread_name_prefix=f"s3-{name}")
        self._is_closed = False

    def __str__(self) -> str:
        """Return the place and the lane, for messages."""
        return self._label

    def check_open(self) -> None:
        """Do nothing while the store is open.

        Raises:
            StoreClosedError: it was closed.
        """
        if self._is_closed:
            msg = f"{self}: the store was closed; open it again"
            raise StoreClosedError(msg)

    def run(self, requests: Sequence[Callable[[ObjectStore], _T]]) -> list[_T]:
        """Return what requests return, in order.

        Raises:
            StoreClosedError: the store was closed.
            StoreTimeoutError: the server cannot be reached or was silent, now or lately.
            RefusedRequestError: it refused one of the requests.
            StoreError: it refuses all of them.
        """
        answers: list[_T] = []
        for answer in self.attempt(requests):
            if isinstance(answer, StoreError):
                raise answer
            answers.append(answer)
        return answers

    def attempt(self, requests: Sequence[Callable[[ObjectStore], _T]]) -> list[_T | StoreError]:
        """Return what each request returns, or why it failed, in order.

        Raises:
            StoreClosedError: the store was closed.
            StoreTimeoutError: the server could not be reached lately.
        """
        self.check_open()
        if not requests:
            return []
        if not self._breaker.allow():
            msg = f"{self}: the server could not be reached lately and is not asked again yet"
            raise StoreTimeoutError(msg)
        timeouts = self._breaker.timeouts
        call = _Call()
        answers = self._answers(requests, call)
        if call.error is None:
            self._breaker.succeed(timeouts=timeouts)
        return answers

    def _answers(
        self, requests: Sequence[Callable[[ObjectStore], _T]], call: _Call
    ) -> list[_T | StoreError]:
        if len(requests) == 1:
            return [self._answer(requests[0], call)]
        try:
            waiting: list[Future[_T | StoreError]] = [
                self._threads.submit(self._answer, request, call) for request in requests
            ]
            return [future.result() for future in waiting]
        except (CancelledError, RuntimeError):
            self.check_open()  # threads that end take no more requests
            raise

    def _answer(self, request: Callable[[ObjectStore], _T], call: _Call) -> _T | StoreError:
        from obstore.exceptions import BaseError

        if call.error is not None:
            return call.error
        self.check_open()
        try:
            return request(self._client)
        except (BaseError, OSError) as error:
            return self._failed(error, call)

    def _failed(self, error: Exception, call: _Call) -> StoreError:
        failure = failure_of(error)
        words = _WORDS.get(failure)
        if words is None:
            return RefusedRequestError(f"{self}: a request failed: {brief(error)}", failure)
        kind = StoreTimeoutError if failure is Failure.DOWN else StoreError
        call.error = kind(f"{self}: {words}: {brief(error)}")
        self._breaker.trip()
        return call.error

    def close(self) -> None:
        """Take no more requests; those that run end by themselves, and touch no pool memory. Idempotent."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Call:
    """Requests that were made together: when one finds the server down, the others are not made."""

    def __init__(self) -> None:
        self.error: StoreError | None = None
        """Why the rest is given up, if it is."""
