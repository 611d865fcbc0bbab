"""A lane is a client with connections and threads of its own: lookups and loads have one, offloads another.

So many requests run at once, the others wait. A request that the library gave up opens the lane's breaker: what
waits is given up too, and a dead server costs one wait and not one for each request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvlinker.errors import StoreError, StoreTimeoutError
from kvlinker.store_lanes import StoreLane
from kvlinker_s3.client import open_client
from kvlinker_s3.failures import Failure, brief, failure_of
from kvlinker_s3.options import S3StoreOptions

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["Asked", "Lane", "RefusedRequestError"]

_T = TypeVar("_T")
_WORDS = {
    Failure.DOWN: "the server cannot be reached",
    Failure.REFUSED: "the server refuses",
    Failure.WRONG_RANGE: "the server does not answer with the range that it was asked for",
}
"""What is said of failures that concern every request; others concern one."""
_HINTS = {
    "NoSuchBucket": "; make the bucket, or mend url",
    "RequestTimeTooSkewed": "; set this machine's clock: requests are signed with the time",
}
"""What to do about errors that the server names."""
_NEXT_STEPS = {
    Failure.DOWN: "; look at endpoint and region in settings, at the network, and at where keys come from",
    Failure.REFUSED: "; look at the keys, at what they may do, and at the region",
}


class RefusedRequestError(StoreError):
    """A server refused one request, and may answer others."""

    def __init__(self, message: str, failure: Failure) -> None:
        """Say so, and what kind it is of."""
        super().__init__(message)
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Generic[_T]):
    """Requests whose answers are taken together."""

    requests: Sequence[Callable[[ObjectStore], _T]]
    bytes: int
    """Of all answers."""


class Lane(StoreLane):
    """Requests of one kind, to one place."""

    def __init__(self, options: S3StoreOptions, name: str) -> None:
        """Make a lane, whose client asks nothing before its first request.

        Raises:
            ContractError: see `open_client`.
            StoreError: see `open_client`.
        """
        super().__init__(f"s3 store {options.place}, {name}", pause_seconds=options.pause_seconds)
        self.request_seconds = options.retry_seconds + options.request_seconds
        """How long a request may take with all its tries."""
        self.concurrency = options.concurrency
        """Requests that run at once."""
        self._client = open_client(options)
        self._threads = ThreadPoolExecutor(options.concurrency, thread_name_prefix=f"s3-{name}")

    def run(self, requests: Sequence[Callable[[ObjectStore], _T]]) -> list[_T]:
        """Return what requests return, in order.

        Raises:
            StoreClosedError: the store was closed.
            StoreTimeoutError: the server cannot be reached or was silent, now or lately.
            RefusedRequestError: it refused one of the requests.
            StoreError: it refuses all of them.
        """
        return [_raised(answer) for answer in self.attempt(requests)]

    def attempt(self, requests: Sequence[Callable[[ObjectStore], _T]]) -> list[_T | StoreError]:
        """Return what each request returns, or why it failed, in order.

        Raises:
            StoreClosedError: the store was closed.
            StoreTimeoutError: the server could not be reached lately.
        """
        self.check_open()
        call = _Call()
        return self.guarded(lambda: self._answers(requests, call)) if requests else []

    def stream(self, asked: Sequence[Asked[_T]], *, ahead_bytes: int) -> Generator[Sequence[_T]]:
        """Yield the answers to requests that are asked together, in order, while others run.

        Args:
            asked: what to ask, some requests at a time.
            ahead_bytes: of answers that may be in memory at a time.

        Raises:
            StoreError: see `run`.
        """
        if len(asked) == 1 and len(asked[0].requests) == 1:
            yield self.run(asked[0].requests)
            return
        call = _Call()
        left = deque(asked)
        waiting: deque[tuple[Asked[_T], list[Future[_T | StoreError]]]] = deque()

        def take() -> list[_T]:
            room = ahead_bytes - sum(one.bytes for one, _ in waiting)
            while left and (not waiting or room >= left[0].bytes):
                one = left.popleft()
                room -= one.bytes
                futures = [self._threads.submit(self._answer, ask, call) for ask in one.requests]
                waiting.append((one, futures))
            return [_raised(future.result()) for future in waiting[0][1]]

        try:
            while left or waiting:
                yield self.guarded(take)
                waiting.popleft()
        finally:
            for _, futures in waiting:
                for future in futures:
                    future.cancel()

    def _answers(
        self, requests: Sequence[Callable[[ObjectStore], _T]], call: _Call
    ) -> list[_T | StoreError]:
        if len(requests) == 1:
            return [self._answer(requests[0], call)]
        waiting: list[Future[_T | StoreError]] = [
            self._threads.submit(self._answer, request, call) for request in requests
        ]
        try:
            return [future.result() for future in waiting]
        finally:
            wait(waiting)  # however it ends: what a request touches is the caller's again

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
        hint = next((hint for code, hint in _HINTS.items() if code in str(error)), "")
        if words is None:
            return RefusedRequestError(f"{self}: a request failed: {brief(error)}{hint}", failure)
        if call.error is not None:
            return call.error  # a request that ends late costs no second pause
        kind = StoreTimeoutError if failure is Failure.DOWN else StoreError
        call.error = kind(f"{self}: {words}: {brief(error)}{hint or _NEXT_STEPS.get(failure, '')}")
        self.give_up()
        return call.error

    def close(self) -> None:
        """Take no more requests; those that run end by themselves, and touch no pool memory. Idempotent."""
        super().close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _raised(answer: _T | StoreError) -> _T:
    """Return an answer, and raise what is none."""
    if isinstance(answer, StoreError):
        raise answer
    return answer


class _Call:
    """Requests that were made together: when one finds the server down, the others are not made."""

    def __init__(self) -> None:
        self.error: StoreError | None = None
        """Why the rest is given up, if it is."""
