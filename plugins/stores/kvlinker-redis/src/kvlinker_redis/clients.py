"""Clients are redis-py's for one server and for a cluster, behind the same three methods."""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import KVLinkerError, StoreError
from kvlinker_redis.connections import (
    SocketPool,
    SocketReading,
    SocketSending,
    credentials_of,
)
from kvlinker_redis.options import RedisStoreOptions
from kvlinker_redis.readings import Question, Reading
from kvlinker_redis.sendings import PlainSending, Sending
from kvlinker_redis.wire import Command, Reply, views_of

if TYPE_CHECKING:
    from redis import Redis, RedisCluster

__all__ = ["Client", "is_refusal", "open_client", "said"]

_PROTOCOL = 2
"""RESP2: every Redis since 2.0 and every proxy speaks it, and no message comes that nobody asked for."""
_REPEATS = ", with args beginning with"
"""What servers say before they repeat the arguments of a command that they do not know."""


class Client(ABC):
    """Connections to one server, or to all of a cluster."""

    @abstractmethod
    def run(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands together and return one reply each, in order; errors of single commands are among them.

        Raises:
            Exception: whatever redis-py raises where a connection fails.
        """

    def sending(self) -> Sending:
        """Return a sending of commands with large arguments.

        Raises:
            Exception: whatever redis-py raises where a connection cannot be made.
        """
        return PlainSending(self.run)

    def reading(
        self,
        questions: Sequence[Question],
        block: NDArray[np.uint8],  # noqa: ARG002  # replies of redis-py have memory of their own
    ) -> Reading:
        """Return a reading of questions, whose replies may be received into a block."""
        return _PlainReading(self.run, questions)

    @abstractmethod
    def nodes(self) -> Mapping[str, Client]:
        """Return a client for each server that has keys of its own, by its name."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection, also those in use."""


class _PlainReading(Reading):
    """Questions that are asked one after the other."""

    def __init__(
        self, run: Callable[[Sequence[Command]], list[Reply]], questions: Sequence[Question]
    ) -> None:
        self._run = run
        self._questions = iter(questions)

    def take(self) -> Sequence[Reply]:
        return views_of(self._run(next(self._questions).commands))

    def close(self) -> None:
        self._questions = iter(())


class ServerClient(Client):
    """One server."""

    def __init__(self, redis: Redis) -> None:
        """Take over a client of redis-py."""
        self._redis = redis

    def run(self, commands: Sequence[Command]) -> list[Reply]:
        """See Client."""
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return _checked(pipeline.execute(raise_on_error=False), len(commands))

    def nodes(self) -> Mapping[str, Client]:
        """See Client."""
        return {"": self}

    def close(self) -> None:
        """See Client."""
        self._redis.connection_pool.disconnect(inuse_connections=True)


class SocketClient(ServerClient):
    """One server, through connections whose sockets are at hand."""

    def __init__(self, redis: Redis, *, ahead_bytes: int, step_seconds: float) -> None:
        """Take over a client of redis-py that has not connected yet; see SocketPool for the rest."""
        super().__init__(redis)
        pool = redis.connection_pool
        self._pool = SocketPool(pool, ahead_bytes=ahead_bytes, step_seconds=step_seconds)

    def sending(self) -> Sending:
        """See Client."""
        return SocketSending(self._pool)

    def reading(self, questions: Sequence[Question], block: NDArray[np.uint8]) -> Reading:
        """See Client."""
        return SocketReading(self._pool, questions, block)


class ClusterClient(Client):
    """All servers of a cluster; commands go to those that have their keys."""

    def __init__(self, cluster: RedisCluster) -> None:
        """Take over a client of redis-py."""
        self._cluster = cluster

    def run(self, commands: Sequence[Command]) -> list[Reply]:
        """See Client."""
        pipeline = self._cluster.pipeline()
        for command in commands:
            pipeline.execute_command(*command)
        return _checked(pipeline.execute(raise_on_error=False), len(commands))

    def nodes(self) -> Mapping[str, Client]:
        """See Client."""
        return {
            str(node.name): ServerClient(self._cluster.get_redis_connection(node))
            for node in self._cluster.get_primaries()
        }

    def close(self) -> None:
        """See Client."""
        self._cluster.disconnect_connection_pools()


def _checked(answer: object, count: int) -> list[Reply]:
    """Return as many replies as there were commands; raise what a lost connection left in their place."""
    from redis import exceptions

    if not isinstance(answer, list) or len(answer) != count:
        found = len(answer) if isinstance(answer, list) else answer
        msg = f"redis store: {count} commands got {found} replies; redis-py is at fault"
        raise StoreError(msg)
    lost = (
        exceptions.ConnectionError,
        exceptions.TimeoutError,
        exceptions.ClusterDownError,
        exceptions.RedisClusterException,
    )
    for reply in answer:
        if isinstance(reply, lost):
            raise reply
    return answer


def is_refusal(error: BaseException) -> bool:
    """Whether an error will not go away by trying again: the server knows us, and does not want us."""
    from redis.exceptions import (
        AskError,
        AuthenticationError,
        AuthorizationError,
        ClusterDownError,
        ResponseError,
        TryAgainError,
    )

    if isinstance(error, KVLinkerError | AuthenticationError | AuthorizationError):
        return True
    if isinstance(error, ResponseError):
        return not isinstance(error, ClusterDownError | TryAgainError | AskError)
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def said(error: BaseException) -> str:
    """Return what an error says, without arguments of commands: of those that greet a server one is the password."""
    return str(error).split(_REPEATS, maxsplit=1)[0]


def open_client(options: RedisStoreOptions, name: str) -> Client:
    """Return a client; one for a cluster has asked it for its servers.

    Raises:
        Exception: whatever redis-py raises where a cluster cannot be reached.
    """
    from redis import Redis, RedisCluster
    from redis.backoff import NoBackoff
    from redis.cluster import ClusterNode
    from redis.retry import Retry

    address, paths = options.address, options.tls_paths
    once = Retry(NoBackoff(), 0)  # a lane tries again, within a deadline
    credentials = credentials_of(address)
    if not options.cluster:
        redis = Redis(
            host=address.host,
            port=address.port,
            unix_socket_path=address.socket_path or None,
            db=address.database,
            retry=once,
            credential_provider=credentials,
            socket_connect_timeout=options.connect_seconds,
            socket_timeout=options.answer_seconds,
            client_name=name,
            protocol=_PROTOCOL,
            ssl=address.has_tls,
            ssl_ca_certs=paths.get("ssl_ca_certs"),
            ssl_certfile=paths.get("ssl_certfile"),
            ssl_keyfile=paths.get("ssl_keyfile"),
        )
        return SocketClient(
            redis, ahead_bytes=options.call_bytes, step_seconds=options.answer_seconds
        )
    return ClusterClient(
        RedisCluster(
            startup_nodes=[ClusterNode(address.host, address.port)],
            retry=once,
            credential_provider=credentials,
            socket_connect_timeout=options.connect_seconds,
            socket_timeout=options.answer_seconds,
            client_name=name,
            protocol=_PROTOCOL,
            ssl=address.has_tls,
            ssl_ca_certs=paths.get("ssl_ca_certs"),
            ssl_certfile=paths.get("ssl_certfile"),
            ssl_keyfile=paths.get("ssl_keyfile"),
        )
    )
