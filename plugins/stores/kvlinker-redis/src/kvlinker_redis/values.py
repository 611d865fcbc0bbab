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

__all__ = ["Command", "Reply", "Values", "packed", "receive_values", "values_of"]

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


def values_of(replies: Sequence[Reply]) -> Values:
    """Return replies that came as bytes, side by side in a block of their own."""
    sizes = [len(reply) if isinstance(reply, bytes) else 0 for reply in replies]
    block = np.frombuffer(
        b"".join(reply for reply in replies if isinstance(reply, bytes)), dtype=np.uint8
    )
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = ends - sizes
    views = [
        block.data[start:end] if isinstance(reply, bytes) else reply
        for reply, start, end in zip(replies, starts.tolist(), ends.tolist(), strict=True)
    ]
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


def receive_values(receiver: _Receiver, count: int, size: int) -> Values:
    """Receive the replies to so many commands, each of which asks for at most `size` bytes.

    Raises:
        ConnectionError: of redis-py; the stream ended, or has something else in it.
    """
    return _Stream(receiver, count, size).read(count)


class _Stream:
    """The bytes of all replies, one after the other as they come, and how far they were understood."""

    def __init__(self, receiver: _Receiver, count: int, size: int) -> None:
        self._receiver = receiver
        self._size = size
        self._block = np.empty(count * (size + _LINE_BYTES), dtype=np.uint8)
        self._view = self._block.data
        self._filled = 0
        self._at = 0

    def read(self, count: int) -> Values:
        replies: list[Reply] = []
        starts = np.zeros(count, dtype=np.int64)
        for number in range(count):
            line = self._line()
            starts[number] = self._at
            replies.append(self._value(line) if line.startswith(b"$") else self._error(line))
        if self._at != self._filled:
            _give_up(f"{self._filled - self._at} B that nobody asked for")
        return Values(replies=replies, block=self._block, starts=starts)

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
