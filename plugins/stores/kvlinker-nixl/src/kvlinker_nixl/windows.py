"""A window is what was read of some objects beyond what was asked for, since they are read layer by layer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import HostObjects
from kvlinker.framed_objects import FoundObjects, Piece
from kvlinker.spans import BufferSpan
from kvlinker_nixl.blocks import Loan

__all__ = ["ReadRows", "Window", "Windows"]

_KEPT = 4
"""Components of a layer, each of which has a place of its own in an object."""
_WATCHED = 64
"""Ends of reads that are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadRows:
    """What was read of some objects."""

    block: NDArray[np.uint8]
    """[objects, bytes]"""
    span: BufferSpan
    """The same, as copies take it."""
    slots: IndexArray
    lead: int = 0
    """Bytes in front of what is wanted."""

    @classmethod
    def of(cls, block: NDArray[np.uint8]) -> Self:
        """Return bytes as they lie in memory: uint8 [objects, bytes]."""
        span = BufferSpan(
            base_ptr=block.ctypes.data,
            rows=len(block),
            row_bytes=block.shape[1],
            row_stride=block.shape[1],
            label="slots",
        )
        return cls(block=block, span=span, slots=np.arange(len(block), dtype=np.int64))

    def behind(self, lead: int) -> Self:
        """Return the same, of which so many bytes stand in front of what is wanted."""
        return replace(self, lead=lead)

    def views(self, size: int) -> list[memoryview]:
        """Return the bytes that are wanted of each object."""
        return [row[self.lead : self.lead + size].data for row in self.block]

    def objects(
        self,
        piece: Piece,
        *,
        chosen: IndexArray | None = None,
        sums: NDArray[np.uint64] | None = None,
    ) -> HostObjects:
        """Return all of them, or those chosen, as a copy takes them."""
        slots = self.slots if chosen is None else chosen
        first = piece.start - self.lead
        return HostObjects(span=self.span, slots=slots, first_offset=first, sums=sums)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """Bytes of some objects, as many of each, in a block that was lent for them."""

    part: FoundObjects
    numbers: IndexArray
    """[objects] which ones of the part."""
    first: int
    """Offset in the frames of the first byte."""
    rows: ReadRows
    loan: Loan
    """Of the block that the bytes lie in."""

    @property
    def end(self) -> int:
        """Offset in the frames behind the last byte."""
        return self.first + self.rows.span.row_bytes

    def has(self, part: FoundObjects, numbers: IndexArray, first: int, end: int) -> bool:
        """Whether the bytes of these objects between two offsets in the frames are here."""
        is_inside = self.first <= first and end <= self.end
        return is_inside and self.part is part and np.array_equal(self.numbers, numbers)


class Windows:
    """The windows of one session, each used by one read at a time."""

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._kept: list[Window] = []
        self._ends: dict[int, None] = {}

    def take(self, part: FoundObjects, numbers: IndexArray, first: int, end: int) -> Window | None:
        """Return a window that has the bytes, which nobody else is given until it is put back."""
        with self._lock:
            for at, window in enumerate(self._kept):
                if window.has(part, numbers, first, end):
                    return self._kept.pop(at)
        return None

    def follows(self, first: int, end: int) -> bool:
        """Note a read, and return whether an earlier one ended where it begins: others will follow."""
        with self._lock:
            is_next = first in self._ends
            self._ends.pop(first, None)
            self._ends[end] = None
            while len(self._ends) > _WATCHED:
                self._ends.pop(next(iter(self._ends)))
        return is_next

    def put(self, window: Window, *, used: int) -> None:
        """Keep a window of which bytes are left behind an offset; of too many the oldest goes."""
        with self._lock:
            kept = [*self._kept, window] if used < window.end else self._kept
            self._kept, left = kept[-_KEPT:], kept[:-_KEPT]
        for one in left if used < window.end else [window]:
            one.loan.end()

    def close(self) -> None:
        """Give every block back. Idempotent."""
        with self._lock:
            kept, self._kept = self._kept, []
        for window in kept:
            window.loan.end()
