"""The memory of a peer server: one allocation, cut like a file, which is gone with the process."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from kvlinker_nixl.depots import UsedBytes
from kvlinker_nixl.space import Entry, Segment, SpaceLayout

__all__ = ["PeerMemory", "memory_layout"]

_SEGMENTS = 16
_ALIGNMENT = 64


def memory_layout(capacity: int) -> SpaceLayout:
    """Return how so many bytes of memory are cut."""
    return SpaceLayout(
        first_offset=0,
        segment_bytes=capacity // _SEGMENTS // mmap.PAGESIZE * mmap.PAGESIZE,
        segments=_SEGMENTS,
        alignment=_ALIGNMENT,
    )


class PeerMemory(UsedBytes):
    """Memory, and the journal of a space in it, which writes nothing down."""

    def __init__(self, layout: SpaceLayout) -> None:
        """Take as much memory as a layout needs; pages are real when they are first written."""
        self._layout = layout
        size = layout.segment_bytes * layout.segments
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)
        self._ends = [0] * layout.segments

    @property
    def used_bytes(self) -> int:
        """See UsedBytes: what was ever used, since memory is not given back."""
        return sum(self._ends)

    def close(self) -> None:
        """See UsedBytes; the memory goes with its last user."""

    def cut(self, segment: Segment) -> None:
        """See Journal."""

    def back(self, segment: Segment, end: int) -> None:
        """See Journal."""
        used = end - self._layout.start_of(segment.number)
        self._ends[segment.number] = max(self._ends[segment.number], used)

    def note(self, entry: Entry) -> None:
        """See Journal."""

    def forget(self, entry: Entry) -> None:
        """See Journal."""
