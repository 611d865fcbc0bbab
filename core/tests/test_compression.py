"""Streams of compressed objects: what their tables may say, what unpacks, and which lengths they have."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_like import values
from numpy.typing import NDArray
from zstandard import ZstdCompressor

from kvlinker.stores.compression import (
    PREFIX_BYTES,
    RAW_EXTRA_BYTES,
    Packer,
    StreamTable,
    Unpacker,
    cut_blocks,
)
from kvlinker.stores.stream_lengths import StreamLengths


@pytest.fixture
def stream() -> NDArray[np.uint8]:
    """Return the stream of 40 KiB of values in two blocks."""
    pieces = Packer(level=1, item_bytes=2).pack(values(20 << 10, seed=0), [16 << 10, 40 << 10])
    return np.concatenate(pieces)


def table_of(stream: NDArray[np.uint8]) -> StreamTable | None:
    return StreamTable.decode(stream, object_bytes=40 << 10, stream_bytes=len(stream))


def unpacked(stream: NDArray[np.uint8]) -> bool:
    table = table_of(stream)
    assert table is not None
    ranges = np.array([0]), np.array([40 << 10])
    target = np.zeros(40 << 10, dtype=np.uint8)
    return Unpacker().unpack(table, stream, table.blocks_of(*ranges), ranges, target)


@pytest.mark.parametrize(
    ("at", "number"),
    [
        (0, 0),  # another magic
        (8, 3),  # planes that there are not
        (8, 0),  # none, and blocks
        (12, 1),  # a block less
        (12, 0xFFFFFFFF),
        (16, 0),  # a block of no bytes
        (16, 0x7FFFFFFF),
        (16, (16 << 10) + 1),  # blocks of more bytes than the object
        (20, (8 << 10) + 1),  # a plane of more bytes than there are
        (24, 0xFFFFFFFF),
    ],
)
def test_t1_a_table_with_a_wrong_number_is_refused(
    stream: NDArray[np.uint8], at: int, number: int
) -> None:
    assert table_of(stream) is not None
    stream[at : at + 4] = np.frombuffer(struct.pack("<I", number), dtype=np.uint8)

    assert table_of(stream) is None


def test_t1_a_table_longer_than_its_stream_is_refused(stream: NDArray[np.uint8]) -> None:
    assert table_of(stream[: PREFIX_BYTES + 4]) is None
    short = StreamTable.decode(stream, object_bytes=40 << 10, stream_bytes=len(stream) - 1)
    assert short is None


@pytest.mark.parametrize("is_told", [False, True], ids=["hidden", "told"])
def test_a_plane_that_unpacks_to_more_than_it_should_is_refused(
    stream: NDArray[np.uint8], *, is_told: bool
) -> None:
    bomb = ZstdCompressor(write_content_size=is_told).compress(bytes(16 << 20))
    table = table_of(stream)
    assert table is not None
    begin = int(table.starts[0]) + int(table.sizes[0, 0])
    stream[begin : begin + len(bomb)] = np.frombuffer(bomb, dtype=np.uint8)
    stream[24:28] = np.frombuffer(struct.pack("<I", len(bomb)), dtype=np.uint8)

    tracemalloc.start()
    is_right = unpacked(stream)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert not is_right
    assert peak < 1 << 20


def test_a_plane_that_is_no_frame_is_refused(stream: NDArray[np.uint8]) -> None:
    table = table_of(stream)
    assert table is not None
    begin = int(table.starts[0]) + int(table.sizes[0, 0])
    stream[begin : begin + 4] ^= 0xFF

    assert not unpacked(stream)


@given(
    sizes=st.lists(st.integers(1, 200_000), min_size=1, max_size=12),
    item_bytes=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 9),
    chosen=st.data(),
)
def test_every_range_of_an_object_unpacks_to_its_bytes(
    sizes: list[int], item_bytes: int, seed: int, chosen: st.DataObject
) -> None:
    size = np.array(sizes, dtype=np.int64)
    offset = np.cumsum(size) - size
    content = np.random.default_rng(seed).integers(
        0, 1 + 40 * seed, int(size.sum()), dtype=np.int64
    )
    plain = content.astype(np.uint8)
    ends = cut_blocks(offset, size)
    packed = np.concatenate(Packer(level=1, item_bytes=item_bytes).pack(plain, ends))
    table = StreamTable.decode(packed, object_bytes=len(plain), stream_bytes=len(packed))
    number = chosen.draw(st.integers(0, len(sizes) - 1))
    ranges = offset[number : number + 1], size[number : number + 1]
    target = np.zeros_like(plain)

    assert table is not None
    assert ends[-1] == len(plain)
    assert Unpacker().unpack(table, packed, table.blocks_of(*ranges), ranges, target)
    begin, end = int(offset[number]), int(offset[number] + size[number])
    assert np.array_equal(target[begin:end], plain[begin:end])
    assert len(packed) <= len(plain) + RAW_EXTRA_BYTES


@given(size=st.integers(1, 1 << 24), share=st.floats(0, 1))
def test_every_stream_has_a_length_that_a_reader_asks_for(size: int, share: float) -> None:
    lengths = StreamLengths()
    stream_bytes = max(1, int(share * (size + RAW_EXTRA_BYTES)))

    length = lengths.fitting(size, stream_bytes)

    candidates = lengths.candidates(size)
    assert stream_bytes <= length <= size + RAW_EXTRA_BYTES
    assert length in candidates
    assert len(set(candidates)) == len(candidates) <= 34
    lengths.note(size, length)
    assert lengths.usual(size) == length
    assert sorted(lengths.candidates(size)) == sorted(candidates)


def test_the_lengths_of_some_hundred_layouts_are_remembered_and_no_more() -> None:
    lengths = StreamLengths()
    sizes = range(1 << 16, (1 << 16) + 257)
    for size in sizes:
        lengths.note(size, lengths.fitting(size, size // 2))

    assert lengths.usual(sizes[-1]) == lengths.fitting(sizes[-1], sizes[-1] // 2)
    assert lengths.usual(sizes[0]) == sizes[0] + RAW_EXTRA_BYTES
