"""Object values are the objects of a store as all of its calls see them: what a bucket and a directory both can."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvlinker.named_values import Beginning, NamedValues, Range, parts_of
from kvlinker.store import ObjectKey
from kvlinker_s3.lanes import Lane
from kvlinker_s3.names import Names

__all__ = ["ObjectValues", "Take", "ending_others", "groups_of", "together"]

Take: TypeAlias = Callable[[slice, NDArray[np.uint8], Sequence[Beginning | None]], None]
"""Takes the beginnings of some values, which lie in rows of memory."""


class ObjectValues(NamedValues):
    """The objects of a bucket or a directory, through one of the store's lanes."""

    def __init__(self, lane: Lane, names: Names, *, call_bytes: int) -> None:
        """Take the lane, and how many bytes may be in host memory at a time."""
        self._lane = lane
        self._names = names
        self._call_bytes = call_bytes

    @property
    def answer_bytes(self) -> int:
        """See NamedValues."""
        return self._call_bytes

    @abstractmethod
    def each_whole(self, keys: Sequence[ObjectKey], size: int, take: Take) -> None:
        """Read at most so many bytes of every value, and have them taken while the processor has them at hand.

        Args:
            keys: of the values.
            size: bytes, no more than an answer may have.
            take: called on several threads at once, with which keys these are, uint8 [keys, bytes] where the bytes
                lie of those that have so many, and what they are. The memory is used again when it returns, and it
                is called no more when this returns, however it does.

        Raises:
            StoreError: the server cannot be asked; some was taken.
        """

    @abstractmethod
    def sizes(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Return the lengths of objects; None where there is none.

        Raises:
            StoreError: the server cannot be asked.
        """

    @abstractmethod
    def names_in(self, folder: str) -> Iterator[Sequence[str]]:
        """Yield the names of the objects below a folder, some at a time; the caller may remove them meanwhile.

        Raises:
            StoreError: the server cannot be asked.
        """

    @abstractmethod
    def sizes_in(self, folder: str) -> Iterator[Sequence[int]]:
        """Yield the lengths of the objects below a folder, some at a time.

        Raises:
            StoreError: the server cannot be asked.
        """

    @abstractmethod
    def remove_names(self, names: Sequence[str]) -> None:
        """Remove objects that were there when they were listed.

        Raises:
            StoreError: the server cannot be asked; some may have been removed.
        """

    @abstractmethod
    def take_away(self, names: Sequence[str]) -> Sequence[bool]:
        """Remove objects, each named once; say of each whether it was there.

        Raises:
            StoreError: the server cannot be asked; some may have been removed.
        """


def groups_of(count: int, ranges: Sequence[Range], wanted: int, most_bytes: int) -> Iterator[slice]:
    """Yield ranges that are asked for at once of each of `count` objects: more and more of the expected ones.

    Args:
        count: objects.
        ranges: what is wanted of each, and behind it what is expected to be.
        wanted: how many of the ranges are wanted.
        most_bytes: of the answers to all objects together; a range that is longer goes alone.
    """
    start, most = 0, wanted
    while start < len(ranges):
        limit = wanted if start < wanted else min(start + most, len(ranges))
        ends = np.cumsum([count * size for _, size in ranges[start:limit]])
        fitting = int(np.searchsorted(ends, most_bytes, side="right"))
        stop = start + max(1, fitting)
        yield slice(start, stop)
        if start >= wanted:
            most *= 2
        start = stop


@contextmanager
def ending_others(ended: threading.Event) -> Iterator[None]:
    """Let others know of an error in a block, since what they do is worth nothing then."""
    try:
        yield
    except BaseException:
        ended.set()
        raise


def together(count: int, size: int, most_bytes: int) -> list[tuple[slice, int]]:
    """Return which of `count` answers of some bytes are handed over together, and their bytes."""
    parts = parts_of(count, max(1, most_bytes // size))
    return [(part, (part.stop - part.start) * size) for part in parts]
