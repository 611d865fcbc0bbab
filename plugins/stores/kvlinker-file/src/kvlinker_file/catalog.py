"""The catalog is the saved form of the index: an SQLite database that names what is whole, and nothing else.

A transaction never names a slot before its bytes are there, and forgets it before they are overwritten:
whatever instant a process ends at, what the catalog names is whole.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.errors import StoreError, StoreFullError
from kvlinker.store import ObjectKey
from kvlinker_file.options import Durability
from kvlinker_file.segments import SlotKind

__all__ = [
    "BASE_BYTES",
    "SLOT_BYTES",
    "Catalog",
    "CatalogChange",
    "DamagedCatalogError",
    "SegmentRecord",
    "layout_number",
    "place_of",
    "split_places",
]

SLOT_BYTES = 256
"""Bytes that one object may cost in the database and its write-ahead log: twice a half-filled page's share."""
BASE_BYTES = 1 << 20
"""Bytes of an empty database, its log between two checkpoints, its own index of that, and the small files."""

_APPLICATION_ID = 0x6B766C66  # "kvlf"
_CHECKPOINT_PAGES = 64
_OF_THE_SYSTEM = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
)
"""Errors that say nothing about the database's content. READONLY is not one: the directory can be written."""
_SLOT_BITS = 32
_PART = 1 << 16
"""Objects that are read at a time."""
_OBJECTS = """
SELECT place, layout, used, key FROM objects
WHERE typeof(layout) = 'integer' AND typeof(used) = 'integer' AND place >= 0
AND typeof(key) = 'blob' AND length(key) = 32
"""
_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE segments (
    number INTEGER PRIMARY KEY, file_bytes INTEGER, payload_bytes INTEGER, ranges INTEGER, slots INTEGER,
    first_row INTEGER, incarnation INTEGER
);
CREATE TABLE layouts (id INTEGER PRIMARY KEY, fingerprint BLOB);
CREATE TABLE objects (place INTEGER PRIMARY KEY, layout INTEGER, used INTEGER, key BLOB);
"""


class DamagedCatalogError(StoreError):
    """The database cannot be read; the store begins anew."""


def layout_number(fingerprint: bytes) -> int:
    """Return the number under which the catalog and the tables name a layout, the same in every process."""
    return int.from_bytes(hashlib.blake2b(fingerprint, digest_size=8).digest()) >> 1


def place_of(segment: int, slot: int) -> int:
    """Return the number under which the catalog names a slot: neighbours in a file are neighbours in the database."""
    return segment << _SLOT_BITS | slot


def split_places(places: IndexArray) -> tuple[IndexArray, IndexArray]:
    """Return the segments and slots that places name."""
    return places >> _SLOT_BITS, places & ((1 << _SLOT_BITS) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRecord:
    """What the catalog knows of a segment."""

    number: int
    file_bytes: int
    kind: SlotKind
    slots: int
    first_row: int
    """Row of its first slot in the shared tables; the others follow."""
    incarnation: int
    """Different for every file that ever had a number, and for every way that one was cut."""

    @property
    def cost(self) -> int:
        """Bytes that it takes of the capacity: its file, and what its objects may take in the catalog."""
        return self.file_bytes + self.slots * SLOT_BYTES

    @property
    def end_row(self) -> int:
        """The row behind its last one."""
        return self.first_row + self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogChange:
    """Changes that are saved together or not at all."""

    removed: Sequence[int] = ()
    """Places whose object is no longer there."""
    added: Sequence[tuple[int, int, int, ObjectKey]] = ()
    """Place, layout, time of use and key of each new object."""
    used: Sequence[tuple[int, int]] = ()
    """Time of use and place, for objects that are known."""
    segments: Sequence[SegmentRecord] = ()
    removed_segments: Sequence[int] = ()
    layouts: Sequence[tuple[int, bytes]] = ()
    facts: Sequence[tuple[str, int | str]] = field(default=())


class Catalog:
    """An open database; one thread at a time."""

    def __init__(self, path: Path, *, durability: Durability) -> None:
        """Open or create the database; nobody else may open or write it meanwhile.

        Raises:
            DamagedCatalogError: it is not ours or cannot be read.
            StoreError: it cannot be written.
        """
        self._owner = os.getpid()
        with _typed_errors(path):
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._configure(durability)
            except BaseException:
                self._connection.close()
                raise

    def _configure(self, durability: Durability) -> None:
        self._connection.text_factory = _lenient_text
        run = self._connection.execute
        run("PRAGMA auto_vacuum = FULL")
        run("PRAGMA journal_mode = WAL")
        run(f"PRAGMA synchronous = {'FULL' if durability is Durability.DISK else 'NORMAL'}")
        run(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        run(f"PRAGMA journal_size_limit = {BASE_BYTES // 4}")
        run("PRAGMA trusted_schema = OFF")
        found = self._number("PRAGMA application_id")
        if found == 0 and not self._number("SELECT count(*) FROM sqlite_master"):
            script = (
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA application_id = {_APPLICATION_ID}; COMMIT;"
            )
            self._connection.executescript(script)
        elif found != _APPLICATION_ID:
            msg = f"store index: its application id is {found:#x}, expected {_APPLICATION_ID:#x}"
            raise DamagedCatalogError(msg)

    def check(self) -> None:
        """Read all of the database.

        Raises:
            DamagedCatalogError: it is not sound.
        """
        with _typed_errors("check"):
            if (verdict := str(self._rows("PRAGMA quick_check(1)")[0][0])) != "ok":
                msg = f"store index: {verdict}"
                raise DamagedCatalogError(msg)

    def _number(self, query: str) -> int:
        value = self._rows(query)[0][0]
        return value if isinstance(value, int) else -1

    def _rows(self, query: str) -> list[tuple[object, ...]]:
        with closing(self._connection.execute(query)) as cursor:
            rows: list[tuple[object, ...]] = cursor.fetchall()
        return rows

    # ---- reading ------------------------------------------------------------------------------

    def facts(self) -> dict[str, object]:
        """Return the named values."""
        with _typed_errors("facts"):
            return {str(name): value for name, value in self._rows("SELECT name, value FROM facts")}

    def segments(self) -> tuple[SegmentRecord, ...]:
        """Return the segments whose numbers make sense."""
        columns = "number, file_bytes, payload_bytes, ranges, slots, incarnation, first_row"
        query = f"SELECT {columns} FROM segments"  # noqa: S608 - no text of anybody else's
        with _typed_errors("segments"):
            return tuple(filter(None, map(_segment_record, self._rows(query))))

    def segment_numbers(self) -> list[int]:
        """Return the numbers of all segments, whether they make sense or not."""
        with _typed_errors("segments"):
            rows = self._rows("SELECT number FROM segments")
        return [number for (number,) in rows if isinstance(number, int)]

    def layouts(self) -> dict[int, bytes]:
        """Return the fingerprints by layout number."""
        with _typed_errors("layouts"):
            rows = self._rows("SELECT id, fingerprint FROM layouts")
        return {
            number: value
            for number, value in rows
            if isinstance(number, int) and isinstance(value, bytes)
        }

    def places(self) -> IndexArray:
        """Return the places of all objects, whether they make sense or not."""
        with _typed_errors("objects"):
            rows = self._connection.execute("SELECT place FROM objects").fetchall()
        return np.array([place for (place,) in rows if type(place) is int], dtype=np.int64)

    def objects(self) -> Iterator[list[tuple[int, int, int, bytes]]]:
        """Yield place, layout, time of use and key of objects, a part at a time; types and lengths are right."""
        with _typed_errors("objects"), closing(self._connection.execute(_OBJECTS)) as cursor:
            while part := cursor.fetchmany(_PART):
                yield part

    # ---- writing ------------------------------------------------------------------------------

    def apply(self, change: CatalogChange) -> None:
        """Save a change: all of it, or on an error nothing.

        Raises:
            StoreFullError: the disk is full.
            StoreError: it cannot be saved.
        """
        with _typed_errors("saving"):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._apply(change)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _apply(self, change: CatalogChange) -> None:
        run = self._connection.executemany
        run("DELETE FROM objects WHERE place = ?", ((place,) for place in change.removed))
        run("DELETE FROM segments WHERE number = ?", ((item,) for item in change.removed_segments))
        run(
            "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    item.number,
                    item.file_bytes,
                    item.kind.payload_bytes,
                    item.kind.ranges,
                    item.slots,
                    item.first_row,
                    item.incarnation,
                )
                for item in change.segments
            ),
        )
        run("INSERT OR REPLACE INTO layouts VALUES (?, ?)", change.layouts)
        run("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?)", change.added)
        run("UPDATE objects SET used = ? WHERE place = ?", change.used)
        run("INSERT OR REPLACE INTO facts VALUES (?, ?)", change.facts)

    def truncate_log(self) -> None:
        """Write the log back into the database and cut both to what they need.

        Raises:
            StoreError: it cannot be written.
        """
        with _typed_errors("truncating its log"):
            self._rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the database; a forked child leaves it alone, for it is its parent's."""
        if os.getpid() == self._owner:
            self._connection.close()
        else:
            # Closing would checkpoint the log under the parent: the child's copy must never be finalized.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))


def _lenient_text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


@contextmanager
def _typed_errors(what: Path | str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        msg = f"store index, {what}: {error}"
        code = error.sqlite_errorcode & 0xFF if isinstance(error, sqlite3.OperationalError) else 0
        if code == sqlite3.SQLITE_FULL:
            msg = f"{msg}; free space on the disk"
            raise StoreFullError(msg) from error
        if code in _OF_THE_SYSTEM:
            raise StoreError(msg) from error
        raise DamagedCatalogError(msg) from error
    except UnicodeDecodeError as error:  # SQLite quotes what it found, and sqlite3 cannot read that
        msg = f"store index, {what}: it holds no text where text belongs"
        raise DamagedCatalogError(msg) from error


def _segment_record(row: tuple[object, ...]) -> SegmentRecord | None:
    *sizes, first_row = row
    numbers = [value for value in sizes if isinstance(value, int) and 0 < value < 1 << 62]
    if len(numbers) != len(sizes) or not isinstance(first_row, int) or not 0 <= first_row < 1 << 30:
        return None
    number, file_bytes, payload_bytes, ranges, slots, incarnation = numbers
    kind = SlotKind(payload_bytes=payload_bytes, ranges=ranges)
    if ranges > 1 << 16 or slots * kind.slot_bytes > file_bytes or number >= 1 << 30:
        return None
    return SegmentRecord(
        number=number,
        file_bytes=file_bytes,
        kind=kind,
        slots=slots,
        first_row=first_row,
        incarnation=incarnation,
    )
