"""Room is found by taking free slots, by growing, by evicting, and by moving a cold segment to another kind."""

from __future__ import annotations

import logging
import os

from kvlinker_file.catalog import SegmentRecord
from kvlinker_file.os_errors import NO_NEW_FILES, NO_SPACE
from kvlinker_file.sections import UnsettledError
from kvlinker_file.segments import Segment, SlotKind
from kvlinker_file.space import Taken
from kvlinker_file.state import StoreState

__all__ = ["find_room"]

_log = logging.getLogger(__name__)


def find_room(state: StoreState, kind: SlotKind, count: int) -> list[Taken] | None:
    """Take so many slots of a kind, evicting what was used least recently; None and nothing taken if it cannot be.

    Held objects and those that are read stay. No lock is held by the caller.
    """
    search = _Search(state, kind, count)
    try:
        found = search.run()
    except OSError as error:
        _log.warning("%s: no room for an object: %s", state.options.path, error)
        state.count("index_errors")
        found = False
    if found:
        return search.taken
    state.give_back(search.taken)
    return None


class _Search:
    """One caller's search for slots of one kind."""

    def __init__(self, state: StoreState, kind: SlotKind, count: int) -> None:
        self._state = state
        self._kind = kind
        self._missing = count
        self._may_grow = True
        self._may_make_files = True
        self.taken: list[Taken] = []

    def run(self) -> bool:
        """Search until all slots are there; False when nothing more can be done."""
        if not self._begin():
            with self._state.committing():
                was_dead = self._state.clear_dead_seats()
            if not (was_dead and self._begin()):
                return False
        while self._missing:
            if not (self._grow() or self._make_free()):
                return False
            with self._state.changing():
                self._take()
        return True

    def _begin(self) -> bool:
        """Take what is free; False where everything that may go would not be enough for the rest."""
        with self._state.changing():
            self._state.holds.expire()
            self._take()
            return not self._missing or self._is_possible()

    def _take(self) -> None:
        for taken in self._state.index.take(self._kind, self._missing):
            self.taken.append(taken)
            self._missing -= len(taken.slots)

    def _is_possible(self) -> bool:
        """Whether everything that may go would be enough; evicting for nothing helps nobody."""
        space = self._state.space
        slots = self._state.ages.has_evictable(self._kind, self._missing)
        _, free = self._state.directory.disk_bytes()
        slots += self._kind.slots_in(max(0, min(space.available, free)))
        if slots >= self._missing:
            return True
        others = space.of_other_kinds(self._kind)
        idle = sum(segment.file_bytes for segment in others if self._is_idle(segment))
        return slots + self._kind.slots_in(idle) >= self._missing

    def _is_idle(self, segment: Segment) -> bool:
        """Whether a segment has objects alone, and nobody holds or reads one."""
        space, ages = self._state.space, self._state.ages
        objects = space.counted(segment, "objects")
        if space.counted(segment, "used") != objects:
            return False
        return not space.counted(segment, "busy") or ages.evictable_in(segment) == objects

    # ---- growing ------------------------------------------------------------------------------

    def _grow(self) -> bool:
        state = self._state
        if not self._may_grow:
            return False
        with state.committing():
            state.clear_dead_seats()
            index_bytes = state.directory.index_bytes()
            try:
                with state.changing():
                    state.space.note_index_bytes(index_bytes)
                    _, free = state.directory.disk_bytes()
                    record = state.space.plan_growth(self._kind, disk_bytes=free)
                    if record is None:
                        if state.space.may_have_more_segments and free < state.space.available:
                            self._note_full_disk()
                        return False
                    if state.tables.reserve(record.end_row):
                        state.index.fill_buckets()
                    state.marks.fit()
                _make_segment(state, record)
            except OSError as error:
                self._note_failed_growth(error)
                return False
            with state.sections.settling():
                state.space.add(record)
        return True

    def _note_failed_growth(self, error: OSError) -> None:
        """Go on within the files that there are, where that is all that failed; raise the error otherwise."""
        if error.errno in NO_SPACE:
            self._note_full_disk()
        elif error.errno in NO_NEW_FILES:
            _log.warning("%s: no new file, evicting instead: %s", self._state.options.path, error)
            self._state.count("disk_errors")
            self._may_make_files = False
        else:
            raise error
        self._may_grow = False

    def _note_full_disk(self) -> None:
        self._state.count("disk_full")
        self._may_grow = False

    # ---- evicting -----------------------------------------------------------------------------

    def _make_free(self) -> bool:
        """Evict some of the own kind, or all of a segment of another kind that is colder on average."""
        state, index, space = self._state, self._state.index, self._state.space
        with state.committing():
            with state.changing():
                own = state.ages.oldest_tick(self._kind)
                segment = self._coldest_segment()
                if segment is not None and (own is None or space.mean_tick(segment) < own):
                    rows = index.rows_in(segment)
                    index.remove(rows)
                    space.retire(segment)
                else:
                    segment = None
                    rows = state.ages.evict(self._kind, self._missing)
            try:
                if segment is not None:
                    is_gone = not _move_segment(state, segment, self._kind)
                    # Even a full disk has room again.
                    self._may_grow |= is_gone and self._may_make_files
                elif len(rows):
                    state.commit()
            except UnsettledError:
                raise
            except OSError:
                with state.changing():
                    index.restore(rows)
                raise
        state.count("evicted", len(rows))
        return segment is not None or len(rows) > 0

    def _coldest_segment(self) -> Segment | None:
        space = self._state.space
        for segment in sorted(space.of_other_kinds(self._kind), key=space.mean_tick):
            is_of_use = self._may_make_files or space.recut(segment, self._kind) is not None
            if is_of_use and self._is_idle(segment):
                return segment
        return None


def _make_segment(state: StoreState, record: SegmentRecord) -> None:
    os.close(state.directory.create_segment(record.number, record.file_bytes))
    try:
        if state.is_durable:
            state.directory.sync()
        state.commit(segments=[record])
    except UnsettledError:
        raise
    except BaseException:
        state.directory.remove_segment(record.number)
        raise


def _move_segment(state: StoreState, segment: Segment, kind: SlotKind) -> bool:
    """Cut an empty, retired segment anew and return True, or delete it where another file would fit better."""
    try:
        with state.changing():
            record = state.space.recut(segment, kind)
            if record is not None and state.tables.reserve(record.end_row):
                state.index.fill_buckets()
            state.marks.fit()
        if record is None:
            state.delete_segments([segment])
            return False
        state.directory.check_segment(segment.number, segment.file_bytes)
        state.commit(segments=[record])
    except UnsettledError:
        raise
    except OSError:  # the tables may have no room for more rows either
        with state.changing():
            state.space.retire(segment, is_retired=False)
        raise
    with state.sections.settling():
        state.space.add(record)
    return True
