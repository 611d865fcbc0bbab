"""The tables that all openers of a directory share: two files, mapped, whose numbers are checked before they are used.

`index.shared` has a header, the segments and the rows, one row for each slot; `index.buckets` finds rows by key.
They can be lost: the catalog says what is whole, and the tables are made again from it.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvlinker.errors import StoreError
from kvlinker_file.buckets import bucket_count
from kvlinker_file.directory import BUCKETS_FILE, TABLES_FILE, StoreDirectory
from kvlinker_file.mapping import map_bytes, reserve
from kvlinker_file.table_layout import (
    HEADER_WORDS,
    MAX_ROWS,
    PAGE_BYTES,
    ROW,
    ROW_STEP,
    SEGMENT,
    UNCHECKED_WORDS,
    RowTable,
    TableConfig,
    Word,
    row_count,
)

__all__ = ["DamagedTablesError", "SharedTables"]

_NO_FILE = (errno.ENOENT, errno.ELOOP, errno.EISDIR)


class DamagedTablesError(StoreError):
    """The shared tables do not make sense; they are made again from the catalog."""


def _extend(descriptor: int, before: int, size: int) -> None:
    """Reserve blocks up to a size, or leave the file as it was."""
    try:
        reserve(descriptor, before, max(0, size - before))
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
        self.words: NDArray[np.uint64] = head[: 8 * HEADER_WORDS].view(np.uint64)
        if tuple(self.words[:6].tolist()) != config.words:
            msg = f"the shared tables of {directory.path} are those of another store"
            raise DamagedTablesError(msg)
        records = head[PAGE_BYTES : PAGE_BYTES + config.segment_limit * SEGMENT.itemsize]
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
                reserve(descriptor, 0, size)
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
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            msg = f"{name} of {self._directory.path} is no file"
            raise DamagedTablesError(msg) from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size < offset + size:
                msg = (
                    f"{name} of {self._directory.path} has {found.st_size} B, needs {offset + size}"
                )
                raise DamagedTablesError(msg)
            reserve(descriptor, offset, size)  # a hole could end the process with SIGBUS
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
        if rows > MAX_ROWS or rows % ROW_STEP or buckets & (buckets - 1) or not buckets:
            msg = f"shared tables of {self._directory.path}: {rows} rows, {buckets} buckets"
            raise DamagedTablesError(msg)
        if rows != len(self.rows):
            raw = self._map_file(TABLES_FILE, self.config.head_bytes, rows * ROW.itemsize)
            self.rows = RowTable(raw)
        if buckets != len(self.buckets):
            self.buckets = self._map_file(BUCKETS_FILE, 0, 4 * buckets).view(np.int32)

    def count_on(self, word: Word, change: int) -> None:
        """Add to a word, which may overflow: anything may have been written over it."""
        self.words[word : word + 1] += np.array([change], dtype=np.int64).view(np.uint64)

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
        count = max(row_count(rows), int(self.words[Word.ROWS]))
        return self._set_size(count, max(bucket_count(count), int(self.words[Word.BUCKETS])))

    def shrink(self, rows: int) -> bool:
        """Keep room for so many rows alone, when nobody else has the tables mapped; see `reserve`."""
        count = row_count(rows)
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
        before = int(self.words[Word.ROWS]), int(self.words[Word.BUCKETS])
        self.words[Word.ROWS], self.words[Word.BUCKETS] = rows, buckets
        try:
            self.map_anew()
        except OSError:  # nobody would fill the buckets
            self.words[Word.ROWS], self.words[Word.BUCKETS] = before
            raise
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
        count = max(row_count(rows), len(self.rows))
        buckets = max(bucket_count(count), len(self.buckets))
        for name, size in (
            (TABLES_FILE, self.config.head_bytes + count * ROW.itemsize),
            (BUCKETS_FILE, 4 * buckets),
        ):
            descriptor = self._directory.open_table(name, create=True)
            try:
                reserve(descriptor, 0, size)
            finally:
                os.close(descriptor)
        self.words[Word.ROWS], self.words[Word.BUCKETS] = count, buckets

    def adopt(self, config: TableConfig) -> None:
        """Let the tables be those of another start of the machine or another durability, before anybody else comes."""
        self.config = config
        self.words[:6] = config.words

    def close(self) -> None:
        """Unmap everything; the tables are empty from then on. Idempotent."""
        self.words = np.zeros(HEADER_WORDS, dtype=np.uint64)
        self._records = np.empty(0, dtype=np.uint8)
        self.segments = self._records.view(SEGMENT)
        self.rows = RowTable(np.empty(0, dtype=np.uint8))
        self.buckets = np.empty(0, dtype=np.int32)

    # ---- trust --------------------------------------------------------------------------------

    def checksum(self) -> int:
        """Return the checksum of everything that is not marks and stamps; never 0."""
        words = self.words.copy()
        words[list(UNCHECKED_WORDS)] = 0
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
                raw = os.pread(descriptor, 8 * HEADER_WORDS, 0)
            finally:
                os.close(descriptor)
        words = np.frombuffer(raw.ljust(8 * HEADER_WORDS, b"\0"), dtype=np.uint64)
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
