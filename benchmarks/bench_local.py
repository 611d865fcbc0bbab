"""Compare the file store and the memory store with plain calls of the system on the same bytes, and with memcpy.

Beside the file store, one file is written with `pwrite` and read with `preadv`, at offsets that a program of one
process keeps in its head; beside the memory store, a file in the same tmpfs is mapped and copied to and from. Both
move the bytes from and to one block of memory; the stores move pages between scattered pool memory and files that
other processes share, keep an index, and check every byte. Files are in the page cache, as they are for both.
A lookup is compared with asking whether a file of that name exists, as a store of one file for each page does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from measuring import Row, Scale, missing_peer, run_script
from numpy.typing import NDArray
from pages import MIB
from remote_stores import (
    MOVED_IN_MEMORY,
    SHAPES,
    Contest,
    PageClient,
    Pages,
    RawClient,
    Shape,
    measure_lookup,
    measure_shape,
)

from kvlinker.discovery import load_plugins
from kvlinker.errors import KVLinkerError
from kvlinker.registry import PluginRegistry

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # the folder in it has a name that nobody can guess
CAPACITY = 5 * MOVED_IN_MEMORY // 2
"""What is to be loaded, what is offloaded, and less than that for what was offloaded before: a store is full most of
its life, and makes room by evicting, as this one does from the second round on."""
SEGMENT_BYTES = 64 * MIB
"""By default a file of the store has a 64th of the capacity, which is gigabytes where a disk is used."""
WHY_MISSED = (
    "The calls beside it move bytes between a file and one block, in pieces as long as the object or the range, for "
    "one process that knows where everything is, over the same memory each time. A store sums every byte that it "
    "copies, takes new room for what is written, and keeps an index that other processes share; what it "
    "costs that pages lie in as many places as a model has buffers stands in the rows of the same pages."
)


class _File(RawClient):
    """Objects at their offsets in one file."""

    def __init__(self, folder: Path, shape: Shape, block: NDArray[np.uint8]) -> None:
        """Take the bytes of all objects: uint8 [objects, bytes]; they are read back into a block of its own."""
        self._folder = folder
        self._shape = shape
        self._block = block
        self._read = np.ones_like(block)
        self._path = folder / "raw"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        if block.nbytes:
            os.posix_fallocate(self._file, 0, block.nbytes)

    def put(self, part: slice) -> None:
        """Write some objects."""
        for number in range(len(self._block))[part]:
            self._write(number)

    def get(self, part: slice) -> None:
        """Read some objects whole."""
        for number in range(len(self._block))[part]:
            self._fill(number, 0, self._shape.object_bytes)

    def get_ranges(self, part: slice) -> None:
        """Read some objects layer by layer."""
        start = 0
        for length in self._shape.ranges:
            for number in range(len(self._block))[part]:
                self._fill(number, start, length)
            start += length

    @abstractmethod
    def _write(self, number: int) -> None:
        """Write one object."""

    @abstractmethod
    def _fill(self, number: int, start: int, length: int) -> None:
        """Read a range of one object."""

    def forget(self) -> None:
        """Remove what was written."""
        os.close(self._file)
        self._path.unlink()

    def look_up(self, names: Sequence[str]) -> None:
        """Ask for absent files one by one."""
        if any((self._folder / name).exists() for name in names):
            message = "files were found that nobody wrote"
            raise RuntimeError(message)


class SystemCalls(_File):
    """Written and read with a call of the system for each object, or for each range."""

    def from_pages(self, pages: Pages) -> PageClient:
        """Write and read with lists of buffers, which the system copies from and to one by one."""
        return PagesInCalls(self._file, self._shape, pages)

    def _write(self, number: int) -> None:
        size = self._shape.object_bytes
        _expect(os.pwrite(self._file, self._block[number], number * size), size)

    def _fill(self, number: int, start: int, length: int) -> None:
        place = memoryview(self._read[number])[start : start + length]
        offset = number * self._shape.object_bytes + start
        _expect(os.preadv(self._file, [place], offset), length)


class PagesInCalls(PageClient):
    """Written and read as often, from and to a list of pages."""

    def __init__(self, file: int, shape: Shape, pages: Pages) -> None:
        """Note where everything is."""
        self._file = file
        self._shape = shape
        self._views = [pages.views(number) for number in range(len(pages.block))]

    def put(self, part: slice) -> None:
        """See PageClient."""
        size = self._shape.object_bytes
        for number in range(len(self._views))[part]:
            _expect(os.pwritev(self._file, self._views[number], number * size), size)

    def get(self, part: slice) -> None:
        """See PageClient."""
        size = self._shape.object_bytes
        for number in range(len(self._views))[part]:
            _expect(os.preadv(self._file, self._views[number], number * size), size)

    def get_ranges(self, part: slice) -> None:
        """See PageClient."""
        start = 0
        for layer, length in enumerate(self._shape.ranges):
            for number in range(len(self._views))[part]:
                offset = number * self._shape.object_bytes + start
                _expect(os.preadv(self._file, [self._views[number][layer]], offset), length)
            start += length


class MappedFile(_File):
    """Mapped, and copied with a memcpy for each object, or for each range."""

    def __init__(self, folder: Path, shape: Shape, block: NDArray[np.uint8]) -> None:
        """Take the bytes of all objects: uint8 [objects, bytes]."""
        super().__init__(folder, shape, block)
        self._map = mmap.mmap(self._file, max(1, block.nbytes)) if block.nbytes else None
        self._base = 0
        if self._map is not None:
            self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def from_pages(self, pages: Pages) -> PageClient:
        """Copy between pages and the file, with nothing between."""
        return PagesInMap(self, self._base, self._shape, pages)

    def _write(self, number: int) -> None:
        size = self._shape.object_bytes
        ctypes.memmove(self._base + number * size, self._block[number].ctypes.data, size)

    def _fill(self, number: int, start: int, length: int) -> None:
        offset = number * self._shape.object_bytes + start
        ctypes.memmove(self._read.ctypes.data + offset, self._base + offset, length)


class PagesInMap(PageClient):
    """A memcpy of each range, between its page and the file."""

    def __init__(self, client: MappedFile, base: int, shape: Shape, pages: Pages) -> None:
        """Note where everything is."""
        self._memory = client, pages  # which stays mapped and allocated
        self._base = base
        self._shape = shape
        self._pages = [pages.addresses(number) for number in range(len(pages.block))]

    def put(self, part: slice) -> None:
        """See PageClient."""
        for number in range(len(self._pages))[part]:
            place = self._base + number * self._shape.object_bytes
            for page, size in zip(self._pages[number], self._shape.ranges, strict=True):
                ctypes.memmove(place, page, size)
                place += size

    def get(self, part: slice) -> None:
        """See PageClient."""
        for number in range(len(self._pages))[part]:
            place = self._base + number * self._shape.object_bytes
            for page, size in zip(self._pages[number], self._shape.ranges, strict=True):
                ctypes.memmove(page, place, size)
                place += size

    def get_ranges(self, part: slice) -> None:
        """See PageClient."""
        start = 0
        for layer, size in enumerate(self._shape.ranges):
            for number in range(len(self._pages))[part]:
                place = self._base + number * self._shape.object_bytes + start
                ctypes.memmove(self._pages[number][layer], place, size)
            start += size


def _expect(moved: int, size: int) -> None:
    if moved != size:
        message = f"{moved} B in the place of {size}"
        raise RuntimeError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a store is compared with what."""

    topic: str
    store: str
    """Name of the store plugin."""
    parent: Path | None
    """Folder in which both get folders of their own; the system's one for temporary files if None."""
    raw: type[_File]
    client: str
    """What `raw` does, in words."""


_PLACES = (
    _Place(
        topic="File store against the system's own calls",
        store="file",
        parent=None,
        raw=SystemCalls,
        client="pwrite and preadv",
    ),
    _Place(
        topic="Memory store against a mapped file in the same memory",
        store="memory",
        parent=SHARED_MEMORY,
        raw=MappedFile,
        client="a mapped file and memmove",
    ),
)


def _contest(place: _Place, folder: Path, registry: PluginRegistry) -> Contest:
    options = {"path": str(folder / "store"), "capacity": CAPACITY, "segment_size": SEGMENT_BYTES}
    return Contest(
        topic=place.topic,
        client=place.client,
        make_client=lambda shape, block: place.raw(folder, shape, block),
        open_store=lambda: registry.store(place.store).open(options),
        moved=MOVED_IN_MEMORY,
        evicts=True,
        why_missed=WHY_MISSED,
    )


def _rows(contest: Contest, scale: Scale) -> Iterator[Row]:
    """Yield the rows of one contest; of one shape where no figures are wanted."""
    for shape in SHAPES[1:2] if scale.is_quick else SHAPES:
        yield from measure_shape(contest, shape, scale)
    yield from measure_lookup(replace(contest, client="a stat of a file for each key"), scale)


def measure(scale: Scale) -> Iterator[Row]:
    """Yield the rows."""
    registry = load_plugins()
    for place in _PLACES:
        try:
            with tempfile.TemporaryDirectory(dir=place.parent) as folder:
                contest = _contest(place, Path(folder), registry)
                yield from _rows(contest, scale)
        except (KVLinkerError, OSError) as error:
            yield missing_peer(place.topic, "everything", place.client, f"Error: {error}")


if __name__ == "__main__":
    run_script(__doc__, measure)
