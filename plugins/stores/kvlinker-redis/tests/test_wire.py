"""The wire: whatever pieces an answer comes in, each reply stands where its command does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import exceptions

from kvlinker_redis.wire import ReplyStream, packed, room_for, views_of

SIZE = 40
VALUES = st.binary(min_size=SIZE, max_size=SIZE) | st.binary(max_size=SIZE)
ERRORS = st.sampled_from([b"WRONGTYPE no text", b"ERR something", b"MOVED 5 127.0.0.1:7000"])
NUMBERS = st.integers(-1, 10**12)
REPLIES = st.lists(
    st.tuples(st.just(b"$"), VALUES)
    | st.tuples(st.just(b"-"), ERRORS)
    | st.tuples(st.just(b":"), NUMBERS),
    min_size=1,
    max_size=8,
)


class Wire:
    """A socket that gives a stream in pieces."""

    def __init__(self, stream: bytes, pieces: list[int]) -> None:
        self._stream = stream
        self._pieces = pieces

    def recv_into(self, buffer: memoryview, /) -> int:
        length = min(self._pieces.pop() if self._pieces else len(buffer), len(buffer))
        piece, self._stream = self._stream[:length], self._stream[length:]
        buffer[: len(piece)] = piece
        return len(piece)


def spoken(kind: bytes, reply: bytes | int) -> bytes:
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    return b"-%b\r\n" % reply if kind == b"-" else b"$%d\r\n%b\r\n" % (len(reply), reply)


@settings(max_examples=60)  # each is many cuts of many replies
@given(REPLIES, st.lists(st.integers(1, 60), max_size=60), st.integers(1, 8))
def test_t4_replies_stand_in_order_however_they_are_cut_and_taken(
    replies: list[tuple[bytes, bytes | int]], pieces: list[int], each: int
) -> None:
    wire = Wire(b"".join(spoken(kind, reply) for kind, reply in replies), pieces)
    stream = ReplyStream(wire, np.empty(room_for(each, SIZE), dtype=np.uint8))

    for start in range(0, len(replies), each):
        some = replies[start : start + each]
        for value, (_, reply) in zip(stream.take(len(some), SIZE), some, strict=True):
            if isinstance(value, exceptions.ResponseError):
                assert str(value).encode() == reply
            else:
                assert type(value) in (memoryview, int)
                assert value == reply
    stream.end()


FLAGS = st.tuples(st.just(b":"), st.integers(0, 1))
ANSWERS = st.lists(
    FLAGS | FLAGS | st.tuples(st.just(b":"), NUMBERS) | st.tuples(st.just(b"-"), ERRORS)
)


@settings(max_examples=60)  # each is many cuts of many replies
@given(ANSWERS, st.lists(st.integers(1, 60), max_size=60), st.integers(1, 8))
def test_t4_numbers_stand_in_order_however_they_are_cut_and_taken(
    answers: list[tuple[bytes, bytes | int]], pieces: list[int], each: int
) -> None:
    wire = Wire(b"".join(spoken(kind, answer) for kind, answer in answers), pieces)
    stream = ReplyStream(wire, np.empty(room_for(each, 0), dtype=np.uint8))

    taken = [
        reply
        for start in range(0, len(answers), each)
        for reply in stream.take(min(each, len(answers) - start), 0)
    ]
    stream.end()

    expected = [answer for _, answer in answers]
    assert [
        str(reply).encode() if isinstance(reply, Exception) else reply for reply in taken
    ] == expected


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"", "the end of the connection"),
        (b"$40\r\n" + bytes(39), "the end of the connection"),
        (b"$40\r\n" + bytes(42), "a value that is not 40 B long"),
        (b"$4\r\nabcde\r\n", "a value that is not 4 B long"),
        (b"$41\r\n" + bytes(41) + b"\r\n", "in the place of a length of at most 40"),
        (b"$-1\r\n", "in the place of a length of at most 40"),
        (b"$4x\r\n", "in the place of a length of at most 40"),
        (b"$\r\n", "in the place of a length of at most 40"),
        (b":x\r\n", "in the place of a number"),
        (b"*1\r\n", "in the place of a reply"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "in the place of a reply"),
        (bytes(600), "in the place of a reply"),
        (b"$2\r\nab\r\n$2\r\nab\r\n", "8 B that nobody asked for"),
    ],
)
def test_t1_a_stream_of_something_else_is_given_up(stream: bytes, reason: str) -> None:
    replies = ReplyStream(Wire(stream, []), np.empty(room_for(1, SIZE), dtype=np.uint8))

    def take_one() -> None:
        replies.take(1, SIZE)
        replies.end()

    with pytest.raises(exceptions.ConnectionError, match=reason):
        take_one()


def test_each_mib_that_is_waited_for_has_its_time() -> None:
    size = 3 << 20
    now = 0.0

    class Slow(Wire):
        def recv_into(self, buffer: memoryview, /) -> int:
            nonlocal now
            now += 0.9
            return super().recv_into(buffer)

    def take(piece: int) -> int:
        wire = Slow(b"$%d\r\n%b\r\n" % (size, bytes(size)), [piece] * (size // piece + 2))
        block = np.empty(room_for(1, size), dtype=np.uint8)
        stream = ReplyStream(wire, block, step_seconds=1.0, clock=lambda: now)
        return len(stream.take(1, size))

    assert take(1 << 20) == 1
    with pytest.raises(TimeoutError, match=r"did not come within 1\.0 s"):
        take(1 << 18)


def test_a_server_that_loads_its_data_is_not_ready_yet() -> None:
    wire = Wire(b"-LOADING Redis is busy\r\n", [])

    with pytest.raises(exceptions.BusyLoadingError):
        ReplyStream(wire, np.empty(room_for(1, SIZE), dtype=np.uint8)).take(1, SIZE)


def test_t6_the_time_of_who_uses_answers_is_not_the_servers() -> None:
    now = 0.0
    wire = Wire(b"$40\r\n%b\r\n" % bytes(SIZE) * 2, [46, 20, 26])
    block = np.empty(room_for(1, SIZE), dtype=np.uint8)
    stream = ReplyStream(wire, block, step_seconds=1.0, clock=lambda: now)

    stream.take(1, SIZE)
    now = 100.0

    assert views_of(stream.take(1, SIZE)) == [bytes(SIZE)]


def test_commands_are_packed_and_values_are_sent_from_where_they_lie() -> None:
    value = memoryview(bytearray(b"12345"))

    pieces = packed([("SET", "a", value, "EX", 10), ("GET", b"b")])

    assert pieces[1] == value
    assert isinstance(pieces[1], memoryview)
    assert pieces[1].obj is value.obj
    assert b"".join(pieces) == (
        b"*5\r\n$3\r\nSET\r\n$1\r\na\r\n$5\r\n12345\r\n$2\r\nEX\r\n$2\r\n10\r\n"
        b"*2\r\n$3\r\nGET\r\n$1\r\nb\r\n"
    )


def test_a_long_value_is_sent_in_steps_of_which_each_has_its_time() -> None:
    value = memoryview(bytes(range(256)) * (10 << 10))

    pieces = packed([("SET", "a", value)])

    assert max(map(len, pieces)) <= 1 << 20
    assert b"".join(pieces) == b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$2621440\r\n%b\r\n" % bytes(value)


def test_replies_that_came_as_bytes_are_views_too() -> None:
    error = exceptions.ResponseError("WRONGTYPE")

    views = views_of([b"abc", error, b"", 5])

    assert views == [b"abc", error, b"", 5]
    assert isinstance(views[0], memoryview)
