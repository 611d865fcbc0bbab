"""A run is reads of the same objects, each of which goes on where the last one ended, as layers are asked for.

While one layer is copied to its place, the windows that the next ones are in are read.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.errors import StoreClosedError, StoreError
from kvlinker.framed_objects import FoundObjects
from kvlinker.plans import PreparedPages
from kvlinker_nixl.windows import Chunk, ReadRows, Window

__all__ = ["Reader", "Run", "Runs"]

_KEPT = 4
"""Threads that read layers of one session, each in its own order."""
_WORTH_BYTES = 512 << 10
"""With less, a thread takes as long as it saves."""
_NEAR_BYTES = 4 << 20
"""So much is read at once where it is all that is left: nothing is to be done beside it."""


class Reader(ABC):
    """What reads windows for runs."""

    window_bytes: int
    """What a window should have where several layers are read at once."""

    @abstractmethod
    def read(self, part: FoundObjects, numbers: IndexArray, first: int, end: int) -> Window:
        """Read some objects between two offsets in their frames.

        Raises:
            StoreError: they cannot be read.
        """

    @abstractmethod
    def begin(self, part: FoundObjects, numbers: IndexArray, first: int, end: int) -> Window | None:
        """Begin to read them in another thread; None where there is none, or no memory."""


class _Lane:
    """What a run reads of some of its objects at one place: one window behind another."""

    def __init__(self, chunk: Chunk, limit: int) -> None:
        """Begin in front of a chunk.

        Args:
            chunk: the first one.
            limit: offset in the frames behind which is nothing of this kind.
        """
        self.chosen = chunk.chosen
        self.limit = limit
        self.end = chunk.begun
        """Behind what was asked for."""
        self.read_end = chunk.begun
        """Behind what was read, or is being read."""
        self.windows: deque[Window] = deque()
        self.pages: tuple[PreparedPages, PreparedPages] | None = None
        """Pages of a plan, and those of the lane's objects among them: the same for every layer."""


class Run:
    """Reads of the same objects that one caller makes, one behind the other."""

    def __init__(
        self, reader: Reader, part: FoundObjects, numbers: IndexArray, chunks: Sequence[Chunk]
    ) -> None:
        """Begin with a read.

        Args:
            reader: reads windows.
            part: of the objects.
            numbers: [objects] which ones of the part.
            chunks: what the first read wants, in order.
        """
        self._reader = reader
        self._part = part
        self._numbers = numbers
        self._lanes = [_Lane(chunk, _limit_of(chunk, chunks, part)) for chunk in chunks]
        self._goes_on = False
        """Whether a read went on where an earlier one ended: others will follow."""
        self._held = 0
        """Bytes of all windows."""
        self._begin(chunks)

    def _begin(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        longest = max(len(chunk.numbers) * chunk.row_bytes for chunk in chunks)
        self._most = 2 * max(self._reader.window_bytes, longest)
        size = sum(len(chunk.numbers) * chunk.piece.size for chunk in chunks)
        self._layers = max(1, self._reader.window_bytes // size) if self._goes_on else 1
        """How many reads like this one are worth a window of each lane."""
        left = sum(
            len(chunk.numbers) * (lane.limit - chunk.begun)
            for lane, chunk in zip(self._lanes, chunks, strict=True)
        )
        self._is_near = self._goes_on and left <= min(_NEAR_BYTES, self._reader.window_bytes)

    def go_on(self, part: FoundObjects, numbers: IndexArray, chunks: Sequence[Chunk]) -> bool:
        """Begin another read if it wants as much of the same objects, behind what was read last."""
        if self._part is not part or len(self._lanes) != len(chunks):
            return False
        is_next = all(
            lane.end == chunk.begun and lane.chosen == chunk.chosen
            for lane, chunk in zip(self._lanes, chunks, strict=True)
        )
        if not is_next or not np.array_equal(self._numbers, numbers):
            return False
        self._goes_on = True
        self._begin(chunks)
        return True

    @property
    def is_over(self) -> bool:
        """Whether there is nothing behind what was read."""
        return all(lane.end >= lane.limit for lane in self._lanes)

    def rows(self, at: int) -> ReadRows:
        """Return the bytes of a chunk, and let those that come behind it be read meanwhile.

        Raises:
            StoreError: they cannot be read; what failed when it was read ahead is tried anew.
        """
        lane, chunk = self._lanes[at], self._chunks[at]
        window = self._find(lane, chunk)
        if window is not None:
            window.is_used = True
            self._read_on(at)
            try:
                return window.rows().behind(chunk.begun - window.first)
            except StoreError as error:
                # Behind a close nothing is read ahead any more; a read that is under way goes on by itself.
                if window.is_wanted and not isinstance(error, StoreClosedError):
                    raise
                self._drop(lane, len(lane.windows))
        window = self._read(lane, chunk)
        self._read_on(at)
        return window.rows().behind(chunk.begun - window.first)

    def used(self, at: int) -> None:
        """Note that the bytes of a chunk are where they belong."""
        lane, chunk = self._lanes[at], self._chunks[at]
        lane.end = chunk.end
        if lane.windows and lane.windows[0].end <= chunk.first + chunk.row_bytes:
            self._drop(lane, 1)

    def pages(self, at: int) -> PreparedPages:
        """Return the pages of a chunk's plan that its objects are, ascending."""
        lane, chunk = self._lanes[at], self._chunks[at]
        pages = chunk.piece.plan.pages
        if len(chunk.numbers) == pages.num_pages:
            return pages
        if lane.pages is None or lane.pages[0] is not pages:
            lane.pages = pages, pages.select(self._part.positions[chunk.numbers])
        return lane.pages[1]

    def drop(self) -> None:
        """Let go of every window. Idempotent."""
        for lane in self._lanes:
            self._drop(lane, len(lane.windows))

    # ---- windows --------------------------------------------------------------------------------

    def _drop(self, lane: _Lane, count: int) -> None:
        """Let go of so many windows of a lane, the first ones."""
        for _ in range(count):
            window = lane.windows.popleft()
            self._held -= window.size
            window.drop()

    def _add(self, lane: _Lane, window: Window, end: int) -> None:
        lane.windows.append(window)
        lane.read_end = end
        self._held += window.size

    def _find(self, lane: _Lane, chunk: Chunk) -> Window | None:
        """Return the window that has a chunk; those in front of it are let go of."""
        while lane.windows and not lane.windows[0].has(chunk):
            self._drop(lane, 1)
        return lane.windows[0] if lane.windows else None

    def _read(self, lane: _Lane, chunk: Chunk) -> Window:
        """Read a chunk, and all that is behind it where that is little; what its windows had is of no use."""
        end = max(chunk.end, lane.limit) if self._is_near else chunk.end
        window = self._reader.read(self._part, chunk.numbers, chunk.begun, end)
        window.is_used = True
        self._add(lane, window, end)
        return window

    def _read_on(self, at: int) -> None:
        """Begin to read what comes behind a chunk, as much as there is room for."""
        for lane, chunk, begun, is_wanted in self._coming(at):
            end = min(lane.limit, begun + self._layers * chunk.piece.size)
            size = len(chunk.numbers) * (end - begun)
            if self._held + size > self._most:
                return
            if size >= _WORTH_BYTES:
                window = self._reader.begin(self._part, chunk.numbers, begun, end)
                if window is None:
                    return
                window.is_wanted = is_wanted
                self._add(lane, window, end)

    def _coming(self, at: int) -> Iterator[tuple[_Lane, Chunk, int, bool]]:
        """Yield what comes behind a chunk and is not being read yet, in order.

        Yields:
            The lane, a chunk that it is like, where it begins, and whether this read wants it: not another one.
        """
        lanes = list(zip(self._lanes, self._chunks, strict=True))
        for lane, chunk in lanes[at + 1 :]:
            if self._find(lane, chunk) is None:
                yield lane, chunk, chunk.begun, True
        for lane, chunk in lanes[: at + 1] if self._goes_on else []:
            begun = max(lane.read_end, chunk.end)
            if begun < lane.limit and all(window.is_used for window in lane.windows):
                yield lane, chunk, begun, False


def _limit_of(chunk: Chunk, chunks: Sequence[Chunk], part: FoundObjects) -> int:
    """Return where what is like a chunk ends: where another one of the same objects begins, or with the payload."""
    first, headers = int(chunk.numbers[0]), part.headers
    end = part.header_bytes + int(headers.offsets[first, -1] + headers.sizes[first, -1])
    behind = [one.begun for one in chunks if one.chosen == chunk.chosen]
    return min([begun for begun in behind if begun > chunk.begun], default=end)


class Runs:
    """The runs of one session, each used by one read at a time."""

    def __init__(self, reader: Reader) -> None:
        """Begin with none."""
        self._reader = reader
        self._lock = threading.Lock()
        self._kept: list[Run] = []

    def take(self, part: FoundObjects, numbers: IndexArray, chunks: Sequence[Chunk]) -> Run:
        """Return the run that a read goes on with, or a new one; nobody else is given it until it is put back."""
        with self._lock:
            for at, run in enumerate(self._kept):
                if run.go_on(part, numbers, chunks):
                    return self._kept.pop(at)
        return Run(self._reader, part, numbers, chunks)

    def put(self, run: Run) -> None:
        """Keep a run that may go on; of too many the oldest is let go of."""
        left = [run]
        if not run.is_over:
            with self._lock:
                kept = [*self._kept, run]
                self._kept, left = kept[-_KEPT:], kept[:-_KEPT]
        for one in left:
            one.drop()

    def close(self) -> None:
        """Let go of all. Idempotent."""
        with self._lock:
            kept, self._kept = self._kept, []
        for run in kept:
            run.drop()
