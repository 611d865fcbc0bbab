"""Locks that end with their holder: byte ranges of one file, kept by whoever has the file open.

A lock belongs to an open file, not to a process (F_OFD_SETLK), so that two stores of one process exclude
each other too, and the kernel gives it back when the last descriptor of that file is closed, by death as well.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable

from kvlinker.errors import StoreTimeoutError

__all__ = ["LOCK_SECONDS", "LockFile", "SharedLock"]

LOCK_SECONDS = 30.0
"""How long a lock is waited for: a process that was stopped while it holds one must not hang all others."""

_FLOCK = "hhqqi4x"
"""`struct flock` on 64 bits: type, whence, start, length, pid."""
_SPINS = 50
"""Tries before sleeping: most locks are held for some microseconds."""
_MAX_SLEEP = 0.002


_held = threading.local()
"""The SharedLocks that each thread has, in `locks`.

Of the module, since the collector may close any store in a thread that holds another one's lock.
"""


class LockFile:
    """A file whose bytes can be locked one by one; its descriptor stays its opener's."""

    def __init__(self, descriptor: int) -> None:
        """Take a descriptor that is open for reading and writing."""
        self._descriptor = descriptor
        found = os.fstat(descriptor)
        self.identity = found.st_dev, found.st_ino

    def try_lock(self, byte: int) -> bool:
        """Lock a byte, or return False at once where another opener has it."""
        try:
            self._set(fcntl.F_WRLCK, byte)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def unlock(self, byte: int) -> None:
        """Give a byte back."""
        self._set(fcntl.F_UNLCK, byte)

    def unlock_all(self) -> None:
        """Give every byte back."""
        self._set(fcntl.F_UNLCK, 0, 0)

    def _set(self, kind: int, byte: int, length: int = 1) -> None:
        request = struct.pack(_FLOCK, kind, os.SEEK_SET, byte, length, 0)
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, request)

    def is_taken(self, byte: int) -> bool:
        """Return whether another opener has a byte locked."""
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        answer = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, request)
        kind: int = struct.unpack(_FLOCK, answer)[0]
        return kind != fcntl.F_UNLCK


def _locks_held() -> list[SharedLock]:
    if not hasattr(_held, "locks"):
        _held.locks = []
    locks: list[SharedLock] = _held.locks
    return locks


class SharedLock:
    """A lock between the threads of this process and all openers of the file."""

    def __init__(
        self,
        file: LockFile,
        byte: int,
        *,
        describe: Callable[[], str],
        seconds: float | None = None,
    ) -> None:
        """Make a lock that is free.

        Args:
            file: whose bytes are locked.
            byte: which of them.
            describe: says what is locked and who has it, for the message.
            seconds: how long `acquire` waits; LOCK_SECONDS where not given.
        """
        self._file = file
        self._byte = byte
        self._describe = describe
        self._seconds = LOCK_SECONDS if seconds is None else seconds
        self._threads = threading.Lock()
        self._holder = 0

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has the lock."""
        return self._holder == threading.get_ident()

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            StoreTimeoutError: somebody else keeps it, or this thread does through another opener, as when the
                garbage collector closes a store that nobody refers to while another one has the lock.
        """
        if any(lock.comes_before(self) for lock in _locks_held()):
            msg = f"{self._describe()}: this thread has a lock of another opener, and cannot wait for its own"
            raise StoreTimeoutError(msg)
        end = time.monotonic() + self._seconds
        if not self._threads.acquire(timeout=self._seconds):
            self._give_up()
        try:
            self._wait(end)
        except BaseException:
            self._threads.release()
            raise
        self._note_holder()

    def _note_holder(self) -> None:
        self._holder = threading.get_ident()
        _locks_held().append(self)

    def comes_before(self, wanted: SharedLock) -> bool:
        """Whether a thread with this lock would wait for itself, or for whoever waits for it, with a wanted one."""
        is_other = self._file is not wanted._file
        is_same_file = self._file.identity == wanted._file.identity
        return is_other and is_same_file and wanted._byte <= self._byte

    def try_acquire(self) -> bool:
        """Take the lock if nobody has it."""
        if not self._threads.acquire(blocking=False):
            return False
        try:
            is_taken = self._file.try_lock(self._byte)
        except BaseException:
            self._threads.release()
            raise
        if is_taken:
            self._note_holder()
        else:
            self._threads.release()
        return is_taken

    def _wait(self, end: float) -> None:
        tries, sleep = 0, 50e-6
        while not self._file.try_lock(self._byte):
            tries += 1
            if tries < _SPINS:
                os.sched_yield()
                continue
            if time.monotonic() >= end:
                self._give_up()
            time.sleep(sleep)
            sleep = min(2 * sleep, _MAX_SLEEP)

    def _give_up(self) -> None:
        msg = f"{self._describe()} for {self._seconds:g} s; if it hangs or was stopped, end it"
        raise StoreTimeoutError(msg)

    def release(self) -> None:
        """Give the lock back."""
        self._holder = 0
        if self in (locks := _locks_held()):
            locks.remove(self)
        self._file.unlock(self._byte)
        self._threads.release()
