"""The layout of the shared tables: a header of words, segments, and a row for each slot.

Everything is a number of fixed size at a fixed place, so that every process reads it in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvlinker_file.buckets import KEY_WORDS, bucket_count

__all__ = [
    "HEADER_WORDS",
    "MAX_ROWS",
    "MAX_SEATS",
    "PAGE_BYTES",
    "ROW",
    "ROW_BYTES",
    "ROW_STEP",
    "SEGMENT",
    "UNCHECKED_WORDS",
    "RowState",
    "RowTable",
    "TableConfig",
    "Word",
    "row_count",
    "table_bytes",
]

MAX_SEATS = 64
"""Openers of one directory: a mark of a row has a bit for each."""

_MAGIC = int.from_bytes(b"kvltable", "little")
_LAYOUT = 2
PAGE_BYTES = 4096
MAX_ROWS = (1 << 30) - 1
ROW_STEP = 256
"""Rows that a table grows by at least, so that the file does not grow for every small segment."""
_MIN_SEGMENT_BYTES = 64 << 10
_SPARE_SEGMENTS = 64
_MAX_SEGMENTS = 8192

SEGMENT = np.dtype(
    [
        ("number", np.int64),
        ("first_row", np.int64),
        ("slots", np.int64),
        ("file_bytes", np.int64),
        ("payload_bytes", np.int64),
        ("ranges", np.int64),
        ("incarnation", np.int64),
        ("is_retired", np.int64),
        ("used", np.int64),
        ("objects", np.int64),
        ("busy", np.int64),
        ("ticks", np.float64),
    ]
)
ROW = np.dtype(
    [
        ("key", np.uint64, (KEY_WORDS,)),
        ("tick", np.int64),
        ("saved_tick", np.int64),
        ("layout", np.int64),
        ("pins", np.uint64),
        ("holds", np.uint64),
        ("held_until", np.int64),
        ("generation", np.uint32),
        ("state", np.uint8),
        ("is_saved", np.bool_),
        ("padding", np.uint8, (2,)),
    ]
)
ROW_BYTES = ROW.itemsize + 16
"""Bytes that a row may cost in both files: its own, and the buckets, four for each after they were doubled."""


class RowState(IntEnum):
    """What a row is: its slot is free, being written, an object's, or a removed object's."""

    FREE = 0
    TAKEN = 1
    LIVING = 2
    LEAVING = 3


class Word(IntEnum):
    """Places of the header's words of 64 bits."""

    MAGIC = 0
    LAYOUT = 1
    BOOT_LOW = 2
    BOOT_HIGH = 3
    CAPACITY = 4
    IS_DURABLE = 5
    TABLES_MARK = 6
    """Odd while the tables change; whoever finds it odd and the lock free knows that its holder died."""
    COMMIT_MARK = 7
    """Odd while the catalog is written."""
    ROWS = 8
    BUCKETS = 9
    BUCKETS_USED = 10
    OBJECTS = 11
    SEGMENTS_VERSION = 12
    """Grows with each change of the segments, so that every opener notices."""
    LAST_TICK = 13
    COMMITS = 14
    """Transactions of the catalog that the tables know; the catalog counts them too."""
    SEATS = 15
    """Mask of the seats that somebody took and nobody cleared."""
    STAMP = 16
    """What the catalog's files looked like after the last transaction."""
    CHECKSUM = 17
    """Of the tables, where the last opener closed them; 0 otherwise."""
    TABLES_HOLDER = 18
    """The process that changes the tables, or was the last to do so."""
    LAST_INCARNATION = 19


UNCHECKED_WORDS = (
    Word.TABLES_MARK,
    Word.COMMIT_MARK,
    Word.SEATS,
    Word.STAMP,
    Word.CHECKSUM,
    Word.TABLES_HOLDER,
)
HEADER_WORDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """What all openers of a directory must agree on."""

    capacity: int
    is_durable: bool
    boot: bytes
    """16 bytes of this start of the machine."""

    @property
    def segment_limit(self) -> int:
        """Segments that a store of this capacity has at most."""
        return min(_MAX_SEGMENTS, _SPARE_SEGMENTS + 2 * self.capacity // _MIN_SEGMENT_BYTES)

    @property
    def head_bytes(self) -> int:
        """Bytes of the header and the segments."""
        return _whole_pages(PAGE_BYTES + self.segment_limit * SEGMENT.itemsize)

    @property
    def words(self) -> tuple[int, ...]:
        """The header's first words."""
        low, high = (int.from_bytes(self.boot[i : i + 8], "little") for i in (0, 8))
        return _MAGIC, _LAYOUT, low, high, self.capacity, int(self.is_durable)

    @classmethod
    def of_words(cls, words: Sequence[int]) -> TableConfig | None:
        """Return what a header's first words say; None where they are no header."""
        if tuple(words[:2]) != (_MAGIC, _LAYOUT):
            return None
        boot = b"".join(word.to_bytes(8, "little") for word in words[2:4])
        return cls(capacity=words[4], is_durable=words[5] == 1, boot=boot)


class RowTable:
    """The rows as columns: views of the mapped file, which stays mapped as long as they exist."""

    def __init__(self, raw: NDArray[np.uint8]) -> None:
        """Cut bytes into rows."""
        table = raw.view(ROW)
        self.raw = raw
        self.key: NDArray[np.uint64] = table["key"]
        self.tick: NDArray[np.int64] = table["tick"]
        self.saved_tick: NDArray[np.int64] = table["saved_tick"]
        self.layout: NDArray[np.int64] = table["layout"]
        self.pins: NDArray[np.uint64] = table["pins"]
        self.holds: NDArray[np.uint64] = table["holds"]
        self.held_until: NDArray[np.int64] = table["held_until"]
        self.generation: NDArray[np.uint32] = table["generation"]
        self.state: NDArray[np.uint8] = table["state"]
        self.is_saved: NDArray[np.bool_] = table["is_saved"]

    def __len__(self) -> int:
        return len(self.tick)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def row_count(rows: int) -> int:
    """Return how many rows a table has that needs so many."""
    return -(-rows // ROW_STEP) * ROW_STEP


def table_bytes(config: TableConfig, rows: int) -> int:
    """Return the bytes on disk of tables with room for so many rows."""
    count = row_count(rows)
    return _whole_pages(config.head_bytes + count * ROW.itemsize) + _whole_pages(
        4 * bucket_count(count)
    )
