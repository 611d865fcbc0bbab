"""Values are objects of the bucket, asked for one request each and several at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

from kvlinker.named_values import Beginning, Fetched, NamedValues
from kvlinker.store import ObjectKey
from kvlinker_s3.lanes import Lane
from kvlinker_s3.names import Names
from kvlinker_s3.requests import Request, begin_of, delete, ranges_of

__all__ = ["S3Values"]

_T = TypeVar("_T")
_TOGETHER_BYTES = 1 << 20
"""Short answers are handed over together, up to so many bytes."""


class S3Values(NamedValues):
    """The objects of a store, through one of its lanes."""

    def __init__(self, lane: Lane, names: Names, call_bytes: int) -> None:
        """Take the lane, and how many bytes may be in host memory at a time."""
        self._lane = lane
        self._names = names
        self._call_bytes = call_bytes

    @property
    def answer_bytes(self) -> int:
        """See NamedValues."""
        return self._call_bytes

    def begin(
        self, keys: Sequence[ObjectKey], size: int
    ) -> Iterator[Sequence[tuple[int, Beginning | None]]]:
        """See NamedValues."""
        requests = [begin_of(name, size) for name in self._names.of_objects(keys)]
        for first, answers in self._answers(requests, size):
            yield list(enumerate(answers, start=first))

    def fetch(
        self, keys: Sequence[ObjectKey], ranges: Sequence[tuple[int, int]]
    ) -> Iterator[Fetched]:
        """See NamedValues; ranges of one object are one call of the library."""
        names = self._names.of_objects(keys)
        for part in self._parts([size for _, size in ranges]):
            chosen = ranges[part]
            requests = [ranges_of(name, chosen) for name in names]
            size = sum(length for _, length in chosen)
            for first, answers in self._answers(requests, size):
                numbers = range(first, first + len(answers))
                for at in range(len(chosen)):
                    views = [None if answer is None else answer[at] for answer in answers]
                    yield Fetched(range=part.start + at, numbers=numbers, views=views)

    def _parts(self, sizes: Sequence[int]) -> Iterator[slice]:
        """Yield ranges that are asked for at once: of so many bytes as may be in memory, or one alone."""
        cuts, total = [0], 0
        for at, size in enumerate(sizes):
            if total and total + size > self._call_bytes:
                cuts.append(at)
                total = 0
            total += size
        for start, end in pairwise([*cuts, len(sizes)]):
            yield slice(start, end)

    def _answers(
        self, requests: Sequence[Request[_T]], size: int
    ) -> Iterator[tuple[int, Sequence[_T]]]:
        """Yield answers of so many bytes each in order, with the number of the first."""
        together = max(1, _TOGETHER_BYTES // size)
        ahead = max(1, self._call_bytes // size)
        first = 0
        for answers in self._lane.stream(requests, ahead=ahead, together=together):
            yield first, answers
            first += len(answers)

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        """See NamedValues."""
        self._lane.run([delete([name]) for name in self._names.of_objects(keys)])
