"""Values of a directory are files, read some at a time into memory that has the same range of all side by side."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from kvlinker.host_blocks import HostBlocks
from kvlinker.moving import current_mover
from kvlinker.named_values import Beginning, Fetched, Range, RowViews, parts_of
from kvlinker.store import ObjectKey
from kvlinker_s3.directory import Directory
from kvlinker_s3.lanes import Asked, Lane
from kvlinker_s3.names import Names
from kvlinker_s3.object_values import ObjectValues, Take, ending_others, groups_of, together
from kvlinker_s3.requests import Request
from kvlinker_s3.rooms import Room

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["DirectoryValues"]

_T = TypeVar("_T")
_TAKEN_BYTES = 4 << 20
"""Read and taken by one thread, one time after the other: few enough to stay in the cache that threads share."""
_TAKERS = 2
"""Threads that do so: more take the cache from each other."""
_FAST = 1_000_000_000
"""Bytes in a second that come from the system's cache at least; from a disk or a network, more threads bring more."""
_TOGETHER_BYTES = 8 << 20
"""Answers that are handed over together: they are copied while the processor still has them at hand."""
_AHEAD = 4
"""So many of them are read ahead."""
_REQUEST_BYTES = 512 << 10
"""Short files are read by one request up to so many bytes."""
_LARGEST_BLOCK = 12 << 20
_FOLDERS = 32
"""That are listed at once."""


class DirectoryValues(ObjectValues):
    """The files of a directory."""

    def __init__(
        self, lane: Lane, names: Names, *, url: str, call_bytes: int, concurrency: int
    ) -> None:
        """Take what ObjectValues does, the directory, and how many requests run at once."""
        super().__init__(lane, names, call_bytes=call_bytes)
        self._directory = Directory(url)
        self._concurrency = concurrency
        self._together_bytes = min(_TOGETHER_BYTES, call_bytes // _AHEAD)
        self._taken_bytes = min(_TAKEN_BYTES, call_bytes // _TAKERS)
        self._blocks = HostBlocks(_LARGEST_BLOCK, kept=_AHEAD + 1)

    # ---- reading ------------------------------------------------------------------------------

    def begin(
        self, keys: Sequence[ObjectKey], size: int
    ) -> Iterator[Sequence[tuple[int, Beginning | None]]]:
        """See NamedValues."""
        names = self._names.of_objects(keys)
        parts = together(len(names), size, self._together_bytes)
        rooms = [self._room(part, size) for part, _ in parts]
        asked = [
            Asked(
                requests=[
                    self._directory.begin_of(names[part][some], size, room, some.start)
                    for some in self._pieces(part, size)
                ],
                bytes=each,
            )
            for (part, each), room in zip(parts, rooms, strict=True)
        ]
        answers = self._lane.stream(asked, ahead_bytes=self._ahead(size))
        for (part, _), room, some in zip(parts, rooms, answers, strict=True):
            yield list(enumerate(chain.from_iterable(some), start=part.start))
            room.give_back()

    def each_whole(self, keys: Sequence[ObjectKey], size: int, take: Take) -> None:
        """See ObjectValues.

        As many threads read as a core or two keep busy; as many as there may be, where reading means waiting.
        """
        names = self._names.of_objects(keys)
        each = max(1, self._taken_bytes // size)
        left = deque(parts_of(len(names), each))
        most = min(self._concurrency, max(1, self._call_bytes // (each * size)))
        with _single_copies():
            self._take_parts(names, size, left, take, threads=min(_TAKERS, most), until_slow=True)
        while left:  # some at a time, so that lookups do not wait for all of a long load
            count = min(len(left), max(1, self._call_bytes // (each * size)))
            some = deque([left.popleft() for _ in range(count)])
            self._take_parts(names, size, some, take, threads=most, until_slow=False)

    def _take_parts(
        self,
        names: Sequence[str],
        size: int,
        left: deque[slice],
        take: Take,
        *,
        threads: int,
        until_slow: bool,
    ) -> None:
        """Read and take what is left on some threads; leave off where that is asked for and reading is slow."""
        count = len(left)
        longest = max((part.stop - part.start for part in left), default=0)
        ended = threading.Event()

        def work(_: ObjectStore) -> None:
            with self._blocks.lent(longest * size) as block, ending_others(ended):
                while not ended.is_set() and (part := _next_of(left)) is not None:
                    self._lane.check_open()
                    rows = block[: (part.stop - part.start) * size].reshape(-1, size)
                    began = time.perf_counter()
                    found = self._directory.begun(names[part], rows)
                    if until_slow and rows.nbytes < (time.perf_counter() - began) * _FAST:
                        ended.set()
                    take(part, rows, found)

        self._lane.run([work] * min(threads, count))

    def fetch(
        self, keys: Sequence[ObjectKey], ranges: Sequence[Range], *, expected: Sequence[Range] = ()
    ) -> Generator[Fetched]:
        """See NamedValues; several ranges are read at once where all of them find room side by side."""
        names = self._names.of_objects(keys)
        everything = [*ranges, *expected]
        asked: list[Asked[list[list[memoryview] | None]]] = []
        parts: list[tuple[slice, slice, Room]] = []
        longest = 0
        for group in groups_of(len(names), everything, len(ranges), self._together_bytes):
            chosen = everything[group]
            size = sum(size for _, size in chosen)
            longest = max(longest, size)
            for part, each in together(len(names), size, self._together_bytes):
                room = self._room(part, size)
                requests = [
                    self._directory.ranges_of(names[part][some], chosen, room, some.start)
                    for some in self._pieces(part, size)
                ]
                parts.append((group, part, room))
                asked.append(Asked(requests=requests, bytes=each))
        answers = self._lane.stream(asked, ahead_bytes=self._ahead(longest))
        for (group, part, room), some in zip(parts, answers, strict=True):
            found = list(chain.from_iterable(some))
            numbers = range(part.start, part.stop)
            for at, views in enumerate(_views(found, everything[group], room), start=group.start):
                yield Fetched(range=at, numbers=numbers, views=views)
            room.give_back()

    def _room(self, part: slice, size: int) -> Room:
        return Room(self._blocks, count=part.stop - part.start, size=size)

    def _pieces(self, part: slice, size: int) -> Iterator[slice]:
        """Yield which objects of a part one request reads: few enough that all threads have something to do."""
        count = part.stop - part.start
        return parts_of(count, min(self._share(count), max(1, _REQUEST_BYTES // size)))

    def _share(self, count: int) -> int:
        return max(1, -(-count // self._concurrency))

    def _ahead(self, size: int) -> int:
        """Return the bytes that may be in host memory, where one answer has so many."""
        return min(self._call_bytes, _AHEAD * max(self._together_bytes, size))

    # ---- looking and removing -----------------------------------------------------------------

    def sizes(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """See ObjectValues."""
        names = self._names.of_objects(keys)
        return self._shared([self._directory.sizes_of(names[part]) for part in self._shares(names)])

    def take_away(self, names: Sequence[str]) -> list[bool]:
        """See ObjectValues."""
        return self._shared([self._directory.remove(names[part]) for part in self._shares(names)])

    def remove_names(self, names: Sequence[str]) -> None:
        """See ObjectValues."""
        self.take_away(names)

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        """See NamedValues."""
        self.take_away(self._names.of_objects(keys))

    def _shares(self, names: Sequence[str]) -> Iterator[slice]:
        return parts_of(len(names), self._share(len(names)))

    def _shared(self, requests: Sequence[Request[list[_T]]]) -> list[_T]:
        return list(chain.from_iterable(self._lane.run(requests)))

    def names_in(self, folder: str) -> Iterator[Sequence[str]]:
        """See ObjectValues."""
        for folders in self._folders(folder):
            for names in self._lane.run([self._directory.names_in(one) for one in folders]):
                yield [name for name in names if self._names.is_object(name)]

    def sizes_in(self, folder: str) -> Iterator[Sequence[int]]:
        """See ObjectValues."""
        for names in self.names_in(folder):
            sizes = self._shared(
                [self._directory.sizes_of(names[part]) for part in self._shares(names)]
            )
            yield [size for size in sizes if size is not None]

    def _folders(self, folder: str) -> Iterator[Sequence[str]]:
        """Yield the folders that objects below one lie in, some at a time."""
        above = [folder]
        for _ in range(self._names.levels_below(folder)):
            above = self._shared([self._directory.folders_in(one) for one in above])
        for part in parts_of(len(above), _FOLDERS):
            yield above[part]


def _next_of(left: deque[slice]) -> slice | None:
    with suppress(IndexError):  # another thread may have had the last one
        return left.popleft()
    return None


@contextmanager
def _single_copies() -> Iterator[None]:
    """Let a copy have one core for the length of a block, since there is a thread for each already."""
    mover = current_mover()
    with nullcontext() if mover is None else mover.beside_work():
        yield


def _views(
    found: Sequence[list[memoryview] | None], ranges: Sequence[Range], room: Room
) -> Iterator[Sequence[memoryview | None]]:
    """Yield each range of all objects of a room: as rows, where none of the objects is missing."""
    is_whole = None not in found
    start = 0
    for at, (_, size) in enumerate(ranges):
        if is_whole:
            yield RowViews(room.rows(start, size))
        else:
            yield [None if one is None else one[at] for one in found]
        start += size
