"""Replies are read from a socket straight into one block of memory, and values are written from where they lie.

redis-py copies a value twice on its way in and once on its way out, which costs as much as the network; this does
what it does, for commands that are answered with texts and numbers, on its own connections.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvlinker.named_values import RowViews

__all__ = [
    "Command",
    "Reply",
    "ReplyStream",
    "command_text",
    "in_steps",
    "packed",
    "room_for",
    "text_of",
    "views_of",
]

Command: TypeAlias = tuple[str | bytes | memoryview | int, ...]
"""A command's name and arguments."""
Reply: TypeAlias = object
"""What a server answers: a view of bytes, a number; or an exception of redis-py in the place of an answer."""

_LINE_BYTES = 512
"""More than the line in front of a value has, or an error."""
_END = b"\r\n"
_FLAG_BYTES = len(b":0\r\n")
_EMPTY = b"$0\r\n"
_FLAGS = {b":0": 0, b":1": 1}
"""What most commands are answered with that have a number for an answer, as it goes over the wire."""
_STEP_BYTES = 1 << 20
"""Sent or received in one step, for which the server has its time: a slow network may take long for a long value."""


class _Receiver(Protocol):
    """A socket, as far as it is needed."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receive some bytes; 0 at the end of the stream."""


def views_of(replies: Sequence[Reply]) -> list[Reply]:
    """Return replies that came as bytes as views of them."""
    return [memoryview(reply) if isinstance(reply, bytes) else reply for reply in replies]


def packed(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """Return commands as the pieces that go over the wire; values are sent from where they lie."""
    pieces: list[bytes | memoryview] = []
    texts: list[bytes] = []
    for command in commands:
        texts.append(b"*%d\r\n" % len(command))
        for argument in command:
            if isinstance(argument, memoryview):
                texts.append(b"$%d\r\n" % argument.nbytes)
                pieces.append(b"".join(texts))
                pieces += in_steps(argument)
                texts = [_END]
            else:
                raw = argument if isinstance(argument, bytes) else str(argument).encode()
                texts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return [*pieces, b"".join(texts)]


def in_steps(raw: memoryview) -> list[memoryview]:
    """Return bytes as the pieces that are sent one by one, for each of which the server has its time."""
    return [raw[start : start + _STEP_BYTES] for start in range(0, raw.nbytes, _STEP_BYTES)]


def text_of(*arguments: str | int) -> bytes:
    """Return arguments as they go over the wire, without what begins a command."""
    raw = [str(argument).encode() for argument in arguments]
    return b"".join(b"$%d\r\n%b\r\n" % (len(one), one) for one in raw)


def command_text(name: str, arguments: int) -> bytes:
    """Return what begins a command of so many arguments."""
    return b"*%d\r\n" % (arguments + 1) + text_of(name)


def room_for(count: int, size: int) -> int:
    """Return the bytes of a block that so many replies of at most `size` bytes fit into."""
    return count * (size + _LINE_BYTES)


class ReplyStream:
    """Replies, one after the other as they come, and how far they were understood."""

    def __init__(
        self,
        receiver: _Receiver,
        block: NDArray[np.uint8],
        *,
        step_seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read from a socket into a block.

        Args:
            receiver: the socket, which waits for no byte longer than that.
            block: where replies are.
            step_seconds: for each MiB that is waited for: who sends a byte now and then is silent too.
            clock: seconds.
        """
        self._receiver = receiver
        self._step_seconds = step_seconds
        self._clock = clock
        self._left_of_step = 0
        self._step_ends = math.inf
        self._block = block
        self._view = block.data
        self._filled = 0
        self._at = 0

    def take(self, count: int, size: int) -> Sequence[Reply]:
        """Return the next replies, which overwrite the ones before; as RowViews where all are values of that size.

        Args:
            count: how many; the block has room for them.
            size: bytes of each at most; 0 where numbers are awaited.

        Raises:
            ConnectionError: of redis-py; the stream ended, or has something else in it.
            TimeoutError: it did not come in time.
        """
        self._left_of_step = 0
        left = self._filled - self._at
        self._view[:left] = self._view[self._at : self._filled]
        self._at, self._filled = 0, left
        if not size:
            return self._numbers(count)
        usual = b"$%d\r\n" % size
        rows = self._rows(count, size, usual)
        if rows is not None:
            return RowViews(rows)
        return [self._reply(usual, size) for _ in range(count)]

    def _rows(self, count: int, size: int, usual: bytes) -> NDArray[np.uint8] | None:
        """Return replies that are all as usual, as [count, size]; None, and nothing is taken, if one is not.

        They begin where the block does.
        """
        step = len(usual) + size + len(_END)
        if count * step > len(self._block):
            return None  # there are numbers among them
        rows = self._block[: count * step].reshape(count, step)
        checked = 0
        while True:
            begun = min(
                count, (self._filled + size + len(_END)) // step
            )  # their first lines are there
            if (rows[checked:begun, : len(usual)] != np.frombuffer(usual, dtype=np.uint8)).any():
                return None
            checked = begun
            if self._filled >= count * step:
                break
            # What is not usual may be shorter, and nothing else come behind it.
            if not usual.startswith(bytes(self._view[begun * step : self._filled][: len(usual)])):
                return None
            self._receive()
        if (rows[:, size + len(usual) :] != np.frombuffer(_END, dtype=np.uint8)).any():
            _give_up(f"a value that is not {size} B long")
        self._at = count * step
        return rows[:, len(usual) : len(usual) + size]

    def _numbers(self, count: int) -> list[Reply]:
        """Return replies that are numbers, as many at once as have come: one by one they take ten times as long."""
        replies: list[Reply] = []
        while len(replies) < count:
            replies += self._flags(count - len(replies))
            if len(replies) < count:
                replies.append(self._reply(_EMPTY, 0))
        return replies

    def _flags(self, most: int) -> list[int]:
        """Return replies that have come whole and are 0 or 1, up to the first that is something else."""
        lines = bytes(self._view[self._at : self._filled]).split(_END, most)[:-1]
        flags = [_FLAGS[line] for line in takewhile(_FLAGS.__contains__, lines)]
        self._at += len(flags) * _FLAG_BYTES
        return flags

    def end(self) -> None:
        """Take no more replies.

        Raises:
            ConnectionError: of redis-py; the server sent something that nobody asked for.
        """
        if self._at != self._filled:
            _give_up(f"{self._filled - self._at} B that nobody asked for")

    def _reply(self, usual: bytes, size: int) -> Reply:
        at, view = self._at, self._view
        begun = at + len(usual)
        end = begun + size
        if self._filled >= end + len(_END) and view[at:begun] == usual:
            self._at = end + len(_END)
            if view[end : self._at] == _END:
                return view[begun:end]
            _give_up(f"a value that is not {size} B long")
        line = self._line()
        if line.startswith(b"$"):
            return self._value(line, size)
        return _number(line) if line.startswith(b":") else _error(line)

    def _line(self) -> bytes:
        """Return the line that begins a reply, without its end."""
        while True:
            found = bytes(self._view[self._at : min(self._filled, self._at + _LINE_BYTES)])
            end = found.find(_END)
            if end >= 0:
                self._at += end + len(_END)
                return found[:end]
            if len(found) == _LINE_BYTES:
                _give_up(f"{found[:40]!r} in the place of a reply")
            self._receive()

    def _value(self, line: bytes, size: int) -> Reply:
        length = int(line[1:]) if line[1:].isdigit() else -1
        if not 0 <= length <= size:
            _give_up(f"{line[:40]!r} in the place of a length of at most {size}")
        end = self._at + length
        while self._filled < end + len(_END):
            self._receive()
        if self._view[end : end + len(_END)] != _END:
            _give_up(f"a value that is not {length} B long")
        value = self._view[self._at : end]
        self._at = end + len(_END)
        return value

    def _receive(self) -> None:
        room = self._view[self._filled :]
        if not room:
            _give_up("more than was asked for")
        self._check_time()
        count = self._receiver.recv_into(room)
        if not count:
            _give_up("the end of the connection")
        self._filled += count
        self._left_of_step -= count

    def _check_time(self) -> None:
        now = self._clock()
        if self._left_of_step <= 0:
            self._left_of_step, self._step_ends = _STEP_BYTES, now + self._step_seconds
        elif now >= self._step_ends:
            msg = f"{self._left_of_step} B of a step did not come within {self._step_seconds} s"
            raise TimeoutError(msg)


def _number(line: bytes) -> int:
    if not line[1:].removeprefix(b"-").isdigit():
        _give_up(f"{line[:40]!r} in the place of a number")
    return int(line[1:])


def _error(line: bytes) -> Exception:
    from redis.exceptions import BusyLoadingError, ResponseError

    if not line.startswith(b"-"):
        _give_up(f"{line[:40]!r} in the place of a reply")
    text = line[1:].decode(errors="replace")
    if text.startswith("LOADING"):
        raise BusyLoadingError(text)
    return ResponseError(text)


def _give_up(what: str) -> NoReturn:
    from redis import exceptions

    msg = f"replies were awaited, and the server sent {what}"
    raise exceptions.ConnectionError(msg)
