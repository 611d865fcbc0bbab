"""Connections are redis-py's own, which makes them, greets servers and says who asks; their sockets are at hand."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import StoreError
from kvlinker.secret_references import SecretReference
from kvlinker_redis.address import Address
from kvlinker_redis.readings import Question, Reading
from kvlinker_redis.sendings import Sending
from kvlinker_redis.wire import Command, Reply, ReplyStream, in_steps, packed

if TYPE_CHECKING:
    from redis import Connection, ConnectionPool, CredentialProvider
    from redis.connection import AbstractConnection

__all__ = ["SocketPool", "SocketReading", "SocketSending", "credentials_of"]


class SocketPool:
    """A pool of redis-py's, whose connections move values without copying them."""

    def __init__(self, pool: ConnectionPool, *, ahead_bytes: int, step_seconds: float) -> None:
        """Take over a pool that has no connection yet.

        Args:
            pool: of redis-py.
            ahead_bytes: of replies that a server may have ready for one reading.
            step_seconds: for each MiB of them that is waited for.

        Raises:
            StoreError: it makes connections of a kind that is not known.
        """
        self.ahead_bytes = ahead_bytes
        self.step_seconds = step_seconds
        self._pool = pool
        self._sockets = _show_sockets(pool)

    def take(self) -> tuple[Connection, socket.socket]:
        """Return a connection that nobody else uses, and its socket; `give_back` takes it.

        Raises:
            Exception: whatever redis-py raises where a connection cannot be made.
        """
        connection = self._pool.get_connection()
        return connection, self._sockets[connection]

    def give_back(self, connection: Connection, *, is_clean: bool) -> None:
        """Let a connection be used again, or close it where not every reply was taken from it."""
        if not is_clean:
            connection.disconnect()
        self._pool.release(connection)


class SocketSending(Sending):
    """Values on a connection of their own, sent from where they lie."""

    def __init__(self, pool: SocketPool) -> None:
        """Connect.

        Raises:
            Exception: whatever redis-py raises where a connection cannot be made.
        """
        self._pool = pool
        self._connection: Connection | None
        self._connection, _ = pool.take()
        self._sent: deque[int] = deque()

    @property
    def unanswered(self) -> int:
        """See Sending."""
        return len(self._sent)

    def send(self, commands: Sequence[Command]) -> None:
        """See Sending."""
        self._sent.append(len(commands))
        self._open().send_packed_command(packed(commands))

    def take(self) -> list[Reply]:
        """See Sending."""
        connection = self._open()
        replies = [_reply(connection) for _ in range(self._sent[0])]
        self._sent.popleft()
        return replies

    def _open(self) -> Connection:
        if self._connection is None:
            msg = "redis store: this sending was closed; begin another"
            raise StoreError(msg)
        return self._connection

    def close(self) -> None:
        """See Sending."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give_back(connection, is_clean=not self._sent)


class SocketReading(Reading):
    """Questions on a connection of their own, asked for a bounded number of bytes ahead."""

    def __init__(
        self, pool: SocketPool, questions: Sequence[Question], block: NDArray[np.uint8]
    ) -> None:
        """Connect.

        Args:
            pool: of the connection.
            questions: what to ask.
            block: has room for the replies to each.

        Raises:
            Exception: whatever redis-py raises where a connection cannot be made.
        """
        self._pool = pool
        self._connection: Connection | None
        self._connection, receiver = pool.take()
        self._stream = ReplyStream(receiver, block, step_seconds=pool.step_seconds)
        self._unasked = deque(questions)
        self._asked: deque[Question] = deque()
        self._asked_bytes = 0

    def take(self) -> Sequence[Reply]:
        """See Reading."""
        from redis import exceptions

        self._ask_ahead()
        question = self._asked.popleft()
        self._asked_bytes -= question.moved_bytes
        try:
            replies = self._stream.take(len(question.commands), question.reply_bytes)
        except TimeoutError as error:
            msg = "the server was silent within an answer"
            raise exceptions.TimeoutError(msg) from error
        except OSError as error:
            msg = f"the connection broke within an answer: {error}"
            raise exceptions.ConnectionError(msg) from error
        if not self._asked and not self._unasked:
            self._stream.end()
            self._let_go(is_clean=True)
        return replies

    def _ask_ahead(self) -> None:
        """Ask what may be on its way by now, much at a time: each time wakes the server."""
        most = self._pool.ahead_bytes
        if self._asked and self._asked_bytes > most // 2:
            return
        texts: list[bytes] = []
        while self._unasked and (
            not self._asked or self._asked_bytes + self._unasked[0].moved_bytes <= most
        ):
            question = self._unasked.popleft()
            self._asked.append(question)
            self._asked_bytes += question.moved_bytes
            texts.append(question.text)
        if texts and self._connection is not None:
            # In few pieces: redis-py sends each piece by itself, and wakes the server with it.
            self._connection.send_packed_command(in_steps(memoryview(b"".join(texts))))

    def _let_go(self, *, is_clean: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give_back(connection, is_clean=is_clean)

    def close(self) -> None:
        """See Reading."""
        self._let_go(is_clean=False)


def _reply(connection: AbstractConnection) -> Reply:
    from redis.exceptions import ResponseError

    try:
        reply: object = connection.read_response()
    except ResponseError as error:
        return error
    return reply


def _show_sockets(pool: ConnectionPool) -> WeakKeyDictionary[AbstractConnection, socket.socket]:
    """Let a pool make connections that note their sockets, and return where they do."""
    from redis import Connection, SSLConnection, UnixDomainSocketConnection

    sockets: WeakKeyDictionary[AbstractConnection, socket.socket] = WeakKeyDictionary()

    def noted(connection: AbstractConnection, found: object) -> socket.socket:
        if not isinstance(found, socket.socket):
            msg = f"redis store: a connection of redis-py has a {type(found).__name__}, expected a socket"
            raise StoreError(msg)
        sockets[connection] = found
        return found

    class Plain(Connection):
        def _connect(self) -> socket.socket:
            return noted(self, super()._connect())  # type: ignore[no-untyped-call]  # redis-py's own

    class Secure(SSLConnection):
        def _connect(self) -> socket.socket:
            return noted(self, super()._connect())  # type: ignore[no-untyped-call]  # redis-py's own

    class Local(UnixDomainSocketConnection):
        def _connect(self) -> socket.socket:
            return noted(self, super()._connect())  # type: ignore[no-untyped-call]  # redis-py's own

    for kind in (Secure, Local, Plain):
        if kind.__mro__[1] is pool.connection_class:
            pool.connection_class = kind
            return sockets
    msg = f"redis store: connections of redis-py are of the unknown kind {pool.connection_class}"
    raise StoreError(msg)


def credentials_of(address: Address) -> CredentialProvider | None:
    """Return what reads the password anew for each connection, so that a changed one is found."""
    from redis import CredentialProvider
    from redis.exceptions import RedisError

    if address.password is None:
        return None

    class UnreadablePasswordError(StoreError, RedisError):
        """Of both kinds, since redis-py closes a connection that greets nobody for errors of its own alone.

        Left open, it would be used again, and refused by the server for ever.
        """

    class FromReference(CredentialProvider):
        def __init__(self, username: str | None, reference: SecretReference) -> None:
            self._username = username
            self._reference = reference

        def get_credentials(self) -> tuple[str] | tuple[str, str]:
            try:
                password = self._reference.read("redis store: the password")
            except StoreError as error:
                raise UnreadablePasswordError(str(error)) from None
            return (password,) if self._username is None else (self._username, password)

    return FromReference(address.username, address.password)
