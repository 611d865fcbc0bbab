"""A framed write finds what is there, frames the rest, asks for permission, and publishes batch by batch.

What it means to send a frame before anybody may see it is the store's own: as a draft under another name, or not at
all, and then frames are kept in host memory until they may be sent.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess
from kvlinker.errors import StoreClosedError, StoreError
from kvlinker.framed_looks import FramedState, look_at
from kvlinker.framed_objects import Look, WantedObjects, frame_pages
from kvlinker.frames import FrameLayout
from kvlinker.named_values import NamedValues, parts_of
from kvlinker.store import ObjectKey, WriteBatch, WriteStatus

__all__ = ["FramedBatch", "FramedWrite", "KeptFramesWrite"]

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class FramedBatch:
    """What a write knows of one of its batches."""

    batch: WriteBatch
    layout: FrameLayout
    statuses: list[WriteStatus]
    """[objects] FAILED until something else is known."""
    fresh: IndexArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Positions of the objects to write."""
    replaces: set[int] = field(default_factory=set)
    """Positions of those in whose place something else lies."""
    twins: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Position to the batch and position where the call names the same key first."""

    @classmethod
    def of(cls, batch: WriteBatch) -> FramedBatch:
        """Return what is known of a batch before anything was asked."""
        return cls(
            batch=batch,
            layout=FrameLayout.of_ranges(batch.plan.spans.offset, batch.plan.range_bytes),
            statuses=[WriteStatus.FAILED] * len(batch.keys),
        )

    @property
    def value_bytes(self) -> int:
        """Bytes of a header and a payload."""
        return self.layout.header_bytes + self.layout.payload_bytes

    def wanted(self, positions: Sequence[int]) -> WantedObjects:
        """Return some of the objects, as one looks for them."""
        return WantedObjects(
            keys=tuple(self.batch.keys[at] for at in positions),
            object_bytes=self.layout.payload_bytes,
            fingerprint=self.batch.fingerprint,
        )


class FramedWrite(ABC):
    """One call of `Store.write`; a subclass stages frames before permission, and publishes them after it."""

    def __init__(
        self,
        values: NamedValues,
        state: FramedState,
        batches: Sequence[WriteBatch],
        *,
        label: str,
        max_object_bytes: int,
    ) -> None:
        """Take the batches of a call.

        Args:
            values: where objects are looked for, in the direction of offloads.
            state: of the store.
            batches: what to write.
            label: names the store in messages.
            max_object_bytes: payloads that are longer fail, and are not copied.
        """
        self.values = values
        self.state = state
        self.label = label
        self.works = [FramedBatch.of(batch) for batch in batches if batch.keys]
        self._empty = [not batch.keys for batch in batches]
        self._max_object_bytes = max_object_bytes

    # ---- what a store does ----------------------------------------------------------------------

    @abstractmethod
    def stage(self, work: FramedBatch, memory: DeviceAccess) -> None:
        """Copy fresh objects out of pool memory, and send them where nobody looks for them, or keep them.

        A subclass sets the status of what cannot be staged.
        """

    @abstractmethod
    def publish(self, work: FramedBatch) -> None:
        """Make the staged objects of a batch visible, and set their statuses.

        Raises:
            StoreError: the server cannot be asked; objects whose statuses were not set are FAILED.
        """

    def look(self, work: FramedBatch) -> Look:
        """Find out which objects are there; who is told so when it sends them need not ask before."""
        wanted = work.wanted(range(len(work.statuses)))
        return look_at(self.values, self.state, wanted, size=work.layout.header_bytes)

    def end(self) -> None:  # noqa: B027  # who holds nothing has nothing to release
        """Release what the call holds, and remove what was staged and became no object, where that can be done now.

        Called once, however the call ends. Raises nothing.
        """

    # ---- what is the same for all ---------------------------------------------------------------

    def run(
        self, memory: DeviceAccess, may_publish: Callable[[], bool]
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """Write; see Store.write."""
        try:
            self._look_up()
            for work in self.works:
                self.stage(work, memory)
            if may_publish():
                self._publish()
            else:
                self._discard()
        finally:
            self.end()
        self._answer_twins()
        works = iter(self.works)
        return tuple(() if empty else tuple(next(works).statuses) for empty in self._empty)

    def _look_up(self) -> None:
        first: dict[ObjectKey, tuple[int, int]] = {}
        for number, work in enumerate(self.works):
            everything = work.wanted(range(len(work.statuses)))
            is_too_long = work.layout.payload_bytes > self._max_object_bytes
            if is_too_long or work.layout.header_bytes > everything.max_header_bytes:
                continue  # it stays FAILED
            look = self.look(work)
            self.state.note(everything, work.layout.header_bytes)
            stored = set(look.found)
            work.replaces = {*look.others, *look.damaged}
            fresh = []
            for at, key in enumerate(work.batch.keys):
                if at in stored:
                    work.statuses[at] = WriteStatus.EXISTS
                elif key in first:
                    work.twins[at] = first[key]
                else:
                    first[key] = (number, at)
                    fresh.append(at)
            work.fresh = np.array(fresh, dtype=np.int64)

    def _publish(self) -> None:
        try:
            for work in self.works:
                self.publish(work)
        except StoreClosedError:
            raise
        except StoreError as error:
            # What was published is there and said to be; the rest stays FAILED.
            self.note_failure(error)

    def _discard(self) -> None:
        for work in self.works:
            for at in work.fresh.tolist():
                work.statuses[at] = WriteStatus.DISCARDED
            self.state.count("discarded", len(work.fresh))

    def _answer_twins(self) -> None:
        for work in self.works:
            for at, (number, twin) in work.twins.items():
                status = self.works[number].statuses[twin]
                is_written = status is WriteStatus.WRITTEN
                work.statuses[at] = WriteStatus.EXISTS if is_written else status

    # ---- for subclasses -------------------------------------------------------------------------

    def note_failure(self, error: object) -> None:
        """Say why objects were not stored, and count it."""
        _log.warning("%s: not everything was stored: %s", self.label, error)
        self.state.count("errors")

    def found(self, work: FramedBatch, positions: Sequence[int]) -> set[int]:
        """Return which of these objects are there and what they should be, as when another writer was faster."""
        if not positions:
            return set()
        look = look_at(self.values, self.state, work.wanted(positions))
        return {positions[number] for number in look.found}

    def frame(
        self,
        work: FramedBatch,
        positions: IndexArray,
        rows: NDArray[np.uint8],
        memory: DeviceAccess,
    ) -> None:
        """Fill rows, [positions, value_bytes], with headers and payloads of some objects."""
        checksum = self.state.checksum
        frame_pages(work.batch, work.layout, positions, rows, memory, checksum=checksum)

    def frames_of(
        self, work: FramedBatch, memory: DeviceAccess, *, most_bytes: int, most: int
    ) -> Iterator[tuple[IndexArray, NDArray[np.uint8]]]:
        """Yield positions of fresh objects with their frames, some at a time, in a block that is used again.

        Args:
            work: whose objects.
            memory: copies them.
            most_bytes: of frames at a time; an object that is longer goes alone.
            most: objects at a time.
        """
        size = work.value_bytes
        each = max(1, min(most, most_bytes // size))
        if not len(work.fresh):
            return
        with self.state.blocks.lent(min(each, len(work.fresh)) * size) as block:
            for part in parts_of(len(work.fresh), each):
                positions = work.fresh[part]
                rows = block[: len(positions) * size].reshape(len(positions), size)
                self.frame(work, positions, rows, memory)
                yield positions, rows


class KeptFramesWrite(FramedWrite):
    """A write whose frames are kept in host memory until they may be sent: for stores that know no drafts."""

    def __init__(
        self,
        values: NamedValues,
        state: FramedState,
        batches: Sequence[WriteBatch],
        *,
        label: str,
        max_object_bytes: int,
        kept_bytes: int,
        block_bytes: int,
    ) -> None:
        """Take the batches of a call.

        Args:
            values: see FramedWrite.
            state: see FramedWrite.
            batches: see FramedWrite.
            label: see FramedWrite.
            max_object_bytes: see FramedWrite.
            kept_bytes: of all frames together; objects that find no room are FULL, and counted as `no_room`.
            block_bytes: of one block of frames; an object that is longer has a block of its own.
        """
        super().__init__(values, state, batches, label=label, max_object_bytes=max_object_bytes)
        self._room = kept_bytes
        self._block_bytes = block_bytes
        self._blocks: list[NDArray[np.uint8]] = []
        self._rows: dict[tuple[FramedBatch, int], NDArray[np.uint8]] = {}
        self.may_be_read = False
        """Whether somebody may still read frames, as a request that was given up: blocks are not used again then."""

    def row(self, work: FramedBatch, position: int) -> NDArray[np.uint8]:
        """Return the frame of an object that was kept."""
        return self._rows[work, position]

    def stage(self, work: FramedBatch, memory: DeviceAccess) -> None:
        """See FramedWrite."""
        size = work.value_bytes
        count = min(len(work.fresh), self._room // size)
        for at in work.fresh[count:].tolist():
            work.statuses[at] = WriteStatus.FULL
        self.state.count("no_room", len(work.fresh) - count)
        work.fresh = work.fresh[:count]
        self._room -= count * size
        for part in parts_of(count, max(1, self._block_bytes // size)):
            positions = work.fresh[part]
            block = self.state.blocks.take(len(positions) * size)
            self._blocks.append(block)
            rows = block[: len(positions) * size].reshape(len(positions), size)
            self.frame(work, positions, rows, memory)
            self._rows |= {
                (work, at): row for at, row in zip(positions.tolist(), rows, strict=True)
            }

    def end(self) -> None:
        """See FramedWrite."""
        self._rows.clear()
        for block in self._blocks:
            if not self.may_be_read:
                self.state.blocks.give_back(block)
        self._blocks.clear()
