"""The state of an open store: its tables, the two locks, and the order in which things become visible.

`lock` guards the tables and is held for table changes alone, never while bytes are copied or saved.
`commit_lock` is held while the catalog is written; whoever needs both takes it first.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.errors import StoreClosedError, StoreError, StoreTimeoutError
from kvlinker_file.catalog import Catalog, CatalogChange, SegmentRecord, place_of
from kvlinker_file.directory import StoreDirectory
from kvlinker_file.holds import HoldTable
from kvlinker_file.index import ObjectIndex
from kvlinker_file.options import Durability, FileStoreOptions
from kvlinker_file.segments import Segment, SlotBlock, SlotKind
from kvlinker_file.space import SlabSpace, Taken

__all__ = ["COUNTERS", "StoreState", "now_micros"]

COUNTERS = (
    "written",
    "missed",
    "evicted",
    "discarded",
    "corrupt",
    "full",
    "disk_full",
    "disk_errors",
    "index_errors",
    "index_lost",
    "lost_at_open",
)
"""Events that a store counts from its opening on."""

_log = logging.getLogger(__name__)

_USE_ROWS = 4096
"""Times of use that are saved in one transaction, so that its log stays within its bounds."""
_SAVE_USE_SECONDS = 30.0


class StoreState:
    """Everything that an open store knows."""

    def __init__(
        self,
        *,
        options: FileStoreOptions,
        directory: StoreDirectory,
        catalog: Catalog,
        clock: Callable[[], float],
    ) -> None:
        """Make the state of a store without objects."""
        self.options = options
        self.directory = directory
        self.catalog = catalog
        self.index = ObjectIndex()
        self.space = SlabSpace(capacity=options.capacity, segment_size=options.segment_size)
        self.holds = HoldTable(self.index, clock)
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.lock = threading.Lock()
        self.commit_lock = threading.Lock()
        self._layouts: dict[bytes, int] = {}
        self._idle = threading.Condition(self.lock)
        self._calls = 0
        self._clock = clock
        self._use_saved_at = clock()
        self._closing = False
        self._closed = False
        self._owner = os.getpid()

    # ---- life time ----------------------------------------------------------------------------

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the store open for the length of a call.

        Raises:
            StoreClosedError: it was closed, or opened by another process.
        """
        with self.lock:
            self.check_open()
            self._calls += 1
        try:
            yield
        finally:
            with self.lock:
                self._calls -= 1
                if not self._calls:
                    self._idle.notify_all()

    def check_open(self) -> None:
        """Raise StoreClosedError once the store is closed, or in a forked child."""
        if os.getpid() != self._owner:
            msg = (
                f"file store {self.options.path}: was opened by process {self._owner}, this is process "
                f"{os.getpid()}; a fork does not take a store along, open another directory"
            )
            raise StoreClosedError(msg)
        if self._closing:
            msg = f"file store {self.options.path}: was closed; open it again"
            raise StoreClosedError(msg)

    def close(self) -> None:
        """Wait for running calls, save what must be saved, give up the directory. Idempotent.

        Raises:
            StoreTimeoutError: calls still run; the directory stays locked, and closing again waits again.
        """
        if os.getpid() != self._owner:
            self.catalog.close()
            return
        with self.lock:
            self._closing = True
            if self._closed:
                return
            if not self._idle.wait_for(lambda: not self._calls, self.options.close_seconds):
                msg = (
                    f"file store {self.options.path}: {self._calls} calls still run after "
                    f"{self.options.close_seconds} s; the directory stays locked"
                )
                raise StoreTimeoutError(msg)
            self._closed = True
        self._save_at_close()
        for segment in self.space:
            segment.close()
        self.catalog.close()
        self.directory.close()

    def _save_at_close(self) -> None:
        try:
            self.save_removals()
            while self.save_use():
                pass
            self.remove_empty_segments()
        except StoreError as error:
            # The catalog still names only what is whole; the order of use or some removals are lost.
            _log.warning("%s: closed without saving everything: %s", self.options.path, error)

    def count(self, event: str, number: int = 1) -> None:
        """Count events; the caller does not hold the lock."""
        with self.lock:
            self.counters[event] += number

    # ---- layouts ------------------------------------------------------------------------------

    @property
    def layouts(self) -> dict[int, bytes]:
        """Fingerprints by layout number."""
        return {number: fingerprint for fingerprint, number in self._layouts.items()}

    def note_layouts(self, layouts: Mapping[int, bytes]) -> None:
        """Take over the layouts that the catalog knows."""
        self._layouts = {fingerprint: number for number, fingerprint in layouts.items()}

    def layout_id(self, fingerprint: bytes) -> int:
        """Return the small number of a fingerprint; the caller holds the lock."""
        number = self._layouts.get(fingerprint)
        if number is None:
            number = self._layouts[fingerprint] = 1 + max(self._layouts.values(), default=0)
        return number

    # ---- removing -----------------------------------------------------------------------------

    def places_of(self, rows: IndexArray) -> list[int]:
        """Return the catalog's numbers of rows; the caller holds the lock."""
        segments, slots = self.index.segments_of(rows).tolist(), self.index.slots_of(rows).tolist()
        return [place_of(*pair) for pair in zip(segments, slots, strict=True)]

    def save_removals(self, *, blocking: bool = True) -> None:
        """Let the catalog forget what was removed, and the slots be written again.

        Raises:
            StoreError: the catalog cannot be written; the slots stay taken.
        """
        if not self.commit_lock.acquire(blocking=blocking):
            return
        try:
            self.commit()
        finally:
            self.commit_lock.release()

    def commit(
        self,
        *,
        added: Sequence[tuple[int, int, int, bytes]] = (),
        layouts: Sequence[tuple[int, bytes]] = (),
        segments: Sequence[SegmentRecord] = (),
        removed_segments: Sequence[int] = (),
    ) -> None:
        """Save a change together with all removals; the caller holds the commit lock, and only that.

        Raises:
            StoreError: the catalog cannot be written; nothing of it was saved.
        """
        with self.lock:
            leaving = self.index.leaving()
            removed = self.places_of(leaving)
        if removed or added or segments or removed_segments:
            change = CatalogChange(
                removed=removed,
                added=added,
                layouts=layouts,
                segments=segments,
                removed_segments=removed_segments,
                # From the first object on that is not synced, a restart of the machine leaves doubts.
                facts=() if self.is_durable or not added else (("synced", 0),),
            )
            self.catalog.apply(change)
        with self.lock:
            self.index.forget(leaving)
            self.settle()

    def settle(self) -> None:
        """Give free slots back to their segments; the caller holds the lock."""
        segments, slots = self.index.settle()
        for number in np.unique(segments).tolist():
            self.space[number].give(slots[segments == number])

    def give_back(self, taken: Sequence[Taken]) -> None:
        """Give back slots that never held a visible object."""
        with self.lock:
            for part in taken:
                part.segment.give(part.slots)

    def remove_empty_segments(self, *, keep: int = 0) -> None:
        """Delete the files of segments without objects, but for some of each kind that the next writes take.

        Raises:
            StoreError: the catalog cannot be written; the segments stay.
        """
        with self.commit_lock:
            with self.lock:
                empty = self.space.retire_empty(keep=keep)
            self.delete_segments(empty)

    def delete_segments(self, segments: Sequence[Segment]) -> None:
        """Delete retired segments that nobody uses; the caller holds the commit lock, and only that.

        Raises:
            StoreError: the catalog cannot be written; the segments are as they were before they were retired.
        """
        try:
            self.commit(removed_segments=[segment.number for segment in segments])
        except StoreError:
            with self.lock:
                for segment in segments:
                    self.space.add(segment)
            raise
        for segment in segments:
            segment.close()
            self.directory.remove_segment(segment.number)
        with self.lock:
            for segment in segments:
                self.space.remove(segment)

    def remap(self, old: Segment, record: SegmentRecord) -> None:
        """Cut a retired segment that nobody uses into slots of another kind; the caller holds the commit lock.

        Raises:
            OSError: its file cannot be opened; the segment is gone until the store is opened again.
        """
        old.close()
        descriptor = self.directory.open_segment(record.number, record.file_bytes)
        if descriptor is None:
            msg = f"segment {record.number} is not the file that was made"
            raise StoreError(msg)
        segment = Segment(
            number=record.number,
            descriptor=descriptor,
            file_bytes=record.file_bytes,
            kind=record.kind,
            slots=record.slots,
        )
        with self.lock:
            self.space.add(segment)

    # ---- use ----------------------------------------------------------------------------------

    def save_use(self) -> bool:
        """Save some times of use; True while there are more.

        Raises:
            StoreError: the catalog cannot be written.
        """
        with self.commit_lock:
            with self.lock:
                rows = self.index.unsaved_use(_USE_ROWS)
                ticks = self.index.ticks_of(rows)
                places = self.places_of(rows)
            if not places:
                return False
            self.catalog.apply(CatalogChange(used=list(zip(ticks.tolist(), places, strict=True))))
            with self.lock:
                self.index.note_saved(rows, ticks)
        return len(places) == _USE_ROWS

    def save_use_sometimes(self) -> None:
        """Save some times of use if that was not done for a while, so that a killed process loses no more."""
        if self._clock() - self._use_saved_at < _SAVE_USE_SECONDS:
            return
        self._use_saved_at = self._clock()
        try:
            self.save_use()
        except StoreError as error:
            _log.warning("%s: the order of use was not saved: %s", self.options.path, error)

    # ---- what sessions do ---------------------------------------------------------------------

    def blocks_of(self, rows: IndexArray) -> list[tuple[IndexArray, SlotBlock]]:
        """Return the slots of pinned rows by kind, each with the positions among the rows."""
        with self.lock:
            numbers, slots = self.index.segments_of(rows), self.index.slots_of(rows)
            segments = [self.space[number] for number in np.unique(numbers).tolist()]
        addresses = np.zeros(len(rows), dtype=np.int64)
        kinds: dict[SlotKind, list[int]] = {}
        for segment in segments:
            chosen = np.flatnonzero(numbers == segment.number)
            addresses[chosen] = segment.addresses(slots[chosen])
            kinds.setdefault(segment.kind, []).extend(chosen.tolist())
        found = []
        for kind, positions in kinds.items():
            order = np.sort(np.array(positions, dtype=np.int64))
            found.append((order, SlotBlock(kind=kind, addresses=addresses[order])))
        return found

    def unpin(self, rows: IndexArray) -> None:
        """Let go of rows that a session or a call kept."""
        with self.lock:
            self.index.unpin(rows)
            self.settle()

    def drop_corrupt(self, rows: IndexArray) -> None:
        """Remove objects whose bytes are not right, if they are still there."""
        with self.lock:
            self.counters["corrupt"] += len(rows)
            self.index.remove(self.index.living(rows))
        _log.warning("%s: dropped %d corrupt objects", self.options.path, len(rows))
        try:
            self.save_removals(blocking=False)
        except StoreError as error:
            _log.warning("%s: %s", self.options.path, error)

    # ---- figures ------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Return the bytes on disk: all segment files, and the index."""
        index_bytes = self.directory.index_bytes()
        with self.lock:
            return self.space.file_bytes + index_bytes

    @property
    def is_durable(self) -> bool:
        """Whether objects must be on the disk before they are visible."""
        return self.options.durability is Durability.DISK


def now_micros() -> int:
    """Return the microseconds that times of use are measured in."""
    return time.time_ns() // 1000
