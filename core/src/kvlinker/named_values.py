"""Named values are bytes under names that follow from object keys: what a store tells shared code of its wire.

Framed objects lie in them, header and payload in one. A store that says how values are asked for gets looks and
reads from here and from `kvlinker.framed_reads`, and writes from `kvlinker.framed_writes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from kvlinker.keys import checked_key, checked_namespace
from kvlinker.store import ObjectKey

__all__ = [
    "Beginning",
    "Fetched",
    "NamedValues",
    "Range",
    "RowViews",
    "digits_of_key",
    "digits_of_namespace",
    "parts_of",
]


def digits_of_key(key: ObjectKey) -> str:
    """Return the hexadecimal digits that stand for an object in a name.

    Raises:
        ContractError: that is no object key.
    """
    return checked_key(key).hex()


def digits_of_namespace(namespace: bytes) -> str:
    """Return the hexadecimal digits that the names of a namespace's objects begin with.

    Raises:
        ContractError: that is no namespace.
    """
    return checked_namespace(namespace).hex()


def parts_of(count: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` that cover `count` items in order."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


Range: TypeAlias = tuple[int, int]
"""First byte in the value, and bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What a value begins with, and how long it is."""

    raw: memoryview
    length: int
    """Bytes of the whole value."""


class RowViews(Sequence[memoryview | None]):
    """Views of equally long bytes, one behind the other at equal distances, so that all can be used at once."""

    def __init__(self, rows: NDArray[np.uint8]) -> None:
        """Take the bytes: [views, bytes], dense in a row."""
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> memoryview | None: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[memoryview | None]: ...

    def __getitem__(self, at: int | slice) -> memoryview | Sequence[memoryview | None] | None:
        return RowViews(self.rows[at]) if isinstance(at, slice) else self.rows[at].data


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fetched:
    """The same range of some values."""

    range: int
    """Number of the range among those that were asked for."""
    numbers: Sequence[int]
    """Which of the keys these are."""
    views: Sequence[memoryview | None]
    """[numbers] the bytes, of whatever length they have; None where there is no value, or one that ends before.

    Where they are RowViews, nothing is done for each of them.
    """


class NamedValues(ABC):
    """The values of one store, as one direction of its calls reaches them.

    Every call has a deadline and raises a StoreError where the server cannot be asked. What is yielded may be
    overwritten as soon as the next is asked for.
    """

    @property
    @abstractmethod
    def answer_bytes(self) -> int:
        """Bytes of one answer at most: what is longer is asked for in pieces, where it can be cut."""

    @abstractmethod
    def begin(
        self, keys: Sequence[ObjectKey], size: int
    ) -> Iterator[Sequence[tuple[int, Beginning | None]]]:
        """Yield at most the first `size` bytes of each value, some at a time, with the numbers of their keys.

        None where there is no value. What is under a name and is no value is one of no bytes and some length.
        """

    @abstractmethod
    def fetch(
        self, keys: Sequence[ObjectKey], ranges: Sequence[Range], *, expected: Sequence[Range] = ()
    ) -> Generator[Fetched]:
        """Yield ranges of every value: all values' first range, all values' second, and so on.

        Args:
            keys: of the values.
            ranges: what is wanted.
            expected: what will be wanted next, as far as one can guess, yielded behind the ranges and counted with
                them. Some of it may be on its way while others are used; the generator may be closed before.
        """

    @abstractmethod
    def remove(self, keys: Sequence[ObjectKey]) -> None:
        """Remove values; none is no error."""
