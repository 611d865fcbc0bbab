"""The state of an open store: its tables, its catalog, and the order in which things become visible.

Nothing is visible that the catalog does not name, and no slot is written again that it names.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess
from kvlinker.errors import StoreError
from kvlinker_file.ages import Ages
from kvlinker_file.catalog import Catalog, CatalogChange, SegmentRecord, place_of
from kvlinker_file.directory import StoreDirectory
from kvlinker_file.holds import HoldTable
from kvlinker_file.index import ObjectIndex
from kvlinker_file.lifetime import Lifetime
from kvlinker_file.marks import Marks
from kvlinker_file.notices import Notices
from kvlinker_file.options import Durability, FileStoreOptions
from kvlinker_file.pinning import SegmentPins
from kvlinker_file.recovery import clear_seats, make_again
from kvlinker_file.sections import Sections, UnsettledError
from kvlinker_file.segments import Segment
from kvlinker_file.space import SlabSpace, Taken
from kvlinker_file.table_layout import Word
from kvlinker_file.tables import SharedTables

__all__ = ["COUNTERS", "StoreState"]

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
    """Everything that one opener of a directory knows."""

    def __init__(
        self,
        *,
        options: FileStoreOptions,
        directory: StoreDirectory,
        catalog: Catalog,
        tables: SharedTables,
        clock: Callable[[], float],
    ) -> None:
        """Make the state of an opener that has taken a seat."""
        self.options = options
        self.is_temporary = False
        """Whether the last one to leave removes every object."""
        self.directory = directory
        self.catalog = catalog
        self.tables = tables
        self.openers = directory.openers
        self.space = SlabSpace(tables, directory, segment_size=options.segment_size)
        self.marks = Marks(tables, self.space, seat=self.openers.seat)
        self.index = ObjectIndex(tables, self.space, self.marks)
        self.ages = Ages(tables, self.space, self.index, self.marks, clock)
        self.holds = HoldTable(self.marks, self.ages, clock)
        self.sections = Sections(
            tables,
            directory,
            refresh=self._refresh,
            recover=self._recover,
            sweep=self._sweep,
        )
        self.committing = self.sections.committing
        self._debts: deque[tuple[IndexArray, Sequence[Taken]]] = deque()
        """Pinned rows and slots to let go of, for whoever of this opener's threads has the lock next."""
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._counting = threading.Lock()
        self.pins = SegmentPins(lambda: self.space, self.count)
        self.notices = Notices(options.path, clock)
        self.lifetime = Lifetime(options.path, close_seconds=options.close_seconds)
        self.using, self.letting_go = self.lifetime.using, self.lifetime.letting_go
        self._clock = clock
        self._use_saved_at = clock()

    def _refresh(self) -> None:
        self.marks.fit()
        self.space.refresh()

    def _recover(self) -> None:
        """Make the tables again; called within both locks."""
        _log.warning("%s: an opener died while it changed the index", self.options.path)
        living = self.openers.living_mask()
        change = make_again(self.catalog, self.tables, self.space, self.index, living=living)
        self.marks.fit()
        # A failure ends the recovery, and the next one tries again: the rows that the catalog names in vain
        # are free in the tables, and must not be written while it does.
        if change.removed or change.removed_segments:
            self.save(change)
        self.note_stamp()

    def _sweep(self) -> None:
        """Delete the files that no segment has."""
        known = {segment.number for segment in self.space}
        for number in self.directory.segment_numbers() - known:
            self.directory.remove_segment(number)

    # ---- openers ------------------------------------------------------------------------------

    def take_part(self) -> None:
        """Clear what dead openers left, the last one on this seat among them, and be one from now on."""
        with self.committing(), self.changing():
            words, own = self.tables.words, self.openers.own_mask
            taken = int(words[Word.SEATS])
            dead = self.openers.dead_mask(taken) | (taken & own)
            if dead:
                clear_seats(self.tables, self.space, self.index, dead)
            words[Word.SEATS] |= np.uint64(own)

    def clear_dead_seats(self) -> bool:
        """Take back what dead openers held; return whether there was one. The caller is committing."""
        dead = self.openers.dead_mask(int(self.tables.words[Word.SEATS]))
        if dead:
            with self.changing():
                clear_seats(self.tables, self.space, self.index, dead)
        return bool(dead)

    # ---- life time ----------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for running calls, save what must be saved, leave the directory. Idempotent.

        Raises:
            StoreTimeoutError: calls still run; the store stays open, and closing again waits again.
        """
        if not self.lifetime.is_own:
            self.catalog.close()
        elif self.lifetime.end():
            try:
                with self.committing():
                    self._leave()
            except OSError as error:
                _log.warning("%s: closed without saving everything: %s", self.options.path, error)
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Let go of everything at once; the next opener clears what is left."""
        self.release()
        self.directory.close()

    def release(self) -> None:
        """Unmap and close all but the directory."""
        self.space.close()
        self.catalog.close()
        self.tables.close()

    def _leave(self) -> None:
        """Save everything, give up the seat, and as the last one leave tables that need no recovery."""
        is_last = not self.openers.others()
        if is_last and self.is_temporary:
            with self.changing():
                # First what this one still reads or holds, so that every file becomes empty.
                clear_seats(self.tables, self.space, self.index, self.openers.own_mask)
                self.index.remove(self.index.all_rows())
        self._save_at_close(keep=0 if is_last else 1)
        with self.changing():
            has_rest = bool(
                len(self.index.leaving())
            )  # could not be saved: for whoever clears the seat
            clear_seats(
                self.tables, self.space, self.index, 0 if has_rest else self.openers.own_mask
            )
            if is_last and self.tables.shrink(self.space.end_row):
                self.index.fill_buckets()
        self.catalog.close()
        if is_last:
            self.note_stamp()
            self.tables.words[Word.CHECKSUM] = 0 if has_rest else self.tables.checksum()

    def _save_at_close(self, *, keep: int) -> None:
        try:
            self.commit()
            while self._save_use():
                pass
            self.remove_empty_segments(keep=keep)
        except StoreError as error:
            # The catalog still names only what is whole; the order of use or some removals are lost.
            _log.warning("%s: closed without saving everything: %s", self.options.path, error)

    def count(self, event: str, number: int = 1) -> None:
        """Count events."""
        with self._counting:
            self.counters[event] += number

    # ---- saving -------------------------------------------------------------------------------

    def save(self, change: CatalogChange) -> None:
        """Save a change of the catalog; the caller is committing.

        Raises:
            StoreError: the catalog cannot be written; nothing of it was saved.
        """
        words = self.tables.words
        number = (int(words[Word.COMMITS]) + 1) & (1 << 62) - 1  # whatever was written over it
        self.catalog.apply(replace(change, facts=(*change.facts, ("commits", number))))
        words[Word.COMMITS] = number
        self.note_stamp()

    def note_stamp(self) -> None:
        """Note what the catalog's files look like, so that a change by anybody else is noticed at the next opening."""
        self.tables.words[Word.STAMP] = self.directory.index_stamp()

    def places_of(self, rows: IndexArray) -> list[int]:
        """Return the catalog's numbers of rows, in order; the caller is changing the tables."""
        places = np.zeros(len(rows), dtype=np.int64)
        for segment, positions in self.space.segments_of(rows):
            places[positions] = place_of(segment.number, 0) + rows[positions] - segment.first_row
        found: list[int] = places.tolist()
        return found

    def save_removals(self, *, keep: int | None = None) -> None:
        """Let the catalog forget what was removed, and the slots be written again.

        Args:
            keep: where given, delete the files without objects too, but for so many of each kind.

        Raises:
            StoreError: the catalog cannot be written; the slots and files stay.
        """
        with self.committing():
            self.commit()
            if keep is not None:
                self.remove_empty_segments(keep=keep)

    def save_removals_if_idle(self) -> None:
        """Let the catalog forget what was removed, unless somebody writes it now and the next one will.

        Raises:
            StoreError: the catalog cannot be written; the slots stay taken.
        """
        with self.sections.trying_to_commit() as is_mine:
            if is_mine:
                self.commit()

    def commit(
        self,
        *,
        added: Sequence[tuple[int, int, int, bytes]] = (),
        layouts: Sequence[tuple[int, bytes]] = (),
        segments: Sequence[SegmentRecord] = (),
        removed_segments: Sequence[int] = (),
    ) -> None:
        """Save a change together with all removals; the caller is committing, and changes no tables.

        Raises:
            UnsettledError: it was saved, and the tables do not know it.
            StoreError: the catalog cannot be written; nothing of it was saved.
        """
        with self.changing():
            leaving = self.index.leaving()
            removed = self.places_of(leaving)
        if removed or added or segments or removed_segments:
            self.save(
                CatalogChange(
                    removed=removed,
                    added=added,
                    layouts=layouts,
                    segments=segments,
                    removed_segments=removed_segments,
                    # From the first object on that is not synced, a restart of the machine leaves doubts.
                    facts=() if self.is_durable or not added else (("synced", 0),),
                )
            )
        with self.sections.settling():
            self.index.forget(leaving)
            self.index.settle()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep everybody else from changing and from looking at the tables; see Sections."""
        with self.sections.changing():
            while self._debts:
                rows, taken = self._debts.popleft()
                self.index.free_unread(self.marks.unpin(rows))
                self.index.give(taken)
            yield
        self.space.close_gone()

    def let_go(self, rows: IndexArray, taken: Sequence[Taken] = ()) -> None:
        """Let go of rows that a session or a call kept, and of slots that it took, if the store is still open.

        Where the lock cannot be had, because a process was stopped that has it, this opener's next call does it.
        Nothing may be given twice: it may be another call's by then.
        """
        with self.letting_go() as is_open:
            if not is_open or not (len(rows) or taken):
                return
            self._debts.append((rows, taken))
            try:
                with self.changing():
                    pass
            except OSError as error:
                self.notices.warn("the next call lets go", error)

    def give_back(self, taken: Sequence[Taken]) -> None:
        """Give back slots that never held a visible object; see `let_go`."""
        self.let_go(np.empty(0, dtype=np.int64), taken)

    def truncate_log(self) -> None:
        """Write the catalog's log back, so that it takes no room.

        Raises:
            StoreError: it cannot be written.
        """
        with self.committing():
            self.catalog.truncate_log()
            self.note_stamp()

    # ---- segments -----------------------------------------------------------------------------

    def remove_empty_segments(self, *, keep: int = 0) -> None:
        """Delete the files of segments without objects, but for some of each kind; the caller is committing.

        Raises:
            StoreError: the catalog cannot be written; the segments stay.
        """
        with self.changing():
            empty = self.space.retire_empty(keep=keep)
        self.delete_segments(empty)

    def delete_segments(self, segments: Sequence[Segment]) -> None:
        """Delete retired segments that nobody uses; the caller is committing, and changes no tables.

        Raises:
            StoreError: the catalog cannot be written; the segments are as they were before they were retired.
        """
        try:
            self.commit(removed_segments=[segment.number for segment in segments])
        except UnsettledError:
            raise
        except StoreError:
            with self.changing():
                for segment in segments:
                    self.space.retire(segment, is_retired=False)
            raise
        for segment in segments:
            self.directory.remove_segment(segment.number)
        with self.sections.settling():
            for segment in segments:
                self.space.remove(segment)

    # ---- use ----------------------------------------------------------------------------------

    def _save_use(self) -> bool:
        """Save some times of use; True while there are more. The caller is committing.

        Raises:
            StoreError: the catalog cannot be written.
        """
        with self.changing():
            rows = self.ages.unsaved_use(_USE_ROWS)
            ticks = self.ages.of(rows)
            places = self.places_of(rows)
        if not places:
            return False
        self.save(CatalogChange(used=list(zip(ticks.tolist(), places, strict=True))))
        with self.changing():
            self.ages.note_saved(rows, ticks)
        return len(places) == _USE_ROWS

    def save_use_sometimes(self) -> None:
        """Save some times of use if that was not done for a while, so that a killed process loses no more."""
        if self._clock() - self._use_saved_at < _SAVE_USE_SECONDS:
            return
        self._use_saved_at = self._clock()
        try:
            with self.committing():
                self._save_use()
        except StoreError as error:
            self.notices.warn("the order of use was not saved", error)

    # ---- what sessions do ---------------------------------------------------------------------

    def drop_corrupt(self, rows: IndexArray) -> None:
        """Remove objects whose bytes are not right, if they are still there."""
        self.count("corrupt", len(rows))
        with self.changing():
            self.index.remove(self.index.living(rows))
        _log.warning("%s: dropped %d corrupt objects", self.options.path, len(rows))
        try:
            self.save_removals_if_idle()
        except StoreError as error:
            _log.warning("%s: %s", self.options.path, error)

    def pin_segments(self, rows: IndexArray, memory: DeviceAccess) -> None:
        """Let a device copy pinned rows itself, if that spares a copy and their segments may be pinned.

        Raises:
            OSError: the file of one is gone.
        """
        if self.pins.are_wanted(memory):
            with self.changing():
                segments = [segment for segment, _ in self.space.segments_of(rows)]
            self.pins.pin(segments, memory)

    # ---- figures ------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Return the bytes on disk: all segment files, and the index."""
        with self.changing():
            file_bytes = self.space.file_bytes
        return file_bytes + self.directory.index_bytes()

    @property
    def is_durable(self) -> bool:
        """Whether objects must be on the disk before they are visible."""
        return self.options.durability is Durability.DISK
