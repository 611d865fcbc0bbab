"""A directory is read by the system's own calls, into host memory that is used again, and listed folder by folder.

The library's way of reading hands over new memory for each file, and finding and clearing that costs as much as the
copy; files are written by the library, which makes them visible whole or not at all.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from kvlinker.named_values import Beginning, Range
from kvlinker_s3.rooms import Room

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from kvlinker_s3.requests import Request

__all__ = ["Directory", "entries_of", "root_of"]

_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_MOST_VIEWS = 1024
"""Of one call; the system takes no more."""


def root_of(url: str) -> str:
    """Return the path of a directory from its URL, `file:///...`."""
    return unquote(urlsplit(url).path)


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    """Return what lies in a folder; nothing where there is none.

    Raises:
        OSError: it cannot be looked into.
    """
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


class Directory:
    """Requests for the files of a directory, many in one: what a file costs is less than what a request does."""

    def __init__(self, url: str) -> None:
        """Take the URL of the directory, `file:///...`."""
        self._root = root_of(url)

    def path_of(self, name: str) -> str:
        """Return where an object lies."""
        return f"{self._root}/{name}"

    # ---- looking ------------------------------------------------------------------------------

    def sizes_of(self, names: Sequence[str]) -> Request[list[int | None]]:
        """Ask for the lengths of objects; None where there is none."""
        return lambda _: [_size_of(self.path_of(name)) for name in names]

    def folders_in(self, folder: str) -> Request[list[str]]:
        """Ask for the names of the folders in one."""

        def ask(_: ObjectStore) -> list[str]:
            entries = entries_of(self.path_of(folder))
            return [f"{folder}/{entry.name}" for entry in entries if entry.is_dir()]

        return ask

    def names_in(self, folder: str) -> Request[list[str]]:
        """Ask for the names of the files in a folder."""

        def ask(_: ObjectStore) -> list[str]:
            entries = entries_of(self.path_of(folder))
            return [f"{folder}/{entry.name}" for entry in entries if entry.is_file()]

        return ask

    # ---- reading ------------------------------------------------------------------------------

    def begin_of(
        self, names: Sequence[str], size: int, room: Room, first: int
    ) -> Request[list[Beginning | None]]:
        """Ask for at most so many bytes from the beginning of objects; None where there is none.

        Args:
            names: of the objects.
            size: bytes of each.
            room: has a row of so many bytes for each.
            first: row of the first.
        """

        def ask(_: ObjectStore) -> list[Beginning | None]:
            view = room.view
            rows = [view[at * size : (at + 1) * size] for at in range(first, first + len(names))]
            return [_begin(self.path_of(name), row) for name, row in zip(names, rows, strict=True)]

        return ask

    def begun(self, names: Sequence[str], rows: NDArray[np.uint8]) -> list[Beginning | None]:
        """Return the beginnings of objects, each read to a row of its own; None where there is none.

        Raises:
            OSError: one cannot be read.
        """
        return [_begin(self.path_of(name), row.data) for name, row in zip(names, rows, strict=True)]

    def ranges_of(
        self, names: Sequence[str], ranges: Sequence[Range], room: Room, first: int
    ) -> Request[list[list[memoryview] | None]]:
        """Ask for ranges of objects; None where one is gone, or ends before the last byte of a range.

        Args:
            names: of the objects.
            ranges: what is read of each.
            room: takes the first range of all its objects, one behind the other, then the second.
            first: which of the room's objects the first is.
        """
        runs = list(_runs(ranges))

        def ask(_: ObjectStore) -> list[list[memoryview] | None]:
            found: list[list[memoryview] | None] = []
            for at, name in enumerate(names, start=first):
                views = room.places(at, [size for _, size in ranges])
                found.append(views if _is_read(self.path_of(name), runs, views) else None)
            return found

        return ask

    # ---- removing -----------------------------------------------------------------------------

    def remove(self, names: Sequence[str]) -> Request[list[bool]]:
        """Remove objects; say of each whether it was there."""
        return lambda _: [_is_removed(self.path_of(name)) for name in names]


@contextmanager
def _opened(path: str) -> Iterator[int]:
    # A pipe in the place of a file must not keep whoever opens it waiting.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield file
    finally:
        os.close(file)


def _size_of(path: str) -> int | None:
    try:
        found = os.stat(path)  # noqa: PTH116  # of very many, a Path costs more than the call
    except _GONE:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _begin(path: str, row: memoryview) -> Beginning | None:
    try:
        with _opened(path) as file:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                return None
            count = _fill(file, [row], 0)
    except _GONE:
        return None
    except OSError as error:
        _unless_stale(error)
        return None
    return Beginning(raw=row[:count], length=found.st_size)


def _is_read(path: str, runs: Sequence[tuple[int, slice]], views: Sequence[memoryview]) -> bool:
    """Fill views from a file; False where it is gone, or ends before."""
    try:
        with _opened(path) as file:
            return all(
                _fill(file, views[part], start) == sum(map(len, views[part]))
                for start, part in runs
            )
    except _GONE:
        return False
    except OSError as error:
        _unless_stale(error)
        return False


def _unless_stale(error: OSError) -> None:
    """Raise an error, unless it says that another machine removed the file under us."""
    if error.errno != errno.ESTALE:
        raise error


def _fill(file: int, views: Sequence[memoryview], start: int) -> int:
    """Read a file from a byte on into views, one behind the other; return the bytes, fewer where it ends."""
    total, done = sum(map(len, views)), 0
    while done < total:
        rest = views if not done and len(views) <= _MOST_VIEWS else _behind(views, done)
        count = os.preadv(file, rest, start + done)
        if not count:
            break
        done += count
    return done


def _behind(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of views of which so many bytes are filled, as far as one call takes it."""
    ends = list(accumulate(map(len, views)))
    rest = [
        view[max(0, done - (end - len(view))) :]
        for view, end in zip(views, ends, strict=True)
        if end > done
    ]
    return rest[:_MOST_VIEWS]


def _runs(ranges: Sequence[Range]) -> Iterator[tuple[int, slice]]:
    """Yield the first byte of neighbouring ranges, and which they are: they are read in one call."""
    first = 0
    for at, (start, size) in enumerate(ranges, start=1):
        if at == len(ranges) or ranges[at][0] != start + size:
            yield ranges[first][0], slice(first, at)
            first = at


def _is_removed(path: str) -> bool:
    with suppress(*_GONE):
        os.unlink(path)  # noqa: PTH108  # see above
        return True
    return False
