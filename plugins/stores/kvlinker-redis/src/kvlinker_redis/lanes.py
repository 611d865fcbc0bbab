"""A lane is a client with connections of its own: lookups and loads have one, offloads another, so that none waits.

A call is one pipeline. It is tried again on a new connection until its time is over; then the lane's breaker
opens, and a dead server costs one wait and not one for each call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import StoreError, StoreTimeoutError
from kvlinker.host_blocks import HostBlocks
from kvlinker.named_values import parts_of
from kvlinker.store_lanes import StoreLane
from kvlinker_redis.clients import Client, is_refusal, open_client, said
from kvlinker_redis.options import RedisStoreOptions
from kvlinker_redis.readings import MAX_COMMANDS, Question, Reading
from kvlinker_redis.sendings import Sending
from kvlinker_redis.wire import Command, Reply

if TYPE_CHECKING:
    from redis.retry import Retry

__all__ = ["RedisLane"]

_T = TypeVar("_T")
_FIRST_PAUSE_SECONDS = 0.02
_MAX_PAUSE_SECONDS = 0.5
_FOREVER = -1
_IF_REFUSED = (
    "look at user, password and database in url, and name who signed a certificate as ca_file"
)
_IF_DOWN = "is it up, and does url begin with rediss:// where it speaks TLS, and redis:// where it does not?"
_IF_NO_CLUSTER = (
    "leave cluster out where the server is none of one, and else allow its user +cluster|slots"
)


class RedisLane(StoreLane):
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
        label = f"redis store {options.address}, {name}"
        super().__init__(label, pause_seconds=options.pause_seconds, clock=clock)
        self._options = options
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._client: Client | None = None

    def run(self, commands: Sequence[Command]) -> list[Reply]:
        """Return one reply for each command, in order; errors of single commands are among them.

        Raises:
            StoreClosedError: the store was closed.
            StoreTimeoutError: the server cannot be reached or was silent, now or lately.
            StoreError: the server refuses the connection.
        """
        return self._tried(lambda client: client.run(commands))

    def run_in_parts(self, commands: Sequence[Command]) -> list[Reply]:
        """Return one reply for each of any number of commands; see `run`."""
        replies: list[Reply] = []
        for part in parts_of(len(commands), MAX_COMMANDS):
            replies += self.run(commands[part])
        return replies

    def send_values(self, parts: Iterable[Sequence[Command]]) -> Generator[list[Reply]]:
        """Yield one reply for each command of each part, in order, once the next part was sent; see `run`.

        After a lost connection what was not answered is sent again: what two parts carry lies still meanwhile.

        Args:
            parts: commands with large arguments; a part may be used again when the one behind the next is asked for.
        """
        running: list[Sending] = []
        waiting: deque[Sequence[Command]] = deque()
        sent = partial(_send, running=running, waiting=waiting)
        answered = partial(_answered, running=running, waiting=waiting)
        try:
            for part in parts:
                waiting.append(part)
                self._tried(sent)
                if len(waiting) > 1:
                    yield self._tried(answered)
            while waiting:
                yield self._tried(answered)
        finally:
            for sending in running:
                sending.close()

    def ask(self, questions: Sequence[Question], blocks: HostBlocks) -> Iterator[Sequence[Reply]]:
        """Yield the replies to each question, in order, while the next ones arrive; see `run`.

        After a lost connection, what was not yielded is asked for again.

        Args:
            questions: what to ask.
            blocks: lend the memory that replies are received into.
        """
        room = max((question.room for question in questions), default=0)
        running: list[Reading] = []
        with blocks.lent(room) as block:
            try:
                for number in range(len(questions)):
                    left = questions[number:]
                    yield self._tried(partial(_take, running=running, questions=left, block=block))
            finally:
                for reading in running:
                    reading.close()

    def run_everywhere(self, commands: Sequence[Command]) -> list[tuple[str, list[Reply]]]:
        """Return the replies of each server that has keys, with the server's name; see `run`."""
        return self._tried(
            lambda client: [(name, node.run(commands)) for name, node in client.nodes().items()]
        )

    def run_on(self, name: str, commands: Sequence[Command]) -> list[Reply]:
        """Return the replies of one of the servers of `run_everywhere`; see `run`.

        Raises:
            StoreError: it has no keys any more.
        """

        def run(client: Client) -> list[Reply]:
            node = client.nodes().get(name)
            if node is None:
                msg = f"{self}: {name} left the cluster meanwhile; try again"
                raise StoreError(msg)
            return node.run(commands)

        return self._tried(run)

    def _tried(self, call: Callable[[Client], _T]) -> _T:
        """Return what a call returns, which is made again until the time for that is over."""
        return self.guarded(
            lambda: self._retry.call_with_retry(lambda: call(self._connected()), self._stopper())
        )

    def _connected(self) -> Client:
        with self._lock:
            self.check_open()
            if self._client is None:
                self._client = open_client(self._options, f"kvlinker-{self._name}")
            return self._client

    @cached_property
    def _retry(self) -> Retry:
        """What calls again: it knows nothing of a call, so that all share it."""
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
                self.give_up()
                msg = f"{self}: the server refuses: {said(error)}; {_IF_REFUSED}"
                raise StoreError(msg) from None  # the error itself says all that `said` leaves out
            if self._clock() >= deadline:
                self.give_up()
                no_cluster = "Cluster mode is not enabled" in str(error)
                hint = _IF_NO_CLUSTER if no_cluster else _IF_DOWN
                msg = f"{self}: the server cannot be reached: {said(error)}; {hint}"
                raise StoreTimeoutError(msg) from None

        return stop

    def close(self) -> None:
        """Close every connection; calls that run fail. Idempotent."""
        with self._lock:
            super().close()
            client, self._client = self._client, None
        if client is not None:
            client.close()


def _take(
    client: Client,
    *,
    running: list[Reading],
    questions: Sequence[Question],
    block: NDArray[np.uint8],
) -> Sequence[Reply]:
    """Return the replies to the first question, and ask all of them if no reading runs."""
    if not running:
        running.append(client.reading(questions, block))
    try:
        return running[0].take()
    except BaseException:
        running.pop().close()
        raise


def _send(client: Client, *, running: list[Sending], waiting: Sequence[Sequence[Command]]) -> None:
    """Send all parts that wait for answers and were not sent."""
    if not running:
        running.append(client.sending())
    try:
        for part in islice(waiting, running[0].unanswered, None):
            running[0].send(part)
    except BaseException:
        running.pop().close()
        raise


def _answered(
    client: Client, *, running: list[Sending], waiting: deque[Sequence[Command]]
) -> list[Reply]:
    """Return the replies to the first part that waits, which is sent again where its connection was lost."""
    _send(client, running=running, waiting=waiting)
    try:
        replies = running[0].take()
    except BaseException:
        running.pop().close()
        raise
    waiting.popleft()
    return replies
