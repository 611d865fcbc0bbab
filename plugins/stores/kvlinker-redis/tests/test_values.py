"""Values: whatever pieces an answer comes in, each value stands where its command does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import exceptions

from kvlinker.errors import StoreError
from kvlinker_redis.blocks import Blocks
from kvlinker_redis.values import packed, receive_values, room_for, values_of

SIZE = 40
VALUES = st.binary(min_size=SIZE, max_size=SIZE) | st.binary(max_size=SIZE)
ERRORS = st.sampled_from([b"WRONGTYPE no text", b"ERR something", b"MOVED 5 127.0.0.1:7000"])
REPLIES = st.lists(
    st.tuples(st.just(b"$"), VALUES) | st.tuples(st.just(b"-"), ERRORS), min_size=1, max_size=8
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


def spoken(kind: bytes, reply: bytes) -> bytes:
    return b"-%b\r\n" % reply if kind == b"-" else b"$%d\r\n%b\r\n" % (len(reply), reply)


@given(REPLIES, st.lists(st.integers(1, 60), max_size=60))
def test_t4_replies_stand_in_order_however_they_are_cut(
    replies: list[tuple[bytes, bytes]], pieces: list[int]
) -> None:
    stream = b"".join(spoken(kind, reply) for kind, reply in replies)

    block = np.empty(room_for(len(replies), SIZE), dtype=np.uint8)
    values = receive_values(Wire(stream, pieces), len(replies), SIZE, block)

    found = zip(values.replies, values.starts.tolist(), replies, strict=True)
    for value, start, (kind, reply) in found:
        if kind == b"-":
            assert isinstance(value, exceptions.ResponseError)
            assert str(value) == reply.decode()
        else:
            assert isinstance(value, memoryview)
            assert value == reply
            assert values.block[start : start + len(reply)].tobytes() == reply


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"", "the end of the connection"),
        (b"$40\r\n" + bytes(39), "the end of the connection"),
        (b"$40\r\n" + bytes(42), "a value that is not 40 B long"),
        (b"$41\r\n" + bytes(41) + b"\r\n", "in the place of a length of at most 40"),
        (b"$-1\r\n", "in the place of a length of at most 40"),
        (b"$4x\r\n", "in the place of a length of at most 40"),
        (b"$\r\n", "in the place of a length of at most 40"),
        (b":5\r\n", "in the place of a value"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "in the place of a value"),
        (bytes(600), "in the place of a value"),
        (b"$2\r\nab\r\n$2\r\nab\r\n", "8 B that nobody asked for"),
    ],
)
def test_t1_a_stream_of_something_else_is_given_up(stream: bytes, reason: str) -> None:
    with pytest.raises(exceptions.ConnectionError, match=reason):
        receive_values(Wire(stream, []), 1, SIZE, np.empty(room_for(1, SIZE), dtype=np.uint8))


def test_a_server_that_loads_its_data_is_not_ready_yet() -> None:
    with pytest.raises(exceptions.BusyLoadingError):
        receive_values(
            Wire(b"-LOADING Redis is busy\r\n", []),
            1,
            SIZE,
            np.empty(room_for(1, SIZE), dtype=np.uint8),
        )


def test_commands_are_packed_and_values_are_sent_from_where_they_lie() -> None:
    value = memoryview(bytearray(b"12345"))

    pieces = packed([("SET", "a", value, "EX", 10), ("GET", b"b")])

    assert pieces[1] is value
    assert b"".join(pieces) == (
        b"*5\r\n$3\r\nSET\r\n$1\r\na\r\n$5\r\n12345\r\n$2\r\nEX\r\n$2\r\n10\r\n"
        b"*2\r\n$3\r\nGET\r\n$1\r\nb\r\n"
    )


def test_replies_that_came_as_bytes_are_values_too() -> None:
    error = exceptions.ResponseError("WRONGTYPE")
    block = np.zeros(5, dtype=np.uint8)

    values = values_of([b"abc", error, b"", b"de"], 3, block)

    assert block.tobytes() == b"abcde"
    assert values.starts.tolist() == [0, 3, 3, 3]
    assert [bytes(v) if isinstance(v, memoryview) else v for v in values.replies] == [
        *(b"abc", error, b"", b"de")
    ]
    with pytest.raises(StoreError, match="2 B were asked for, and 3 B came"):
        values_of([b"abc"], 2, block)


def test_a_block_is_lent_to_one_at_a_time_and_used_again() -> None:
    blocks = Blocks(largest=100)

    with blocks.lent(80) as first, blocks.lent(50) as second:
        assert (len(first), len(second)) == (80, 50)
        assert not np.shares_memory(first, second)
    with blocks.lent(60) as third, blocks.lent(40) as fourth:
        assert np.shares_memory(third, first)
        assert np.shares_memory(fourth, second)
    with blocks.lent(200) as long:
        pass
    with blocks.lent(200) as longer:
        assert not np.shares_memory(long, longer)
