"""The directory of a store: what lies in it, that it is ours, and the file whose bytes are its openers' locks.

Every name below it is opened relative to its descriptor and without following symlinks.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import stat
import sys
import weakref
from contextlib import suppress
from pathlib import Path

from kvlinker.errors import StoreError, StoreFormatError
from kvlinker_file.mapping import punch, reserve
from kvlinker_file.openers import Openers
from kvlinker_file.os_errors import NO_SPACE, changed_segment, typed_os_errors

__all__ = [
    "BUCKETS_FILE",
    "FORMAT_VERSION",
    "TABLES_FILE",
    "StoreDirectory",
    "has_marker",
]

FORMAT_VERSION = 2
"""Raised when a directory of this version could no longer be read."""
_FORMAT = "kvlinker-file"
_MARKER = "kvlinker-file.json"
_NEW_MARKER = "kvlinker-file.json.new"
_LOCK = "lock"
_INDEX = "index.sqlite"
_INDEX_FILES = (_INDEX, f"{_INDEX}-wal", f"{_INDEX}-shm", f"{_INDEX}-journal")
TABLES_FILE, BUCKETS_FILE = "index.shared", "index.buckets"
_TABLE_FILES = (TABLES_FILE, BUCKETS_FILE)
_SEGMENTS = "segments"
_SEGMENT_NAME = re.compile(r"(\d{8})\.slab")
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_MARKER_BYTES = 4096


def has_marker(path: Path) -> bool:
    """Return whether a folder says that it is a file store, of whatever version."""
    return (path / _MARKER).is_file()


_open_directories: weakref.WeakSet[StoreDirectory] = weakref.WeakSet()
"""Of the module, since a hook of a fork can never be taken back: one serves all."""


def _close_in_child() -> None:
    for directory in list(_open_directories):
        directory.close()


os.register_at_fork(after_in_child=_close_in_child)


class StoreDirectory:
    """An open directory of this format, which others may have open too."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Open the directory.

        Args:
            path: absolute.
            create: make the directory and the store in it where there is none.

        Raises:
            StoreTimeoutError: another process keeps its lock; the message names it.
            StoreFormatError: it is a symlink, no store, or a store of another version.
            StoreFullError: there is no space for it.
            StoreError: it cannot be read or written.
        """
        self.path = path
        self._owner = os.getpid()
        self._descriptors: list[int] = []
        self._is_locking = False
        # A forked child inherits the locks with the descriptor and would keep them when this process is gone.
        _open_directories.add(self)
        try:
            with typed_os_errors(f"file store {path}"):
                self._fd = self._open_directory(create=create)
                self._check_content(create=create)
                self.openers = Openers(path, self._open_lock())
                self._is_locking = True
                with self.openers.committing():
                    self._read_or_make_marker(create=create)
                    self._segments_fd = self._open_segments()
                    self._prepare_index()
        except BaseException:
            self.close()
            raise

    def _keep(self, descriptor: int) -> int:
        self._descriptors.append(descriptor)
        return descriptor

    def _open_directory(self, *, create: bool) -> int:
        if create:
            self._make_directory()
        if self.path.is_symlink():
            msg = f"file store {self.path}: is a symlink; name the real directory, {self.path.resolve()}"
            raise StoreFormatError(msg)
        try:
            return self._keep(os.open(self.path, _DIRECTORY_FLAGS))
        except FileNotFoundError as error:
            msg = f"file store {self.path}: there is no such directory"
            raise StoreFormatError(msg) from error

    def _make_directory(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
        except (FileExistsError, NotADirectoryError) as error:
            msg = f"file store {self.path}: {self.path.parent} is no directory"
            raise StoreFormatError(msg) from error
        except OSError as error:
            if error.errno in NO_SPACE:
                raise
            msg = (
                f"file store {self.path}: {error.filename} cannot be made: {error.strerror}; "
                f"name a path whose parent this user may write, or make the directory for this user first"
            )
            raise StoreError(msg) from error

    def _check_content(self, *, create: bool) -> None:
        names = _names_in(self._fd)
        if _MARKER in names:
            self._check_marker()
            return
        if foreign := sorted(names - {_LOCK, _NEW_MARKER}):
            msg = (
                f"file store {self.path}: the directory holds {foreign[0]!r} and no {_MARKER}, so it is no "
                f"file store; name an empty directory"
            )
            raise StoreFormatError(msg)
        if not create:
            msg = f"file store {self.path}: the directory holds no store"
            raise StoreFormatError(msg)

    def _check_marker(self) -> None:
        # Not blocking: the opening of a pipe that nobody writes to would never end.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(_MARKER, flags, dir_fd=self._fd)
        try:
            content = os.read(descriptor, _MAX_MARKER_BYTES)
        finally:
            os.close(descriptor)
        try:
            marker: object = json.loads(content)
        except ValueError:
            marker = None
        if not isinstance(marker, dict) or marker.get("format") != _FORMAT:
            msg = f"file store {self.path}: {_MARKER} does not say {_FORMAT!r}; it is no file store, or a damaged one"
            raise StoreFormatError(msg)
        if marker.get("version") != FORMAT_VERSION:
            msg = (
                f"file store {self.path}: has format version {marker.get('version')!r}, this release reads "
                f"{FORMAT_VERSION}; open it with the release that wrote it, or delete it"
            )
            raise StoreFormatError(msg)

    def _open_lock(self) -> int:
        mode = stat.S_IMODE(os.fstat(self._fd).st_mode)
        if mode & (stat.S_ISVTX | stat.S_IWOTH):
            msg = (
                f"file store {self.path}: everybody may write there (mode {mode:04o}); name a directory "
                f"that is the store's alone, such as {self.path / 'kvlinker'}"
            )
            raise StoreFormatError(msg)
        if mode & 0o077:
            os.fchmod(self._fd, 0o700)
        return self._keep(os.open(_LOCK, _FILE_FLAGS | os.O_CREAT, mode=0o600, dir_fd=self._fd))

    def _read_or_make_marker(self, *, create: bool) -> None:
        self._check_content(create=create)  # again, now that nobody else can change it
        if _MARKER in _names_in(self._fd):
            return
        flags = _FILE_FLAGS | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(_NEW_MARKER, flags, mode=0o600, dir_fd=self._fd)
        try:
            os.write(
                descriptor, json.dumps({"format": _FORMAT, "version": FORMAT_VERSION}).encode()
            )
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(_NEW_MARKER, _MARKER, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        os.fsync(self._fd)

    def _open_segments(self) -> int:
        with suppress(FileExistsError):
            os.mkdir(_SEGMENTS, mode=0o700, dir_fd=self._fd)
        return self._keep(os.open(_SEGMENTS, _DIRECTORY_FLAGS, dir_fd=self._fd))

    def _prepare_index(self) -> None:
        # sqlite3 opens by path and follows links; only this user can change the directory meanwhile.
        for name in _INDEX_FILES:
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(os.lstat(name, dir_fd=self._fd).st_mode):
                    msg = f"file store {self.path}: {name} is no regular file"
                    raise StoreFormatError(msg)
        # sqlite3 gives its log the mode of the database. A database that exists is never opened here: closing
        # any descriptor of it gives back the locks of all connections that this process has.
        with suppress(FileExistsError):
            flags = _FILE_FLAGS | os.O_CREAT | os.O_EXCL
            os.close(os.open(_INDEX, flags, mode=0o600, dir_fd=self._fd))

    # ---- index --------------------------------------------------------------------------------

    @property
    def index_path(self) -> Path:
        """Where the database of the index lies."""
        return self.path / _INDEX

    def index_bytes(self) -> int:
        """Return the bytes on disk of the index and the small files beside it."""
        total = 0
        for name in (*_INDEX_FILES, *_TABLE_FILES, _MARKER, _LOCK):
            with suppress(FileNotFoundError):
                total += os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_blocks * 512
        return total

    def disk_bytes(self) -> tuple[int, int]:
        """Return the size of the file system, and what is free for this user; without end where it says neither."""
        found = os.fstatvfs(self._fd)
        if not found.f_blocks:
            return sys.maxsize, sys.maxsize
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def remove_index(self) -> None:
        """Delete the database of the index."""
        for name in _INDEX_FILES:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._fd)
        self._prepare_index()

    def check_not_inherited(self) -> None:
        """Raise StoreBusyError in a process that was forked from one that has the store open."""
        self.openers.check_not_inherited(has_index=self._has_open_index())

    def _has_open_index(self) -> bool:
        with suppress(FileNotFoundError):
            wanted = os.stat(_INDEX, dir_fd=self._fd, follow_symlinks=False)
            for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names alone
                with suppress(OSError):
                    if os.path.samestat(os.fstat(int(name)), wanted):
                        return True
        return False

    def index_stamp(self) -> int:
        """Return a number that changes whenever anybody writes the database: 63 bits."""
        parts = []
        for name in _INDEX_FILES[:2]:
            with suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                if found.st_size:
                    parts.append((name, found.st_ino, found.st_size, found.st_mtime_ns))
        return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1

    def open_table(self, name: str, *, create: bool = False) -> int:
        """Return a descriptor of a file of the shared tables.

        Raises:
            OSError: it is not there, or no file.
        """
        flags = _FILE_FLAGS | (os.O_CREAT if create else 0)
        return os.open(name, flags, mode=0o600, dir_fd=self._fd)

    def remove_table(self, name: str) -> None:
        """Delete a file of the shared tables, if there is one."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    # ---- segments -----------------------------------------------------------------------------

    def is_whole(self, number: int, size: int) -> bool:
        """Return whether a segment file is there, as long as it was made, and has no holes."""
        try:
            found = os.stat(_name(number), dir_fd=self._segments_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        is_file = stat.S_ISREG(found.st_mode) and found.st_size == size
        return is_file and found.st_blocks * 512 >= size

    def check_segment(self, number: int, size: int) -> None:
        """Raise StoreError where a segment file is not what was made."""
        if not self.is_whole(number, size):
            raise changed_segment(number)

    def segment_numbers(self) -> frozenset[int]:
        """Return the numbers of the segment files that exist; anything else in their folder is swept."""
        numbers = set()
        for name in _names_in(self._segments_fd):
            match = _SEGMENT_NAME.fullmatch(name)
            if match:
                numbers.add(int(match[1]))
            else:
                with suppress(IsADirectoryError, PermissionError):
                    os.unlink(name, dir_fd=self._segments_fd)
        return frozenset(numbers)

    def create_segment(self, number: int, size: int) -> int:
        """Return the descriptor of a new segment file whose blocks are all reserved.

        Raises:
            OSError: there is no space for it; nothing is left behind.
        """
        self.remove_segment(number)
        flags = _FILE_FLAGS | os.O_CREAT | os.O_EXCL
        descriptor = os.open(_name(number), flags, mode=0o600, dir_fd=self._segments_fd)
        try:
            reserve(descriptor, 0, size)
        except BaseException:
            os.close(descriptor)
            self.remove_segment(number)
            raise
        return descriptor

    def open_segment(self, number: int, size: int) -> int | None:
        """Return the descriptor of a segment file; None where it is not the file that was made.

        A file with holes is no longer reserved and could end the process with SIGBUS, so its blocks are
        reserved again before it is used.

        Raises:
            OSError: it has holes, and there is no space for them.
        """
        try:
            descriptor = os.open(_name(number), _FILE_FLAGS, dir_fd=self._segments_fd)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_size == size:
                reserve(descriptor, 0, size)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def remove_segment(self, number: int) -> None:
        """Delete a segment file, if there is one, and give its blocks back although others have it mapped.

        A directory in its place is somebody's; it gets another name.
        """
        with suppress(FileNotFoundError):
            try:
                self._punch(number)
                os.unlink(_name(number), dir_fd=self._segments_fd)
            except (IsADirectoryError, PermissionError):
                self._set_aside(number)

    def _punch(self, number: int) -> None:
        with suppress(
            OSError
        ):  # a file system that cannot gives the blocks back with the last mapping
            descriptor = os.open(_name(number), _FILE_FLAGS, dir_fd=self._segments_fd)
            try:
                punch(descriptor, os.fstat(descriptor).st_size)
            finally:
                os.close(descriptor)

    def _set_aside(self, number: int) -> None:
        folder = self._segments_fd
        for count in itertools.count():
            name = f"{_name(number)}.aside{count}"
            try:
                os.rename(_name(number), name, src_dir_fd=folder, dst_dir_fd=folder)
            except FileExistsError:
                continue
            except OSError as error:
                if error.errno == errno.ENOTEMPTY:
                    continue
                raise
            return

    def sync(self) -> None:
        """Make new and removed names last through a power loss."""
        os.fsync(self._segments_fd)
        os.fsync(self._fd)

    def close(self) -> None:
        """Give up the directory and all its locks. Idempotent."""
        descriptors, self._descriptors = self._descriptors, []
        if descriptors and self._owner == os.getpid() and self._is_locking:
            # Closing would not do: a child that was just forked has the descriptor for a moment longer.
            self.openers.leave()
        for descriptor in reversed(descriptors):
            os.close(descriptor)


def _name(number: int) -> str:
    return f"{number:08d}.slab"


def _names_in(descriptor: int) -> set[str]:
    with os.scandir(descriptor) as entries:
        return {entry.name for entry in entries}
