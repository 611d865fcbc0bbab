"""Frames put a header in front of an object's payload, so that a reader can tell whether its bytes are right.

Stored bytes are data: every number in a header is checked before it is used. Headers of a batch are
encoded and decoded as numpy columns; the checksum function is the store's choice and is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import ContractError
from kvlinker.keys import OBJECT_KEY_BYTES
from kvlinker.moving import range_sums

__all__ = [
    "FRAME_VERSION",
    "MAX_FINGERPRINT_BYTES",
    "MAX_RANGES",
    "PREFIX_BYTES",
    "Checksum",
    "FrameHeaders",
    "FrameLayout",
    "FrameStatus",
    "decode_headers",
    "encode_headers",
    "header_bytes",
    "is_prefix_of",
    "read_header_bytes",
    "read_range_count",
    "read_range_counts",
]

Checksum: TypeAlias = Callable[[memoryview], int]
"""A checksum of 64 bits; the same one must write and read."""

FRAME_VERSION = 1
PREFIX_BYTES = 128
"""The part of a header that does not depend on the number of ranges."""
MAX_RANGES = 1 << 16
MAX_FINGERPRINT_BYTES = 32
_ALIGNMENT = 64
"""Payloads begin on a cache line."""
_MAGIC = int.from_bytes(b"kvlframe", "little")

_PREFIX = np.dtype(
    [
        ("magic", "<u8"),
        ("header_checksum", "<u8"),  # of everything behind it
        ("version", "<u2"),
        ("fingerprint_bytes", "<u2"),
        ("ranges", "<u4"),
        ("payload_bytes", "<u8"),
        ("key", "<u8", (OBJECT_KEY_BYTES // 8,)),
        ("fingerprint", "<u8", (MAX_FINGERPRINT_BYTES // 8,)),
        ("reserved", "<u8", (4,)),
    ]
)
_RANGE = np.dtype([("offset", "<u8"), ("size", "<u8"), ("checksum", "<u8")])
_CHECKED_FROM = 16
"""Where the bytes begin that the header's checksum covers."""
_PREFIX_WORDS = PREFIX_BYTES // 8  # words of 8 bytes
_RANGE_WORDS = _RANGE.itemsize // 8
_CHECKSUM_WORD = 1
_KEY_WORDS = slice(4, 4 + OBJECT_KEY_BYTES // 8)


def header_bytes(ranges: int) -> int:
    """Return the bytes of a header with so many ranges; a multiple of 64."""
    raw = PREFIX_BYTES + ranges * _RANGE.itemsize
    return -(-raw // _ALIGNMENT) * _ALIGNMENT


@cache
def _header_dtype(ranges: int) -> np.dtype[np.void]:
    size = header_bytes(ranges)
    padding = size - PREFIX_BYTES - ranges * _RANGE.itemsize
    return np.dtype(
        [("prefix", _PREFIX), ("table", _RANGE, (ranges,)), ("padding", "u1", (padding,))]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLayout:
    """An object's payload as ranges that are read alone: they tile it, in ascending order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.sizes) <= MAX_RANGES or len(self.offsets) != len(self.sizes):
            msg = (
                f"an object needs 1 to {MAX_RANGES} ranges with one size each, "
                f"got {len(self.offsets)} offsets and {len(self.sizes)} sizes"
            )
            raise ContractError(msg)
        end = 0
        for offset, size in zip(self.offsets, self.sizes, strict=True):
            if offset != end or size < 1:
                msg = f"ranges must tile the object: expected one at {end}, got [{offset}, {offset + size})"
                raise ContractError(msg)
            end = offset + size

    @classmethod
    def of_ranges(cls, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> FrameLayout:
        """Return the layout of ranges in any order, such as a plan's offsets and range bytes.

        Raises:
            ContractError: they do not tile an object.
        """
        order = np.argsort(offsets, kind="stable")
        return cls(offsets=tuple(offsets[order].tolist()), sizes=tuple(sizes[order].tolist()))

    def is_of(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
        """Whether these are the ranges, in this order."""
        return np.array_equal(offsets, self.offsets) and np.array_equal(sizes, self.sizes)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the object."""
        return self.offsets[-1] + self.sizes[-1]

    @property
    def header_bytes(self) -> int:
        """Bytes of the header in front of it."""
        return header_bytes(len(self.sizes))


class FrameStatus(IntEnum):
    """What a header says of the object behind it."""

    INTACT = 0
    FOREIGN = 1
    """No header of this version, or another object's."""
    BROKEN = 2
    """A header of this version whose bytes are not what was written."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FrameHeaders:
    """Decoded headers of a batch, in order; the tables are safe to use where the status is INTACT."""

    status: NDArray[np.uint8]
    """[objects] values of FrameStatus."""
    offsets: NDArray[np.int64]
    """[objects, ranges]"""
    sizes: NDArray[np.int64]
    """[objects, ranges]"""
    checksums: NDArray[np.uint64]
    """[objects, ranges]"""

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all intact objects have the same ranges, as those of one layout have."""
        if self.offsets.strides[0] == self.sizes.strides[0] == 0:
            return True  # one row stands for all
        table = np.stack([self.offsets, self.sizes], axis=1)[self.status == FrameStatus.INTACT]
        return bool(np.all(table == table[:1]))

    def covering(
        self, index: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return which ranges of object `index` hold the given bytes, ascending: their checksums vouch for them.

        Raises:
            ContractError: the bytes leave the object.
        """
        table, ends = self.offsets[index], self.offsets[index] + self.sizes[index]
        low, high = int(offsets.min(initial=0)), int((offsets + sizes).max(initial=0))
        if low < 0 or high > int(ends[-1]):
            msg = f"bytes [{low}, {high}) leave an object of {int(ends[-1])} B"
            raise ContractError(msg)
        first = np.searchsorted(ends, offsets, side="right")
        behind = np.searchsorted(table, offsets + sizes, side="left")
        marks = np.zeros(len(table) + 1, dtype=np.int64)
        np.add.at(marks, first, 1)
        np.add.at(marks, behind, -1)
        return np.flatnonzero(np.cumsum(marks[:-1]) > 0)


def encode_headers(
    layout: FrameLayout,
    keys: Sequence[bytes],
    fingerprint: bytes,
    checksums: NDArray[np.uint64],
    *,
    checksum: Checksum,
) -> NDArray[np.uint8]:
    """Return the headers of a batch: bytes [objects, header_bytes].

    Args:
        layout: of every object.
        keys: one of 32 bytes per object.
        fingerprint: of the layout, up to 32 bytes.
        checksums: [objects, ranges] of the stored bytes.
        checksum: makes the header's own.

    Raises:
        ContractError: a key or the fingerprint has a wrong length, or the shapes differ.
    """
    shape = (len(keys), len(layout.sizes))
    if checksums.shape != shape:
        msg = f"expected checksums of shape {shape}, got {checksums.shape}"
        raise ContractError(msg)
    headers = np.zeros(len(keys), dtype=_header_dtype(shape[1]))
    prefix, table = headers["prefix"], headers["table"]
    prefix["magic"], prefix["version"] = _MAGIC, FRAME_VERSION
    prefix["ranges"], prefix["payload_bytes"] = shape[1], layout.payload_bytes
    prefix["fingerprint_bytes"] = len(fingerprint)
    prefix["key"], prefix["fingerprint"] = _key_words(keys), _fingerprint_words(fingerprint)
    table["offset"], table["size"], table["checksum"] = layout.offsets, layout.sizes, checksums
    raw = headers.view(np.uint8).reshape(len(keys), layout.header_bytes)
    prefix["header_checksum"] = _row_checksums(raw, checksum)
    return raw


def decode_headers(
    raw: NDArray[np.uint8],
    *,
    ranges: int,
    keys: Sequence[bytes],
    fingerprint: bytes,
    payload_bytes: int,
    checksum: Checksum,
) -> FrameHeaders:
    """Check the headers of a batch against what they must say, and return their tables.

    Args:
        raw: bytes [objects, header_bytes(ranges)], as they were read.
        ranges: number of ranges, the same in all.
        keys: one per object.
        fingerprint: of the reader's layout.
        payload_bytes: of every object.
        checksum: the function that made the header's checksum.

    Raises:
        ContractError: the shape does not fit the arguments, or a key or the fingerprint has a wrong length.
    """
    if raw.shape != (len(keys), header_bytes(ranges)):
        msg = f"expected headers of shape {(len(keys), header_bytes(ranges))}, got {raw.shape}"
        raise ContractError(msg)
    raw = np.ascontiguousarray(raw)
    sums = _row_checksums(raw, checksum)
    if (found := _as_expected(raw, sums, ranges, keys, fingerprint, payload_bytes)) is not None:
        return found
    headers = raw.view(_header_dtype(ranges)).reshape(len(keys))
    prefix, table = headers["prefix"], headers["table"]
    is_frame = (prefix["magic"] == _MAGIC) & (prefix["version"] == FRAME_VERSION)
    is_whole = prefix["header_checksum"] == sums
    is_own = (
        (prefix["ranges"] == ranges)
        & (prefix["payload_bytes"] == payload_bytes)
        & (prefix["fingerprint_bytes"] == len(fingerprint))
        & (prefix["fingerprint"] == _fingerprint_words(fingerprint)).all(axis=1)
        & (prefix["key"] == _key_words(keys)).all(axis=1)
    )
    tiles = _tiles(table["offset"], table["size"], payload_bytes)
    status = np.full(len(keys), FrameStatus.INTACT, dtype=np.uint8)
    status[~is_own] = FrameStatus.FOREIGN
    status[is_own & ~tiles] = FrameStatus.BROKEN
    status[~is_whole] = FrameStatus.BROKEN
    status[~is_frame] = FrameStatus.FOREIGN
    return FrameHeaders(
        status=status,
        offsets=table["offset"].astype(np.int64),
        sizes=table["size"].astype(np.int64),
        checksums=np.ascontiguousarray(table["checksum"]),
    )


def _as_expected(
    raw: NDArray[np.uint8],
    sums: NDArray[np.uint64],
    ranges: int,
    keys: Sequence[bytes],
    fingerprint: bytes,
    payload_bytes: int,
) -> FrameHeaders | None:
    """Return the headers where every one is what it must be, all with the same ranges; None where one is not.

    So it is nearly always, and found out by a few comparisons of words, where loads wait for it.
    """
    words = raw.view("<u8")
    expected = np.empty((len(keys), _PREFIX_WORDS), dtype="<u8")
    expected[:] = _prefix_words(ranges, payload_bytes, fingerprint)
    expected[:, _CHECKSUM_WORD] = sums
    expected[:, _KEY_WORDS] = _key_words(keys)
    behind = _PREFIX_WORDS + _RANGE_WORDS * ranges
    table = words[:, _PREFIX_WORDS:behind].reshape(len(keys), ranges, _RANGE_WORDS)
    is_expected = (
        len(keys)
        and np.array_equal(words[:, :_PREFIX_WORDS], expected)
        and (table[1:, :, :2] == table[0, :, :2]).all()
    )
    columns = _tiling(table[0, :, :2].tobytes(), payload_bytes) if is_expected else None
    if columns is None:
        return None
    return FrameHeaders(
        status=np.full(len(keys), FrameStatus.INTACT, dtype=np.uint8),
        offsets=np.broadcast_to(columns[0], (len(keys), ranges)),
        sizes=np.broadcast_to(columns[1], (len(keys), ranges)),
        checksums=np.ascontiguousarray(table[:, :, 2]),
    )


@lru_cache(maxsize=64)
def _prefix_words(ranges: int, payload_bytes: int, fingerprint: bytes) -> NDArray[np.uint64]:
    """Return what a prefix has beside its checksum and its key: the same for all objects of a layout."""
    prefix = np.zeros(1, dtype=_PREFIX)
    prefix["magic"], prefix["version"], prefix["ranges"] = _MAGIC, FRAME_VERSION, ranges
    prefix["payload_bytes"], prefix["fingerprint_bytes"] = payload_bytes, len(fingerprint)
    prefix["fingerprint"] = _fingerprint_words(fingerprint)
    return np.frombuffer(prefix.tobytes(), dtype="<u8")  # read-only: it is kept


@lru_cache(maxsize=64)
def _tiling(table: bytes, payload_bytes: int) -> NDArray[np.int64] | None:
    """Return a table's offsets and sizes as rows; None where they do not tile a payload. Engines have few tables."""
    columns = np.frombuffer(table, dtype="<u8").reshape(-1, 2)
    if not _tiles(columns[None, :, 0], columns[None, :, 1], payload_bytes).all():
        return None
    return np.frombuffer(columns.T.astype(np.int64).tobytes(), dtype=np.int64).reshape(2, -1)


def read_range_count(prefix: bytes | memoryview) -> int | None:
    """Return how many ranges the header has that begins with these 128 bytes, or None if none begins so."""
    if len(prefix) < PREFIX_BYTES:
        return None
    fields = np.frombuffer(prefix, dtype=_PREFIX, count=1)[0]
    is_frame = fields["magic"] == _MAGIC and fields["version"] == FRAME_VERSION
    ranges = int(fields["ranges"])
    return ranges if is_frame and 0 < ranges <= MAX_RANGES else None


def read_range_counts(prefixes: Sequence[bytes | memoryview]) -> list[int]:
    """Return how many ranges the headers have that begin so, 0 for each that is none; see `read_range_count`."""
    rows = [raw if len(raw) == PREFIX_BYTES else bytes(PREFIX_BYTES) for raw in prefixes]
    fields = np.frombuffer(b"".join(rows), dtype=_PREFIX)
    is_frame = (fields["magic"] == _MAGIC) & (fields["version"] == FRAME_VERSION)
    counts = np.where(is_frame & (fields["ranges"] <= MAX_RANGES), fields["ranges"], 0)
    return [int(count) for count in counts]


def is_prefix_of(
    prefix: bytes | memoryview, *, key: bytes, fingerprint: bytes, payload_bytes: int
) -> bool:
    """Whether a header of these 128 bytes says that it is this object's; whether it is right, all of it tells."""
    fields = np.frombuffer(prefix, dtype=_PREFIX, count=1)[0]
    return bool(
        fields["payload_bytes"] == payload_bytes
        and fields["fingerprint_bytes"] == len(fingerprint)
        and (fields["fingerprint"] == _fingerprint_words(fingerprint)).all()
        and (fields["key"] == _key_words([key])[0]).all()
    )


def read_header_bytes(prefix: bytes | memoryview) -> int | None:
    """Return how many bytes the header has that begins with these 128, or None if none begins so."""
    ranges = read_range_count(prefix)
    return None if ranges is None else header_bytes(ranges)


def _tiles(
    offsets: NDArray[np.uint64], sizes: NDArray[np.uint64], payload_bytes: int
) -> NDArray[np.bool_]:
    """[objects] whether the ranges tile the payload; no sum can overflow before it is refused."""
    limit = np.uint64(payload_bytes)
    bounded = np.all((sizes > 0) & (sizes <= limit) & (offsets <= limit), axis=1)
    ends = np.where(bounded[:, None], offsets + sizes, np.uint64(0))
    follows = np.all(offsets[:, 1:] == ends[:, :-1], axis=1) & (offsets[:, 0] == 0)
    return np.asarray(bounded & follows & (ends[:, -1] == limit), dtype=np.bool_)


def _row_checksums(raw: NDArray[np.uint8], checksum: Checksum) -> NDArray[np.uint64]:
    starts = np.arange(len(raw), dtype=np.int64) * raw.shape[1] + _CHECKED_FROM
    sizes = np.full(len(raw), raw.shape[1] - _CHECKED_FROM, dtype=np.int64)
    sums: NDArray[np.uint64] = range_sums(checksum, [raw.reshape(-1).data], starts, sizes)[0]
    return sums


def _key_words(keys: Sequence[bytes]) -> NDArray[np.uint64]:
    for key in keys:
        if len(key) != OBJECT_KEY_BYTES:
            msg = f"an object key has {OBJECT_KEY_BYTES} bytes, got {len(key)}"
            raise ContractError(msg)
    words = np.frombuffer(b"".join(keys), dtype="<u8")
    return words.reshape(len(keys), OBJECT_KEY_BYTES // 8)


def _fingerprint_words(fingerprint: bytes) -> NDArray[np.uint64]:
    if len(fingerprint) > MAX_FINGERPRINT_BYTES:
        msg = f"a fingerprint has at most {MAX_FINGERPRINT_BYTES} bytes, got {len(fingerprint)}"
        raise ContractError(msg)
    return np.frombuffer(fingerprint.ljust(MAX_FINGERPRINT_BYTES, b"\0"), dtype="<u8")
