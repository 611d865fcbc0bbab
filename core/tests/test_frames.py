"""Tests of object headers: what was written is told from what was not, and no number in one is trusted."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlinker.errors import ContractError
from kvlinker.frames import (
    MAX_RANGES,
    PREFIX_BYTES,
    FrameHeaders,
    FrameLayout,
    FrameStatus,
    decode_headers,
    encode_headers,
    header_bytes,
    read_header_bytes,
    read_range_count,
)

LAYOUT = FrameLayout(offsets=(0, 100, 160), sizes=(100, 60, 40))
KEYS = tuple(bytes([i]) * 32 for i in range(1, 5))
FINGERPRINT = b"layout of sixteen"[:16]
SUMS = np.arange(12, dtype=np.uint64).reshape(4, 3) + np.uint64(2**63)
RANGE_AT = PREFIX_BYTES
"""Where the table of ranges begins: offset, size and checksum, 8 bytes each."""


def checksum(data: memoryview) -> int:
    return zlib.crc32(data) << 32 | zlib.adler32(data)


def encode(layout: FrameLayout = LAYOUT) -> NDArray[np.uint8]:
    return encode_headers(layout, KEYS, FINGERPRINT, SUMS, checksum=checksum)


def decode(
    raw: NDArray[np.uint8],
    *,
    keys: tuple[bytes, ...] = KEYS,
    fingerprint: bytes = FINGERPRINT,
    payload_bytes: int = 200,
) -> FrameHeaders:
    return decode_headers(
        raw,
        ranges=3,
        keys=keys,
        fingerprint=fingerprint,
        payload_bytes=payload_bytes,
        checksum=checksum,
    )


def reseal(raw: NDArray[np.uint8], row: int) -> None:
    """Make the header's own checksum right again, as a writer with a fault or a grudge would."""
    raw[row, 8:16] = np.frombuffer(
        checksum(memoryview(raw[row, 16:].tobytes())).to_bytes(8, "little"), dtype=np.uint8
    )


def test_t1_headers_read_back_as_they_were_written() -> None:
    headers = decode(encode())

    assert headers.status.tolist() == [FrameStatus.INTACT] * 4
    assert headers.offsets.tolist() == [[0, 100, 160]] * 4
    assert headers.sizes.tolist() == [[100, 60, 40]] * 4
    assert headers.checksums.tolist() == SUMS.tolist()
    assert headers.is_uniform


def test_a_header_is_a_multiple_of_64_bytes_and_says_its_own_length() -> None:
    raw = encode()

    assert raw.shape == (4, header_bytes(3)) == (4, LAYOUT.header_bytes)
    assert header_bytes(3) == 256  # 128 + 3 * 24 = 200
    assert read_header_bytes(raw[0, :PREFIX_BYTES].tobytes()) == 256
    assert read_range_count(raw[0, :PREFIX_BYTES].tobytes()) == 3


@pytest.mark.parametrize(
    ("prefix", "why"),
    [
        (b"", "nothing"),
        (bytes(PREFIX_BYTES), "zeros"),
        (b"\xff" * PREFIX_BYTES, "ones"),
    ],
)
def test_bytes_that_begin_no_header_have_no_header_length(prefix: bytes, why: str) -> None:
    assert read_header_bytes(prefix) is None, why
    assert read_range_count(prefix) is None, why


def test_t1_a_number_of_ranges_out_of_bounds_gives_no_header_length() -> None:
    raw = encode()
    raw[0, 20:24] = 0
    raw[1, 20:24] = np.frombuffer((MAX_RANGES + 1).to_bytes(4, "little"), dtype=np.uint8)

    assert read_header_bytes(raw[0].tobytes()) is None
    assert read_header_bytes(raw[1].tobytes()) is None


@given(row=st.integers(0, 3), byte=st.integers(0, 255), flip=st.integers(1, 255))
def test_t1_any_changed_byte_makes_one_header_foreign_or_broken(
    row: int, byte: int, flip: int
) -> None:
    raw = encode()
    raw[row, byte] ^= flip

    status = decode(raw).status.tolist()

    assert status[row] in (FrameStatus.FOREIGN, FrameStatus.BROKEN)
    assert status[:row] + status[row + 1 :] == [FrameStatus.INTACT] * 3


@pytest.mark.parametrize("byte", range(8, 16))
def test_t1_every_bit_of_a_header_checksum_counts_where_others_lie_beyond_half_of_their_range(
    byte: int,
) -> None:
    raw = encode()
    sums = raw[:, 8:16].copy().view("<u8").ravel()
    assert sums.min() < 2**63 <= sums.max()
    raw[0, byte] ^= 1

    status = decode(raw).status.tolist()

    assert status == [FrameStatus.BROKEN] + [FrameStatus.INTACT] * 3


def test_t1_zeros_and_another_version_are_foreign() -> None:
    raw = encode()
    raw[0] = 0
    raw[1, 16] = 2  # version
    reseal(raw, 1)

    assert decode(raw).status.tolist() == [FrameStatus.FOREIGN] * 2 + [FrameStatus.INTACT] * 2


def test_t1_the_header_of_another_key_is_foreign() -> None:
    swapped = (KEYS[1], KEYS[0], *KEYS[2:])

    status = decode(encode(), keys=swapped).status.tolist()

    assert status == [FrameStatus.FOREIGN] * 2 + [FrameStatus.INTACT] * 2


def test_dh9_another_length_or_fingerprint_is_foreign() -> None:
    raw = encode()

    assert set(decode(raw, payload_bytes=201).status) == {FrameStatus.FOREIGN}
    assert set(decode(raw, fingerprint=b"another").status) == {FrameStatus.FOREIGN}


def test_a_fingerprint_differs_from_the_same_one_with_zeros_behind_it() -> None:
    raw = encode_headers(LAYOUT, KEYS, b"ab", SUMS, checksum=checksum)

    assert set(decode(raw, fingerprint=b"ab").status) == {FrameStatus.INTACT}
    assert set(decode(raw, fingerprint=b"ab\0").status) == {FrameStatus.FOREIGN}


@pytest.mark.parametrize("rows", [[2], None], ids=["one", "all"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, 8),  # the first range does not begin at 0
        (1, 2**64 - 1),  # a size that overflows any sum
        (1, 0),
        (3, 99),  # the second range overlaps the first
        (3, 2**64 - 50),
        (7, 41),  # the last range leaves the object
        (7, 39),  # or ends before it
    ],
)
def test_t1_b82_ranges_that_do_not_tile_the_payload_are_broken_although_the_checksum_is_right(
    field: int, value: int, rows: list[int] | None
) -> None:
    raw = encode()
    at = RANGE_AT + field * 8
    for row in rows or range(len(raw)):
        raw[row, at : at + 8] = np.frombuffer(value.to_bytes(8, "little"), dtype=np.uint8)
        reseal(raw, row)

    status = decode(raw).status

    assert np.flatnonzero(status == FrameStatus.BROKEN).tolist() == (rows or [*range(len(raw))])


def test_decoding_reads_strided_rows_of_a_mapped_file() -> None:
    slab = np.zeros((4, 1000), dtype=np.uint8)
    slab[:, : LAYOUT.header_bytes] = encode()

    headers = decode(slab[:, : LAYOUT.header_bytes])

    assert headers.status.tolist() == [FrameStatus.INTACT] * 4


def test_an_empty_batch_has_no_headers() -> None:
    raw = encode_headers(LAYOUT, (), b"", np.empty((0, 3), dtype=np.uint64), checksum=checksum)

    headers = decode(raw, keys=(), fingerprint=b"")

    assert raw.shape == (0, 256)
    assert headers.status.tolist() == []


def test_headers_of_two_layouts_are_not_uniform() -> None:
    other = FrameLayout(offsets=(0, 40, 100), sizes=(40, 60, 100))
    raw = np.concatenate([encode()[:2], encode(other)[2:]])

    headers = decode(raw)

    assert headers.status.tolist() == [FrameStatus.INTACT] * 4
    assert not headers.is_uniform


@pytest.mark.parametrize(
    ("offsets", "sizes", "expected"),
    [
        ([0], [200], [0, 1, 2]),
        ([100], [60], [1]),
        ([99], [1], [0]),
        ([99], [2], [0, 1]),
        ([160, 0], [40, 1], [0, 2]),
        ([199], [1], [2]),
        ([], [], []),
    ],
)
def test_covering_names_the_ranges_whose_checksums_vouch_for_some_bytes(
    offsets: list[int], sizes: list[int], expected: list[int]
) -> None:
    columns = (np.array(offsets, dtype=np.int64), np.array(sizes, dtype=np.int64))

    assert decode(encode()).covering(0, *columns).tolist() == expected


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (199, 2), (200, 1)])
def test_bytes_outside_of_the_object_are_covered_by_nothing(offset: int, size: int) -> None:
    columns = (np.array([offset], dtype=np.int64), np.array([size], dtype=np.int64))

    with pytest.raises(ContractError, match="leave an object of 200 B"):
        decode(encode()).covering(0, *columns)


def test_a_layout_takes_ranges_in_any_order() -> None:
    layout = FrameLayout.of_ranges(np.array([160, 0, 100]), np.array([40, 100, 60]))

    assert layout == LAYOUT
    assert layout.payload_bytes == 200


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [((), ()), ((0,), (4, 4)), ((4,), (4,)), ((0, 5), (4, 4)), ((0, 3), (4, 4)), ((0,), (0,))],
)
def test_ranges_that_do_not_tile_are_no_layout(
    offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    with pytest.raises(ContractError, match="ranges"):
        FrameLayout(offsets=offsets, sizes=sizes)


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ContractError, match="32 bytes, got 3"):
        encode_headers(LAYOUT, (b"key",), b"", SUMS[:1], checksum=checksum)


def test_a_fingerprint_that_is_too_long_is_refused() -> None:
    with pytest.raises(ContractError, match="at most 32 bytes, got 33"):
        encode_headers(LAYOUT, KEYS, bytes(33), SUMS, checksum=checksum)


def test_checksums_and_headers_of_another_shape_are_refused() -> None:
    with pytest.raises(ContractError, match=r"checksums of shape \(4, 3\), got \(3, 3\)"):
        encode_headers(LAYOUT, KEYS, b"", SUMS[:3], checksum=checksum)
    with pytest.raises(ContractError, match=r"headers of shape \(4, 256\), got \(4, 192\)"):
        decode(encode()[:, :192])
