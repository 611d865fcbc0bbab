"""Values are objects of the bucket, asked for one request each and several at once."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvlinker.named_values import Beginning, Fetched, Range, parts_of
from kvlinker.store import ObjectKey
from kvlinker_s3.lanes import Asked, Lane
from kvlinker_s3.listings import Listing
from kvlinker_s3.names import Names
from kvlinker_s3.object_values import ObjectValues, Take, ending_others, groups_of, together
from kvlinker_s3.requests import begin_of, delete, ranges_of, read_bytes, size_of

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

__all__ = ["S3Values"]

_LISTED = 1000
"""Names in one answer of a listing, and in one request to remove."""

_TOGETHER_BYTES = 4 << 20
"""Short answers are handed over together, up to so many bytes."""
_SIDE_BY_SIDE_BYTES = 256 << 10
"""Whole objects that are shorter are taken together: a call costs more than a second copy."""


class S3Values(ObjectValues):
    """The objects of a bucket or a container."""

    def __init__(self, lane: Lane, names: Names, *, call_bytes: int) -> None:
        """See ObjectValues."""
        super().__init__(lane, names, call_bytes=call_bytes)
        self._together_bytes = min(_TOGETHER_BYTES, call_bytes)

    def begin(
        self, keys: Sequence[ObjectKey], size: int
    ) -> Iterator[Sequence[tuple[int, Beginning | None]]]:
        """See NamedValues."""
        names = self._names.of_objects(keys)
        parts = together(len(names), size, self._together_bytes)
        asked = [
            Asked(requests=[begin_of(name, size) for name in names[part]], bytes=each)
            for part, each in parts
        ]
        answers = self._lane.stream(asked, ahead_bytes=self._call_bytes)
        for (part, _), some in zip(parts, answers, strict=True):
            yield list(enumerate(some, start=part.start))

    def each_whole(self, keys: Sequence[ObjectKey], size: int, take: Take) -> None:
        """See ObjectValues; a thread takes what came before it asks for more."""
        names = self._names.of_objects(keys)
        threads = self._lane.concurrency
        each = max(1, min(-(-len(names) // threads), _SIDE_BY_SIDE_BYTES // size))
        parts = list(parts_of(len(names), each))
        copies = 1 if each == 1 else 2  # what is put side by side is there twice
        threads = min(threads, max(1, self._call_bytes // (copies * each * size)))
        # Some at a time, so that lookups do not wait for all of a long load.
        for some in parts_of(len(parts), max(1, self._call_bytes // (each * size))):
            self._take_parts(names, size, parts[some], take, threads=threads)

    def _take_parts(
        self, names: Sequence[str], size: int, parts: Sequence[slice], take: Take, *, threads: int
    ) -> None:
        left = iter(parts)  # of which each thread takes the next
        ended = threading.Event()

        def work(client: ObjectStore) -> None:
            with ending_others(ended):
                for part in left:
                    if ended.is_set():
                        return
                    self._lane.check_open()
                    found = [begin_of(name, size)(client) for name in names[part]]
                    take(part, _side_by_side(found, size), found)

        self._lane.run([work] * min(threads, len(parts)))

    def fetch(
        self, keys: Sequence[ObjectKey], ranges: Sequence[Range], *, expected: Sequence[Range] = ()
    ) -> Generator[Fetched]:
        """See NamedValues; ranges of one object that are asked for at once are one call of the library."""
        names = self._names.of_objects(keys)
        everything = [*ranges, *expected]
        # No more than half of what may be in memory at once, so that some can be on their way while others are used.
        most = self._call_bytes // 2
        groups = [
            group
            for some in groups_of(len(names), everything, len(ranges), most)
            for group in _split(
                some, everything, 1 if some.start < len(ranges) else len(names), most
            )
        ]
        asked: list[Asked[list[memoryview] | None]] = []
        parts: list[tuple[slice, slice]] = []
        for group in groups:
            chosen = everything[group]
            size = read_bytes(chosen)
            for part, each in together(len(names), size, self._together_bytes):
                parts.append((group, part))
                requests = [ranges_of(name, chosen) for name in names[part]]
                asked.append(Asked(requests=requests, bytes=each))
        # What is held below is in memory too.
        ahead = self._call_bytes // 2 if expected else self._call_bytes
        answers = self._lane.stream(asked, ahead_bytes=ahead)
        held: list[tuple[slice, Sequence[list[memoryview] | None]]] = []
        for (group, part), some in zip(parts, answers, strict=True):
            held.append((part, some))
            # What was guessed comes in the order of ranges, which are taken one after the other.
            is_one = group.stop - group.start == 1
            if is_one or group.stop <= len(ranges) or part.stop == len(names):
                yield from _fetched(group, held)
                held.clear()

    # ---- looking and removing -----------------------------------------------------------------

    def sizes(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """See ObjectValues; the server is asked once for each key."""
        return self._lane.run([size_of(name) for name in self._names.of_objects(keys)])

    def names_in(self, folder: str) -> Iterator[Sequence[str]]:
        """See ObjectValues."""
        for page in self._list(folder):
            yield [item["path"] for item in page]

    def sizes_in(self, folder: str) -> Iterator[Sequence[int]]:
        """See ObjectValues."""
        for page in self._list(folder):
            yield [item["size"] for item in page]

    def _list(self, folder: str) -> Iterator[Sequence[ObjectMeta]]:
        """Yield what is known of objects, page by page."""

        def begin(client: ObjectStore) -> Listing:
            return Listing(client.list(folder, chunk_size=_LISTED), self._lane.request_seconds)

        def go_on(_: ObjectStore) -> Sequence[ObjectMeta] | None:
            return listing.next_page()

        (listing,) = self._lane.run([begin])
        while (page := self._lane.run([go_on])[0]) is not None:
            yield [item for item in page if self._names.is_object(item["path"])]

    def take_away(self, names: Sequence[str]) -> list[bool]:
        """See ObjectValues; of two that remove an object at once, both may hear that it was there."""
        # Most servers say of an absent object that it was removed.
        sizes = self._lane.run([size_of(name) for name in names])
        there = [size is not None for size in sizes]
        self.remove_names([name for name, is_there in zip(names, there, strict=True) if is_there])
        return there

    def remove_names(self, names: Sequence[str]) -> None:
        """Remove objects, as many in a request as the server takes.

        Raises:
            StoreError: the server cannot be asked; some may have been removed.
        """
        parts = [names[part] for part in parts_of(len(names), _LISTED)]
        done = self._lane.run([delete(part) for part in parts])
        # Where one that was gone already is an error, the others are removed one by one.
        left = [
            name for part, is_done in zip(parts, done, strict=True) if not is_done for name in part
        ]
        self._lane.run([delete([name]) for name in left])

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        """See NamedValues."""
        self._lane.run([delete([name]) for name in self._names.of_objects(keys)])


def _side_by_side(found: Sequence[Beginning | None], size: int) -> NDArray[np.uint8]:
    """Return the bytes of values that have so many, and anything for the others: [values, bytes]."""
    raw = [None if one is None or len(one.raw) != size else one.raw for one in found]
    if len(raw) == 1 and raw[0] is not None:
        return np.frombuffer(raw[0], dtype=np.uint8).reshape(1, size)
    rows = np.empty((len(raw), size), dtype=np.uint8)
    for row, one in zip(rows, raw, strict=True):
        if one is not None:
            row[:] = np.frombuffer(one, dtype=np.uint8)
    return rows


def _split(group: slice, ranges: Sequence[Range], count: int, most_bytes: int) -> Iterator[slice]:
    """Yield a group of ranges as groups that are not too long for `count` objects with the gaps that are read along."""
    if group.stop - group.start == 1 or count * read_bytes(ranges[group]) <= most_bytes:
        yield group
        return
    middle = (group.start + group.stop) // 2
    for half in (slice(group.start, middle), slice(middle, group.stop)):
        yield from _split(half, ranges, count, most_bytes)


def _fetched(
    group: slice, found: Sequence[tuple[slice, Sequence[list[memoryview] | None]]]
) -> Iterator[Fetched]:
    """Yield the answers to requests for the same ranges, range by range."""
    for at in range(group.start, group.stop):
        for part, answers in found:
            views = [None if one is None else one[at - group.start] for one in answers]
            yield Fetched(range=at, numbers=range(part.start, part.stop), views=views)
