"""The tables that all openers of a directory share: two files, mapped, whose numbers are checked before they are used.

`index.shared` has a header, the segments and the rows, one row for each slot; `index.buckets` finds rows by key.
They can be lost: the catalog says what is whole, and the tables are made again from it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvlinker.errors import StoreError
from kvlinker_file.buckets import KEY_WORDS, bucket_count
from kvlinker_file.directory import BUCKETS_FILE, TABLES_FILE, StoreDirectory
from kvlinker_file.mapping import map_bytes

__all__ = [
    "BASE_TABLE_BYTES",
    "MAX_SEATS",
    "ROW_BYTES",
    "DamagedTablesError",
    "RowState",
    "RowTable",
    "SharedTables",
    "TableConfig",
    "Word",
    "table_bytes",
]

MAX_SEATS = 64
"""Openers of one directory: a mark of a row has a bit for each."""

_MAGIC = int.from_bytes(b"kvltable", "little")
_LAYOUT = 2
_PAGE = 4096
_MAX_ROWS = (1 << 30) - 1
_ROW_STEP = 256
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
BASE_TABLE_BYTES = 3 * _PAGE + _ROW_STEP * ROW.itemsize
"""Bytes of both files without rows, but for the segments."""


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


_UNCHECKED = (
    Word.TABLES_MARK,
    Word.COMMIT_MARK,
    Word.SEATS,
    Word.STAMP,
    Word.CHECKSUM,
    Word.TABLES_HOLDER,
)
_WORDS = 64


class DamagedTablesError(StoreError):
    """The shared tables do not make sense; they are made again from the catalog."""


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
        return _whole_pages(_PAGE + self.segment_limit * SEGMENT.itemsize)

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
    return -(-size // _PAGE) * _PAGE


def _row_count(rows: int) -> int:
    return -(-rows // _ROW_STEP) * _ROW_STEP


def table_bytes(config: TableConfig, rows: int) -> int:
    """Return the bytes on disk of tables with room for so many rows."""
    count = _row_count(rows)
    return _whole_pages(config.head_bytes + count * ROW.itemsize) + _whole_pages(
        4 * bucket_count(count)
    )


def _extend(descriptor: int, before: int, size: int) -> None:
    """Reserve blocks up to a size, or leave the file as it was."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.ftruncate(descriptor, before)
        raise


class SharedTables:
    """Both files, mapped; not locked, the store's lock guards every call but those that say otherwise."""

    def __init__(self, directory: StoreDirectory, config: TableConfig) -> None:
        """Map files that exist.

        Raises:
            DamagedTablesError: they are not there, or not what they should be.
            OSError: they cannot be read, or holes in them cannot be filled.
        """
        self.config = config
        self._directory = directory
        head = self._map_file(TABLES_FILE, 0, config.head_bytes)
        self.words: NDArray[np.uint64] = head[: 8 * _WORDS].view(np.uint64)
        if tuple(self.words[:6].tolist()) != config.words:
            msg = f"the shared tables of {directory.path} are those of another store"
            raise DamagedTablesError(msg)
        records = head[_PAGE : _PAGE + config.segment_limit * SEGMENT.itemsize]
        self.segments = records.view(SEGMENT)
        self._records = records
        self.rows = RowTable(np.empty(0, dtype=np.uint8))
        self.buckets: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.map_anew()

    @classmethod
    def make(cls, directory: StoreDirectory, config: TableConfig) -> SharedTables:
        """Make empty tables; nobody else may have the old ones mapped.

        Raises:
            OSError: there is no space for them.
        """
        for name, size in (
            (TABLES_FILE, config.head_bytes),
            (BUCKETS_FILE, 4 * bucket_count(0)),
        ):
            directory.remove_table(name)
            descriptor = directory.open_table(name, create=True)
            try:
                os.posix_fallocate(descriptor, 0, size)
                if name == TABLES_FILE:
                    os.pwrite(descriptor, np.array(config.words, dtype=np.uint64).tobytes(), 0)
                    count = np.array([bucket_count(0)], dtype=np.uint64)
                    os.pwrite(descriptor, count.tobytes(), 8 * Word.BUCKETS)
            finally:
                os.close(descriptor)
        return cls(directory, config)

    # ---- files --------------------------------------------------------------------------------

    def _map_file(self, name: str, offset: int, size: int) -> NDArray[np.uint8]:
        if not size:
            return np.empty(0, dtype=np.uint8)
        try:
            descriptor = self._directory.open_table(name)
        except FileNotFoundError as error:
            msg = f"{name} of {self._directory.path} is missing"
            raise DamagedTablesError(msg) from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size < offset + size:
                msg = (
                    f"{name} of {self._directory.path} has {found.st_size} B, needs {offset + size}"
                )
                raise DamagedTablesError(msg)
            os.posix_fallocate(descriptor, offset, size)  # a hole could end the process with SIGBUS
            return map_bytes(descriptor, offset, size)
        finally:
            os.close(descriptor)

    @property
    def is_current(self) -> bool:
        """Whether the header is sound, and the mapping as long as it says; needs no lock."""
        words: list[int] = self.words[: Word.BUCKETS + 1].tolist()
        return (
            tuple(words[:6]) == self.config.words
            and words[Word.ROWS] == len(self.rows)
            and words[Word.BUCKETS] == len(self.buckets)
        )

    def map_anew(self) -> None:
        """Map as much as the header says.

        Raises:
            DamagedTablesError: the header does not make sense.
            OSError: the files cannot be mapped.
        """
        if tuple(self.words[:6].tolist()) != self.config.words:
            msg = f"the header of the shared tables of {self._directory.path} was overwritten"
            raise DamagedTablesError(msg)
        rows, buckets = int(self.words[Word.ROWS]), int(self.words[Word.BUCKETS])
        if rows > _MAX_ROWS or rows % _ROW_STEP or buckets & (buckets - 1) or not buckets:
            msg = f"shared tables of {self._directory.path}: {rows} rows, {buckets} buckets"
            raise DamagedTablesError(msg)
        if rows != len(self.rows):
            raw = self._map_file(TABLES_FILE, self.config.head_bytes, rows * ROW.itemsize)
            self.rows = RowTable(raw)
        if buckets != len(self.buckets):
            self.buckets = self._map_file(BUCKETS_FILE, 0, 4 * buckets).view(np.int32)

    def _resize(self, name: str, size: int) -> None:
        descriptor = self._directory.open_table(name)
        try:
            before = os.fstat(descriptor).st_size
            if size < before:
                os.ftruncate(descriptor, size)
            else:
                _extend(descriptor, before, size)
        finally:
            os.close(descriptor)

    def reserve(self, rows: int) -> bool:
        """Make room for rows; True where the buckets are more now, and must be filled anew.

        Raises:
            OSError: there is no space for them; nothing has changed.
        """
        count = max(_row_count(rows), int(self.words[Word.ROWS]))
        return self._set_size(count, max(bucket_count(count), int(self.words[Word.BUCKETS])))

    def shrink(self, rows: int) -> bool:
        """Keep room for so many rows alone, when nobody else has the tables mapped; see `reserve`."""
        count = _row_count(rows)
        return self._set_size(count, bucket_count(count))

    def _set_size(self, rows: int, buckets: int) -> bool:
        is_other = buckets != int(self.words[Word.BUCKETS])
        if is_other:
            self._resize(BUCKETS_FILE, 4 * buckets)
        if rows != int(self.words[Word.ROWS]):
            try:
                self._resize(TABLES_FILE, self.config.head_bytes + rows * ROW.itemsize)
            except OSError:
                self._resize(BUCKETS_FILE, 4 * int(self.words[Word.BUCKETS]))
                raise
        self.words[Word.ROWS], self.words[Word.BUCKETS] = rows, buckets
        self.map_anew()
        return is_other

    def restore_header(self, rows: int) -> None:
        """Write a header over one that was damaged; the tables must be filled anew.

        Raises:
            OSError: there is no space for so many rows.
        """
        self.words[:6] = self.config.words
        self._resize_to_fit(rows)
        self.map_anew()

    def _resize_to_fit(self, rows: int) -> None:
        count = max(_row_count(rows), len(self.rows))
        buckets = max(bucket_count(count), len(self.buckets))
        for name, size in (
            (TABLES_FILE, self.config.head_bytes + count * ROW.itemsize),
            (BUCKETS_FILE, 4 * buckets),
        ):
            descriptor = self._directory.open_table(name, create=True)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        self.words[Word.ROWS], self.words[Word.BUCKETS] = count, buckets

    def adopt(self, config: TableConfig) -> None:
        """Let the tables be those of another start of the machine or another durability, before anybody else comes."""
        self.config = config
        self.words[:6] = config.words

    def close(self) -> None:
        """Unmap everything; the tables are empty from then on. Idempotent."""
        self.words = np.zeros(_WORDS, dtype=np.uint64)
        self._records = np.empty(0, dtype=np.uint8)
        self.segments = self._records.view(SEGMENT)
        self.rows = RowTable(np.empty(0, dtype=np.uint8))
        self.buckets = np.empty(0, dtype=np.int32)

    # ---- trust --------------------------------------------------------------------------------

    def checksum(self) -> int:
        """Return the checksum of everything that is not marks and stamps; never 0."""
        words = self.words.copy()
        words[list(_UNCHECKED)] = 0
        digest = xxhash.xxh3_64(words.tobytes())
        for part in (self._records, self.rows.raw, self.buckets):
            digest.update(part.data)
        return digest.intdigest() or 1

    @staticmethod
    def read_words(directory: StoreDirectory) -> tuple[int, ...]:
        """Return the header's words, all zero where there is none; nothing is mapped."""
        raw = b""
        with suppress(OSError):
            descriptor = directory.open_table(TABLES_FILE)
            try:
                raw = os.pread(descriptor, 8 * _WORDS, 0)
            finally:
                os.close(descriptor)
        words = np.frombuffer(raw.ljust(8 * _WORDS, b"\0"), dtype=np.uint64)
        return tuple(words.tolist())

    @staticmethod
    def note_new_stamp(directory: StoreDirectory, before: int) -> None:
        """Note what the catalog's files look like, where they were as noted before somebody looked into them."""
        if SharedTables.read_words(directory)[Word.STAMP] != before:
            return
        descriptor = directory.open_table(TABLES_FILE)
        try:
            os.pwrite(descriptor, directory.index_stamp().to_bytes(8, "little"), 8 * Word.STAMP)
        finally:
            os.close(descriptor)
