"""Values are read from a socket straight into one block of memory, and written from where they lie.

redis-py copies a value twice on its way in and once on its way out, which costs as much as the network; this
does what it does, for commands that are all answered with a value of one length, on its own connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import StoreError

__all__ = ["Command", "Reply", "Values", "packed", "receive_values", "room_for", "values_of"]

Command: TypeAlias = tuple[str | bytes | memoryview | int, ...]
"""A command's name and arguments."""
Reply: TypeAlias = object
"""What a server answers: bytes, a number, None; or an exception of redis-py in the place of an answer."""

_LINE_BYTES = 512
"""More than the line in front of a value has, or an error."""
_END = b"\r\n"


class _Receiver(Protocol):
    """A socket, as far as it is needed."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receive some bytes; 0 at the end of the stream."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Values:
    """Replies to commands that ask for values of one length."""

    replies: Sequence[Reply]
    """A view of each value, of whatever length it has; or an exception."""
    block: NDArray[np.uint8]
    """[bytes] what the views are of."""
    starts: NDArray[np.int64]
    """[replies] where each value begins in the block; meaningful for values alone."""


def values_of(replies: Sequence[Reply], size: int, block: NDArray[np.uint8]) -> Values:
    """Copy replies that came as bytes side by side into a block.

    Raises:
        StoreError: one is longer than `size`.
    """
    starts = np.zeros(len(replies), dtype=np.int64)
    views: list[Reply] = []
    at = 0
    for number, reply in enumerate(replies):
        starts[number] = at
        if not isinstance(reply, bytes):
            views.append(reply)
            continue
        if len(reply) > size:
            msg = f"redis store: {size} B were asked for, and {len(reply)} B came"
            raise StoreError(msg)
        block[at : at + len(reply)] = np.frombuffer(reply, dtype=np.uint8)
        views.append(block.data[at : at + len(reply)])
        at += len(reply)
    return Values(replies=views, block=block, starts=starts)


def packed(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """Return commands as the pieces that go over the wire; values are sent from where they lie."""
    pieces: list[bytes | memoryview] = []
    text = bytearray()
    for command in commands:
        text += b"*%d\r\n" % len(command)
        for argument in command:
            if isinstance(argument, memoryview):
                text += b"$%d\r\n" % argument.nbytes
                pieces += [bytes(text), argument]
                text = bytearray(_END)
            else:
                raw = argument if isinstance(argument, bytes) else str(argument).encode()
                text += b"$%d\r\n%b\r\n" % (len(raw), raw)
    return [*pieces, bytes(text)]


def room_for(count: int, size: int) -> int:
    """Return the bytes of a block that so many replies of at most `size` bytes fit into."""
    return count * (size + _LINE_BYTES)


def receive_values(receiver: _Receiver, count: int, size: int, block: NDArray[np.uint8]) -> Values:
    """Receive the replies to so many commands, each of which asks for at most `size` bytes, into a block.

    Raises:
        ConnectionError: of redis-py; the stream ended, or has something else in it.
    """
    return _Stream(receiver, size, block).read(count)


class _Stream:
    """The bytes of all replies, one after the other as they come, and how far they were understood."""

    def __init__(self, receiver: _Receiver, size: int, block: NDArray[np.uint8]) -> None:
        self._receiver = receiver
        self._size = size
        self._block = block
        self._view = self._block.data
        self._filled = 0
        self._at = 0

    def read(self, count: int) -> Values:
        replies: list[Reply] = []
        starts: list[int] = []
        view, size = self._view, self._size
        usual = b"$%d\r\n" % size
        whole = len(usual) + size + len(_END)
        for _ in range(count):
            at = self._at
            if self._filled - at >= whole and view[at : at + len(usual)] == usual:
                self._at += len(usual)
                line = usual[: -len(_END)]
            else:
                line = self._line()
            starts.append(self._at)
            replies.append(self._value(line) if line.startswith(b"$") else self._error(line))
        if self._at != self._filled:
            _give_up(f"{self._filled - self._at} B that nobody asked for")
        return Values(replies=replies, block=self._block, starts=np.array(starts, dtype=np.int64))

    def _line(self) -> bytes:
        """Return the line that begins a reply, without its end."""
        while True:
            found = bytes(self._view[self._at : min(self._filled, self._at + _LINE_BYTES)])
            end = found.find(_END)
            if end >= 0:
                self._at += end + len(_END)
                return found[:end]
            if len(found) == _LINE_BYTES:
                _give_up(f"{found[:40]!r} in the place of a value")
            self._receive()

    def _value(self, line: bytes) -> Reply:
        length = int(line[1:]) if line[1:].isdigit() else -1
        if not 0 <= length <= self._size:
            _give_up(f"{line[:40]!r} in the place of a length of at most {self._size}")
        end = self._at + length
        while self._filled < end + len(_END):
            self._receive()
        if bytes(self._view[end : end + len(_END)]) != _END:
            _give_up(f"a value that is not {length} B long")
        value = self._view[self._at : end]
        self._at = end + len(_END)
        return value

    def _error(self, line: bytes) -> Reply:
        from redis.exceptions import BusyLoadingError, ResponseError

        if not line.startswith(b"-"):
            _give_up(f"{line[:40]!r} in the place of a value")
        text = line[1:].decode(errors="replace")
        if text.startswith("LOADING"):
            raise BusyLoadingError(text)
        return ResponseError(text)

    def _receive(self) -> None:
        room = self._view[self._filled :]
        if not room:
            _give_up("more than was asked for")
        count = self._receiver.recv_into(room)
        if not count:
            _give_up("the end of the connection")
        self._filled += count


def _give_up(what: str) -> NoReturn:
    from redis import exceptions

    msg = f"values were asked for, and the server sent {what}"
    raise exceptions.ConnectionError(msg)
