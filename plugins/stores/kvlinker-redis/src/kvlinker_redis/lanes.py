"""A lane is a client with connections of its own: lookups and loads have one, offloads another, so that none waits.

A call is one pipeline. It is tried again on a new connection until its time is over; then the lane's breaker
opens, and a dead server costs one wait and not one for each call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import StoreClosedError, StoreError, StoreTimeoutError
from kvlinker_redis.breaker import Breaker
from kvlinker_redis.clients import Client, is_refusal, open_client
from kvlinker_redis.options import RedisStoreOptions
from kvlinker_redis.values import Command, Reply, Values

if TYPE_CHECKING:
    from redis.retry import Retry

__all__ = ["RedisLane"]

_T = TypeVar("_T")
_FIRST_PAUSE_SECONDS = 0.02
_MAX_PAUSE_SECONDS = 0.5
_FOREVER = -1


class RedisLane:
    """Connections for one kind of call, to one server or cluster."""

    def __init__(
        self,
        options: RedisStoreOptions,
        name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a lane, which connects at its first call.

        Args:
            options: of the store.
            name: of the lane; the server shows it in its list of clients.
            clock: seconds.
        """
        self._options = options
        self._name = name
        self._clock = clock
        self._breaker = Breaker(pause_seconds=options.pause_seconds, clock=clock)
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._is_closed = False

    def __str__(self) -> str:
        """Return the server and the lane, for messages."""
        return f"redis store {self._options.address}, {self._name}"

    def run(self, commands: Sequence[Command]) -> list[Reply]:
        """Return one reply for each command, in order; errors of single commands are among them.

        Raises:
            StoreClosedError: the store was closed.
            StoreTimeoutError: the server cannot be reached or was silent, now or lately.
            StoreError: the server refuses the connection.
        """
        return self._guarded(lambda client: client.run(commands))

    def send_values(self, commands: Sequence[Command]) -> list[Reply]:
        """Return one reply for each command with a large argument; see `run`."""
        return self._guarded(lambda client: client.send_values(commands))

    def read_values(
        self, commands: Sequence[Command], size: int, block: NDArray[np.uint8]
    ) -> Values:
        """Return the values that commands ask for, of at most `size` bytes each, in a block; see `run`."""
        return self._guarded(lambda client: client.read_values(commands, size, block))

    def run_everywhere(self, commands: Sequence[Command]) -> list[list[Reply]]:
        """Return the replies of each server that has keys; see `run`."""
        return self._guarded(lambda client: [node.run(commands) for node in client.nodes()])

    def run_on(self, number: int, commands: Sequence[Command]) -> list[Reply]:
        """Return the replies of one of the servers of `run_everywhere`; see `run`."""
        return self._guarded(lambda client: client.nodes()[number].run(commands))

    def _guarded(self, call: Callable[[Client], _T]) -> _T:
        self.check_open()
        if not self._breaker.may_ask():
            msg = f"{self}: the server could not be reached lately and is not asked again yet"
            raise StoreTimeoutError(msg)
        try:
            answer = self._retry().call_with_retry(lambda: call(self._connected()), self._stopper())
        except Exception:
            self.check_open()  # a socket that was closed under a call fails in any way
            raise
        self._breaker.close()
        return answer

    def check_open(self) -> None:
        """Do nothing while the store is open.

        Raises:
            StoreClosedError: it was closed.
        """
        if self._is_closed:
            msg = f"{self}: the store was closed; open it again"
            raise StoreClosedError(msg)

    def _connected(self) -> Client:
        with self._lock:
            self.check_open()
            if self._client is None:
                self._client = open_client(self._options, f"kvlinker-{self._name}")
            return self._client

    @staticmethod
    def _retry() -> Retry:
        from redis.backoff import ExponentialBackoff
        from redis.exceptions import RedisClusterException, RedisError
        from redis.retry import Retry

        pauses = ExponentialBackoff(cap=_MAX_PAUSE_SECONDS, base=_FIRST_PAUSE_SECONDS)
        # Errors of single commands stand among the replies: what is raised concerns the connection.
        return Retry(pauses, _FOREVER, (RedisError, RedisClusterException, OSError))

    def _stopper(self) -> Callable[[Exception], None]:
        """Return what is called after each failure, and raises where it was the last one."""
        deadline = self._clock() + self._options.retry_seconds

        def stop(error: Exception) -> None:
            self.check_open()
            if isinstance(error, StoreError):
                raise error
            if is_refusal(error):
                self._breaker.open()
                msg = f"{self}: the server refuses: {error}"
                raise StoreError(msg) from error
            if self._clock() >= deadline:
                self._breaker.open()
                msg = f"{self}: the server cannot be reached: {error}"
                raise StoreTimeoutError(msg) from error

        return stop

    def close(self) -> None:
        """Close every connection; calls that run fail. Idempotent."""
        with self._lock:
            self._is_closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()
