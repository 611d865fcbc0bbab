"""A window is what is read of some objects at once: into a block, from which it is copied to where it belongs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import HostObjects
from kvlinker.framed_objects import Piece
from kvlinker.spans import BufferSpan
from kvlinker_nixl.aside import Begun
from kvlinker_nixl.blocks import Loan

__all__ = ["Chunk", "ReadRows", "Window"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Bytes that are wanted at a time, as many of each object, and at the same place."""

    chosen: slice
    """Which of the objects of a read."""
    numbers: IndexArray
    """[objects] the same, as numbers of their part."""
    first: int
    """Where reading begins in each object's frame."""
    row_bytes: int
    """Bytes that are read of each."""
    lead: int
    """Bytes in front of what was wanted."""
    piece: Piece
    ranges: IndexArray | None
    """[spans] which range of an object each span of the piece is; None where one is a part of several."""

    @property
    def begun(self) -> int:
        """Offset in the frames of the first byte that is wanted."""
        return self.first + self.lead

    @property
    def end(self) -> int:
        """Offset in the frames behind the last one."""
        return self.first + self.lead + self.piece.size


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


class Window:
    """Bytes of some objects, as many of each, in a block that was lent for them; they may be on their way yet."""

    def __init__(self, *, first: int, count: int, row_bytes: int, loan: Loan) -> None:
        """Take a block that the bytes will be in.

        Args:
            first: offset in the frames of the first byte.
            count: objects.
            row_bytes: bytes of each.
            loan: of the block; ended with the window.
        """
        self.first = first
        self.end = first + row_bytes
        self.size = count * row_bytes
        self.is_used = False
        """Whether anybody has asked for some of it."""
        self.is_wanted = False
        """Whether somebody waits for it already; otherwise it was read ahead, and fails for nobody."""
        self._shape = count, row_bytes
        self.begun: Begun | None = None
        """What reads the bytes, while it may be under way."""
        self._loan = loan
        self._rows: ReadRows | None = None

    def has(self, chunk: Chunk) -> bool:
        """Whether the bytes of a chunk of the same objects are here."""
        return self.first <= chunk.first and chunk.first + chunk.row_bytes <= self.end

    def rows(self) -> ReadRows:
        """Wait for the bytes, and return them.

        Raises:
            StoreError: they could not be read.
        """
        begun, self.begun = self.begun, None
        if begun is not None:
            begun.finish()
        if self._rows is None:
            self._rows = ReadRows.of(self._loan.block.rows(*self._shape))
        return self._rows

    def drop(self) -> None:
        """Give the block back, now or when nobody reads into it any more. Idempotent."""
        begun, self.begun = self.begun, None
        if begun is None:
            self._loan.end()
        else:
            begun.give_up(self._loan.end)
