"""Compression makes a stream of an object: a table of blocks, and the blocks, each of which can be read alone.

Blocks end where ranges end, so that a layer is unpacked without its neighbours. The bytes of a block are split
into planes, the first bytes of its items, the second ones and so on: the high bytes of 16-bit values are alike,
the low ones are not. A plane that Zstandard (RFC 8878) does not make shorter is kept as it is, and so is an object.

Streams are data: every number in a table is checked before it is used, and nothing is unpacked to more bytes than
are expected.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.errors import UnsupportedOperationError

__all__ = [
    "ITEM_BYTES",
    "PREFIX_BYTES",
    "RAW_EXTRA_BYTES",
    "Packer",
    "StreamTable",
    "Unpacker",
    "check_installed",
    "cut_blocks",
]

ITEM_BYTES = (1, 2, 4, 8)
"""Bytes of an item: its bytes go to as many planes."""
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 4 << 10, 64 << 10
_MAGIC = int.from_bytes(b"kvlzstd1", "little")
_PREFIX = np.dtype([("magic", "<u8"), ("planes", "<u4"), ("blocks", "<u4")])
PREFIX_BYTES = _PREFIX.itemsize
RAW_EXTRA_BYTES = PREFIX_BYTES
"""What a stream has more than the object, where it was kept as it is."""
_MAX_WINDOW_BYTES = 1 << 20


def check_installed() -> None:
    """Refuse where the library is not there.

    Raises:
        UnsupportedOperationError: it says what to install.
    """
    if importlib.util.find_spec("zstandard") is None:
        msg = "a compressed store needs a codec; pip install 'kvlinker[compression]'"
        raise UnsupportedOperationError(msg)


def cut_blocks(offsets: IndexArray, sizes: IndexArray) -> Sequence[int]:
    """Return where blocks end: short ranges side by side make one, and long ones are cut.

    Args:
        offsets: of ranges that tile an object, in any order.
        sizes: of the same.
    """
    ends: list[int] = []
    start = 0
    for end in np.sort(offsets + sizes).tolist():
        if end - start < _MIN_BLOCK_BYTES:
            continue
        ends += range(start + _MAX_BLOCK_BYTES, end, _MAX_BLOCK_BYTES)
        ends.append(end)
        start = end
    whole = int((offsets + sizes).max())
    if start < whole:
        ends.append(whole)
    return ends


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamTable:
    """Where the blocks of an object lie in its stream."""

    object_bytes: int
    planes: int
    """0 where the object was kept as it is."""
    ends: IndexArray
    """[blocks] where each ends in the object."""
    sizes: IndexArray
    """[blocks, planes] stored bytes of each plane."""
    starts: IndexArray
    """[blocks + 1] where each begins in the stream, and where the last one ends."""
    form: bytes
    """The same for objects whose blocks end at the same places."""

    @classmethod
    def size_of(cls, prefix: NDArray[np.uint8]) -> int | None:
        """Return the bytes of the table that begins so; None where none does."""
        head = prefix[:PREFIX_BYTES].view(_PREFIX)[0]
        planes, blocks = int(head["planes"]), int(head["blocks"])
        if head["magic"] != _MAGIC or planes not in (0, *ITEM_BYTES) or (not planes and blocks):
            return None
        return PREFIX_BYTES + blocks * (1 + planes) * 4

    @classmethod
    def decode(
        cls, stream: NDArray[np.uint8], *, object_bytes: int, stream_bytes: int
    ) -> StreamTable | None:
        """Return the table that a stream begins with; None where it is not one of such an object.

        Args:
            stream: at least the table.
            object_bytes: of the object.
            stream_bytes: of the whole stream.
        """
        size = cls.size_of(stream)
        if size is None or size > len(stream):
            return None
        head = stream[:PREFIX_BYTES].view(_PREFIX)[0]
        planes = int(head["planes"])
        columns = stream[PREFIX_BYTES:size].view("<u4").reshape(-1, 1 + planes).astype(np.int64)
        lengths, sizes = columns[:, 0], columns[:, 1:]
        table = cls(
            object_bytes=object_bytes,
            planes=planes,
            ends=np.cumsum(lengths),
            sizes=sizes,
            starts=np.cumsum([size, *sizes.sum(axis=1).tolist()]),
            form=lengths.tobytes(),
        )
        return table if table._is_sound(lengths, stream_bytes) else None

    def _is_sound(self, lengths: IndexArray, stream_bytes: int) -> bool:
        if not self.planes:
            return stream_bytes == self.object_bytes + RAW_EXTRA_BYTES
        plane = np.arange(self.planes)
        longest = (lengths[:, None] - plane + self.planes - 1) // self.planes
        return bool(
            len(lengths)
            and ((lengths > 0) & (lengths <= _MAX_BLOCK_BYTES)).all()
            and self.ends[-1] == self.object_bytes
            and (self.sizes <= longest).all()
            and self.starts[-1] <= stream_bytes
        )

    def blocks_of(self, offsets: IndexArray, sizes: IndexArray) -> IndexArray:
        """Return the blocks that ranges of the object lie in, ascending; none where it was kept as it is."""
        if not self.planes:
            return np.arange(0)
        first = np.searchsorted(self.ends, offsets, side="right")
        last = np.searchsorted(self.ends, offsets + sizes - 1, side="right")
        marks = np.zeros(len(self.ends) + 1, dtype=np.int64)
        np.add.at(marks, first, 1)
        np.add.at(marks, last + 1, -1)
        return np.flatnonzero(np.cumsum(marks[:-1]) > 0)

    def places_of(
        self, blocks: IndexArray, ranges: tuple[IndexArray, IndexArray]
    ) -> tuple[IndexArray, IndexArray]:
        """Return where the stream has what ranges of the object need: beginnings and ends.

        Args:
            blocks: in which the ranges lie; none where the object was kept as it is.
            ranges: offsets and sizes.
        """
        if not self.planes:
            begins = ranges[0] + RAW_EXTRA_BYTES
            return begins, begins + ranges[1]
        return self.starts[blocks], self.starts[blocks + 1]


class Packer:
    """Makes streams of objects; for one thread at a time."""

    def __init__(self, *, level: int, item_bytes: int) -> None:
        """Take the effort that Zstandard makes, and the bytes of an item."""
        from zstandard import ZstdCompressor

        self._compressor = ZstdCompressor(level=level)
        self._planes = item_bytes

    def pack(self, content: NDArray[np.uint8], ends: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return the stream of an object, in pieces.

        Args:
            content: the object's bytes.
            ends: of its blocks.
        """
        pieces: list[NDArray[np.uint8]] = []
        table = np.empty((len(ends), 1 + self._planes), dtype="<u4")
        start = 0
        for row, end in zip(table, ends, strict=True):
            packed = [
                self._plane(content[start + i : end : self._planes]) for i in range(self._planes)
            ]
            row[0], row[1:] = end - start, [len(plane) for plane in packed]
            pieces += packed
            start = end
        stream = [_prefix(self._planes, len(ends)), table.view(np.uint8).reshape(-1), *pieces]
        if sum(map(len, stream)) >= len(content) + RAW_EXTRA_BYTES:
            return [_prefix(0, 0), content]
        return stream

    def _plane(self, plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
        raw = np.ascontiguousarray(plane)
        packed = self._compressor.compress(raw.data)
        return np.frombuffer(packed, dtype=np.uint8) if len(packed) < len(raw) else raw


def _prefix(planes: int, blocks: int) -> NDArray[np.uint8]:
    return np.array([(_MAGIC, planes, blocks)], dtype=_PREFIX).view(np.uint8)


class Unpacker:
    """Makes objects of streams; for one thread at a time."""

    def __init__(self) -> None:
        """Make a decompressor that reserves no more than a block needs."""
        from zstandard import ZstdDecompressor, ZstdError, get_frame_parameters

        self._decompressor = ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self._parameters_of, self._error = get_frame_parameters, ZstdError

    def unpack(
        self,
        table: StreamTable,
        stream: NDArray[np.uint8],
        blocks: IndexArray,
        ranges: tuple[IndexArray, IndexArray],
        target: NDArray[np.uint8],
    ) -> bool:
        """Unpack what ranges of an object need to its place; False where a block is not right.

        Args:
            table: of the stream.
            stream: its bytes, at least those of the blocks that are needed.
            blocks: in which the ranges lie, ascending.
            ranges: offsets and sizes.
            target: the object's bytes; others than those of the ranges may change too.
        """
        if not table.planes:
            for begin, size in zip(*(column.tolist() for column in ranges), strict=True):
                at = begin + RAW_EXTRA_BYTES
                target[begin : begin + size] = stream[at : at + size]
            return True
        return all(self._block(table, block, stream, target) for block in blocks.tolist())

    def _block(
        self, table: StreamTable, block: int, stream: NDArray[np.uint8], target: NDArray[np.uint8]
    ) -> bool:
        start, end = int(table.ends[block - 1]) if block else 0, int(table.ends[block])
        begin = int(table.starts[block])
        for i, size in enumerate(table.sizes[block].tolist()):
            place = target[start + i : end : table.planes]
            plane = self._plane(stream[begin : begin + size], len(place))
            if plane is None:
                return False
            place[:] = plane
            begin += size
        return True

    def _plane(self, stored: NDArray[np.uint8], size: int) -> NDArray[np.uint8] | None:
        """Return the bytes of a plane; None where they are not what was packed."""
        if len(stored) == size:
            return stored
        packed = stored.data
        try:
            # Before anything is reserved: the length that a frame claims may be any.
            if self._parameters_of(packed).content_size != size:
                return None
            return np.frombuffer(self._decompressor.decompress(packed), dtype=np.uint8)
        except self._error:
            return None
