"""Values are objects of the bucket, asked for one request each and several at once."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import numpy as np

from kvlinker.named_values import Beginning, Fetched, NamedValues, Range, parts_of
from kvlinker.store import ObjectKey
from kvlinker_s3.lanes import Asked, Lane
from kvlinker_s3.names import Names
from kvlinker_s3.requests import begin_of, delete, ranges_of

__all__ = ["S3Values"]

_TOGETHER_BYTES = 4 << 20
"""Short answers are handed over together, up to so many bytes."""


class S3Values(NamedValues):
    """The objects of a store, through one of its lanes."""

    def __init__(self, lane: Lane, names: Names, call_bytes: int) -> None:
        """Take the lane, and how many bytes may be in host memory at a time."""
        self._lane = lane
        self._names = names
        self._call_bytes = call_bytes
        self._together_bytes = min(_TOGETHER_BYTES, call_bytes)

    @property
    def answer_bytes(self) -> int:
        """See NamedValues."""
        return self._call_bytes

    def begin(
        self, keys: Sequence[ObjectKey], size: int
    ) -> Iterator[Sequence[tuple[int, Beginning | None]]]:
        """See NamedValues."""
        names = self._names.of_objects(keys)
        parts = self._together(len(names), size)
        asked = [
            Asked(requests=[begin_of(name, size) for name in names[part]], bytes=each)
            for part, each in parts
        ]
        answers = self._lane.stream(asked, ahead_bytes=self._call_bytes)
        for (part, _), some in zip(parts, answers, strict=True):
            yield list(enumerate(some, start=part.start))

    def fetch(
        self, keys: Sequence[ObjectKey], ranges: Sequence[Range], *, expected: Sequence[Range] = ()
    ) -> Generator[Fetched]:
        """See NamedValues; ranges of one object that are asked for at once are one call of the library."""
        names = self._names.of_objects(keys)
        everything = [*ranges, *expected]
        asked: list[Asked[list[memoryview] | None]] = []
        parts: list[tuple[slice, slice]] = []
        for group in self._groups(len(names), everything, len(ranges)):
            chosen = everything[group]
            for part, each in self._together(len(names), sum(size for _, size in chosen)):
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

    def _groups(self, count: int, ranges: Sequence[Range], wanted: int) -> Iterator[slice]:
        """Yield ranges that are asked for at once of each of `count` objects: more and more of the expected ones.

        No more than half of what may be in memory, so that some can be on their way while others are used.
        """
        start, most = 0, wanted
        while start < len(ranges):
            limit = wanted if start < wanted else min(start + most, len(ranges))
            ends = np.cumsum([count * size for _, size in ranges[start:limit]])
            fitting = int(np.searchsorted(ends, self._call_bytes // 2, side="right"))
            stop = start + max(1, fitting)
            yield slice(start, stop)
            if start >= wanted:
                most *= 2
            start = stop

    def _together(self, count: int, size: int) -> list[tuple[slice, int]]:
        """Return which of `count` answers of some bytes are handed over together, and their bytes."""
        parts = parts_of(count, max(1, self._together_bytes // size))
        return [(part, (part.stop - part.start) * size) for part in parts]

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        """See NamedValues."""
        self._lane.run([delete([name]) for name in self._names.of_objects(keys)])


def _fetched(
    group: slice, found: Sequence[tuple[slice, Sequence[list[memoryview] | None]]]
) -> Iterator[Fetched]:
    """Yield the answers to requests for the same ranges, range by range."""
    for at in range(group.start, group.stop):
        for part, answers in found:
            views = [None if one is None else one[at - group.start] for one in answers]
            yield Fetched(range=at, numbers=range(part.start, part.stop), views=views)
