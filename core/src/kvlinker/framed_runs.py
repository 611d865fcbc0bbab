"""A run reads ranges of some objects one after the other, as layers are asked for, while the next are on their way."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.framed_objects import FoundObjects
from kvlinker.named_values import Fetched, Range

__all__ = ["FramedRun", "following", "next_to"]


class FramedRun:
    """Ranges of some objects that are fetched one after the other, as layers are asked for."""

    def __init__(
        self,
        *,
        part: FoundObjects,
        asked: IndexArray,
        numbers: IndexArray,
        ranges: Sequence[Range],
        fetched: Generator[Fetched],
    ) -> None:
        self.part = part
        self.asked = asked
        self.numbers = numbers
        """Of those objects of the part that were good when the run began."""
        self._left = list(ranges)
        self._last: list[Range] = []
        self._taken = 0
        self._fetched = fetched
        self._next: Fetched | None = None

    def _is_of(self, part: FoundObjects, numbers: IndexArray) -> bool:
        return part is self.part and np.array_equal(numbers, self.asked)

    def gives(self, part: FoundObjects, numbers: IndexArray, ranges: Sequence[Range]) -> bool:
        """Whether these ranges of these objects come next."""
        return self._is_of(part, numbers) and self._left[: len(ranges)] == ranges

    def is_followed_by(
        self, part: FoundObjects, numbers: IndexArray, ranges: Sequence[Range]
    ) -> bool:
        """Whether these ranges stand behind those that were taken last, as those of the next layer do."""
        return self._is_of(part, numbers) and next_to(self._last) == ranges

    def take(self, count: int) -> Iterator[Fetched]:
        """Yield the next ranges of all objects, with numbers from 0 on."""
        self._last, self._left = self._left[:count], self._left[count:]
        missing = count * len(self.numbers)
        while missing:
            fetched = next(self._fetched)
            missing -= len(fetched.numbers)
            yield replace(fetched, range=fetched.range - self._taken)
        self._taken += count

    def close(self) -> None:
        """Fetch no more."""
        self._fetched.close()


def next_to(ranges: Sequence[Range]) -> list[Range]:
    """Return as many ranges behind those given: each is moved by the length of the neighbours that it is one of."""
    moved: list[Range] = []
    first = 0
    for at, (start, size) in enumerate(ranges):
        if at + 1 == len(ranges) or start + size != ranges[at + 1][0]:
            length = start + size - ranges[first][0]
            moved += [(begun + length, bytes_) for begun, bytes_ in ranges[first : at + 1]]
            first = at + 1
    return moved


def following(ranges: Sequence[Range], end: int) -> list[Range]:
    """Return what is read next, if one layer after the other is read in the same way, up to the end of the value."""
    following: list[Range] = []
    ranges = next_to(ranges)
    while all(start + size <= end for start, size in ranges):
        following += ranges
        ranges = next_to(ranges)
    return following
