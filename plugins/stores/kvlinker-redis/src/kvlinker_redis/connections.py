"""Connections are redis-py's own, which makes them, greets servers and says who asks; their sockets are at hand."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import StoreError
from kvlinker_redis.address import Address, SecretReference
from kvlinker_redis.values import Command, Reply, Values, packed, receive_values

if TYPE_CHECKING:
    from redis import ConnectionPool, CredentialProvider
    from redis.connection import AbstractConnection

__all__ = ["SocketPool", "credentials_of"]


class SocketPool:
    """A pool of redis-py's, whose connections move values without copying them."""

    def __init__(self, pool: ConnectionPool) -> None:
        """Take over a pool that has no connection yet.

        Raises:
            StoreError: it makes connections of a kind that is not known.
        """
        self._pool = pool
        self._sockets = _show_sockets(pool)

    def send_values(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands and return a reply each; errors of single commands are among them.

        Raises:
            Exception: whatever redis-py raises where a connection fails.
        """
        with self._connection() as connection:
            connection.send_packed_command(packed(commands))
            return [_reply(connection) for _ in commands]

    def read_values(
        self, commands: Sequence[Command], size: int, block: NDArray[np.uint8]
    ) -> Values:
        """Send commands that are all answered with values of at most `size` bytes, for which a block has room.

        Raises:
            Exception: whatever redis-py raises where a connection fails.
        """
        from redis import exceptions

        with self._connection() as connection:
            connection.send_packed_command(packed(commands))
            try:
                return receive_values(self._sockets[connection], len(commands), size, block)
            except TimeoutError as error:
                msg = "the server was silent within an answer"
                raise exceptions.TimeoutError(msg) from error
            except OSError as error:
                msg = f"the connection broke within an answer: {error}"
                raise exceptions.ConnectionError(msg) from error

    @contextmanager
    def _connection(self) -> Iterator[AbstractConnection]:
        """Give a connection, which is closed if not every reply was taken from it."""
        connection = self._pool.get_connection()
        try:
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)


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

    if address.password is None:
        return None

    class FromReference(CredentialProvider):
        def __init__(self, username: str | None, reference: SecretReference) -> None:
            self._username = username
            self._reference = reference

        def get_credentials(self) -> tuple[str] | tuple[str, str]:
            password = self._reference.read()
            return (password,) if self._username is None else (self._username, password)

    return FromReference(address.username, address.password)
