"""Openers of a directory are told apart by the bytes of one file that they have locked.

The first byte is locked by whoever writes the catalog, the second by whoever changes the tables, and each
opener has one more, its seat. What the file says is only whom to name in a message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlinker.errors import StoreBusyError
from kvlinker_file.locks import LockFile, SharedLock
from kvlinker_file.table_layout import MAX_SEATS

__all__ = ["Openers"]

_COMMIT_BYTE, _TABLES_BYTE, _FIRST_SEAT_BYTE = 0, 1, 64
_PID_BYTES = 16
"""Bytes in which a process says its number: whoever committed last, then each seat."""


class Openers:
    """All openers of a directory as one of them sees them; the commit lock guards the seats."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Look at a lock file, whose descriptor stays its opener's, and take no seat yet."""
        self._path = path
        self._descriptor = descriptor
        self._locks = LockFile(descriptor)
        self.commit_lock = SharedLock(self._locks, _COMMIT_BYTE, describe=self._describe_commit)
        self.seat = -1

    def tables_lock(self, describe: Callable[[], str]) -> SharedLock:
        """Return the lock of the shared tables; `describe` says who has it."""
        return SharedLock(self._locks, _TABLES_BYTE, describe=describe)

    # ---- commit -------------------------------------------------------------------------------

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Keep everybody else from opening the store and from writing its catalog.

        Raises:
            StoreTimeoutError: another process keeps the lock; the message names it.
        """
        self.commit_lock.acquire()
        try:
            self.note_commit()
            yield
        finally:
            self.commit_lock.release()

    def note_commit(self) -> None:
        """Say that this process has the commit lock."""
        self._write_pid(0)

    def _describe_commit(self) -> str:
        return f"file store {self._path}: process {self._read_pid(0)} has been changing its index"

    # ---- seats --------------------------------------------------------------------------------

    def take_seat(self) -> list[int]:
        """Take the first free seat; return the seats of the other openers.

        Raises:
            StoreBusyError: all seats are taken.
        """
        for seat in range(MAX_SEATS):
            if self._locks.try_lock(_FIRST_SEAT_BYTE + seat):
                self._write_pid(1 + seat)
                self.seat = seat
                return self.others()
        pids = sorted({self.pid_of(seat) for seat in range(MAX_SEATS)})
        msg = f"file store {self._path}: is open {MAX_SEATS} times, by processes {', '.join(pids)}; close one"
        raise StoreBusyError(msg)

    def _is_seated(self, seat: int) -> bool:
        """Return whether another opener has a seat."""
        return seat != self.seat and self._locks.is_taken(_FIRST_SEAT_BYTE + seat)

    def others(self) -> list[int]:
        """Return the seats of the openers that live, but for this one."""
        return [seat for seat in range(MAX_SEATS) if self._is_seated(seat)]

    @property
    def own_mask(self) -> int:
        """The bit of this opener."""
        return 1 << self.seat

    def living_mask(self) -> int:
        """Return the bits of all openers that live."""
        return self.own_mask | sum(1 << seat for seat in self.others())

    def dead_mask(self, taken: int) -> int:
        """Return those bits of seats that were taken whose opener is gone."""
        seats = (seat for seat in range(MAX_SEATS) if taken >> seat & 1 and seat != self.seat)
        return sum(1 << seat for seat in seats if not self._is_seated(seat))

    def leave(self) -> None:
        """Give up all locks."""
        self._locks.unlock_all()

    # ---- processes ----------------------------------------------------------------------------

    def check_not_inherited(self, *, has_index: bool) -> None:
        """Refuse a process that was forked from one that has the store open.

        It has that one's database connection, whose locks it has not: a second one would take them for its own.

        Args:
            has_index: whether this process has a descriptor of the database.

        Raises:
            StoreBusyError: it is such a process.
        """
        pids = {self.pid_of(seat) for seat in self.others()}
        if has_index and str(os.getpid()) not in pids:
            msg = (
                f"file store {self._path}: is in use by a process that this process {os.getpid()} "
                f"was forked from; open it in a process that is started anew, such as by spawn"
            )
            raise StoreBusyError(msg)

    def pid_of(self, seat: int) -> str:
        """Return the process that took a seat last, as it said itself."""
        return self._read_pid(1 + seat)

    def _write_pid(self, place: int) -> None:
        text = f"{os.getpid()}".ljust(_PID_BYTES - 1) + "\n"
        os.pwrite(self._descriptor, text.encode("ascii"), place * _PID_BYTES)

    def _read_pid(self, place: int) -> str:
        text = os.pread(self._descriptor, _PID_BYTES, place * _PID_BYTES)
        return text.decode("ascii", "replace").strip("\0 \n") or "unknown"
