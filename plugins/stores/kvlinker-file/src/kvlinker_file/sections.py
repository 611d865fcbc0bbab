"""Sections are the two locks and what they promise: whoever enters one finds tables that are whole.

`committing` is held while the catalog is written, segments are made and openers come and go; `changing` is
held while the shared tables change, never while bytes are copied or the catalog is written. Whoever needs
both takes `committing` first. A mark is set for the length of each: if a holder dies in the middle, the next
one finds it, and makes the tables again from the catalog before anybody reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvlinker.errors import KVLinkerError, StoreError
from kvlinker_file.directory import StoreDirectory
from kvlinker_file.table_layout import Word
from kvlinker_file.tables import DamagedTablesError, SharedTables

__all__ = ["Sections", "UnsettledError"]

_ONE = np.uint64(1)
_REPAIRS = 8


class UnsettledError(StoreError):
    """The catalog knows a change that the tables do not: the next one to commit makes them again."""


class Sections:
    """Both locks of one opener of a directory."""

    def __init__(
        self,
        tables: SharedTables,
        directory: StoreDirectory,
        *,
        refresh: Callable[[], None],
        recover: Callable[[], None],
        sweep: Callable[[], None],
    ) -> None:
        """Make sections of tables that are mapped.

        Args:
            tables: with the marks.
            directory: with the locks.
            refresh: takes over what other openers changed; raises DamagedTablesError where it makes no sense.
            recover: makes the tables again; called within both locks.
            sweep: deletes files that a dead opener was about to make or to delete; called after `recover`.
        """
        self._tables = tables
        self._path = directory.path
        self._openers = directory.openers
        self._refresh = refresh
        self._recover = recover
        self._sweep = sweep
        self._is_unsettled = False
        self._commit = directory.openers.commit_lock
        self._change = directory.openers.tables_lock(self._describe)

    def _describe(self) -> str:
        holder = int(self._tables.words[Word.TABLES_HOLDER])
        return f"file store {self._path}: process {holder} has been changing its tables"

    # ---- commit -------------------------------------------------------------------------------

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Keep everybody else from writing the catalog, from opening and from closing.

        Raises:
            StoreTimeoutError: another process keeps the lock; the message names it.
            StoreError: the tables had to be made again, and the catalog cannot be read.
        """
        self._commit.acquire()
        with self._committed():
            yield

    @contextmanager
    def trying_to_commit(self) -> Iterator[bool]:
        """Do what `committing` does if nobody else does it now; give whether that is so."""
        if not self._commit.try_acquire():
            yield False
            return
        with self._committed():
            yield True

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Bring what the catalog knows into the tables; within `committing`.

        Raises:
            UnsettledError: that could not be done; the catalog stays as it is.
        """
        self._is_unsettled = True
        try:
            with self.changing():
                yield
        except OSError as error:
            msg = f"file store {self._path}: the index is behind its catalog: {error}"
            raise UnsettledError(msg) from error
        self._is_unsettled = False

    @contextmanager
    def _committed(self) -> Iterator[None]:
        try:
            self._openers.note_commit()
            if self._is_odd(Word.COMMIT_MARK):
                self._make_again()
            self._is_unsettled = False
            with self._marked(Word.COMMIT_MARK):
                yield
        finally:
            self._commit.release()

    # ---- tables -------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep everybody else from changing and from looking at the tables.

        Raises:
            StoreTimeoutError: another process keeps the lock; the message names it.
            StoreError: the tables had to be made again, and the catalog cannot be read.
        """
        self._change.acquire()
        try:
            for _ in range(_REPAIRS):
                if self._is_sound():
                    break
                self._repair()
            else:
                msg = (
                    f"file store {self._path}: its shared tables were made again {_REPAIRS} times and are damaged "
                    f"still; close it everywhere, and keep other programs out of the directory"
                )
                raise StoreError(msg)
            self._tables.words[Word.TABLES_HOLDER] = os.getpid()
            with self._marked(Word.TABLES_MARK):
                yield
        finally:
            if self._change.is_mine:
                self._change.release()

    def _is_sound(self) -> bool:
        """Whether nobody died while changing the tables; what others changed is taken over with that."""
        if self._is_odd(Word.TABLES_MARK):
            return False
        try:
            if not self._tables.is_current:
                self._tables.map_anew()
            self._refresh()
        except DamagedTablesError:
            return False
        return True

    def _repair(self) -> None:
        """Make the tables again; the lock of the tables is held before and after, and may go meanwhile."""
        if self._commit.is_mine:
            self._recover_marked()
            return
        self._change.release()
        self._commit.acquire()
        try:
            self._openers.note_commit()
            self._make_again()
        finally:
            self._commit.release()
        self._change.acquire()

    def _make_again(self) -> None:
        self._change.acquire()
        try:
            if self._is_odd(Word.COMMIT_MARK) or not self._is_sound():
                self._recover_marked()
                self._sweep()
                if self._is_odd(Word.COMMIT_MARK):
                    self._tables.count_on(Word.COMMIT_MARK, 1)
        finally:
            self._change.release()

    def _recover_marked(self) -> None:
        self._tables.words[Word.TABLES_MARK] |= _ONE
        self._recover()
        self._tables.count_on(Word.TABLES_MARK, 1)

    # ---- marks --------------------------------------------------------------------------------

    def _is_odd(self, word: Word) -> bool:
        return bool(int(self._tables.words[word]) % 2)

    @contextmanager
    def _marked(self, word: Word) -> Iterator[None]:
        """Set a mark, and take it back unless the section ends in a way that nobody foresaw, or unsettled."""
        self._tables.words[word] |= _ONE
        try:
            yield
        except (KVLinkerError, OSError):
            self._unmark(word)
            raise
        self._unmark(word)

    def _unmark(self, word: Word) -> None:
        if word is Word.TABLES_MARK or not self._is_unsettled:
            self._tables.count_on(word, 1)
