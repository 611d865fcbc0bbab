"""Room is found by taking free slots, by growing, by evicting, and by moving a cold segment to another kind."""

from __future__ import annotations

import os

from kvlinker_file.catalog import SegmentRecord
from kvlinker_file.os_errors import NO_NEW_FILES, NO_SPACE
from kvlinker_file.sections import UnsettledError
from kvlinker_file.segments import Segment, SlotKind
from kvlinker_file.space import Taken
from kvlinker_file.state import StoreState

__all__ = ["find_room"]

_NO_ROOM = "no room"


def find_room(state: StoreState, kind: SlotKind, count: int) -> list[Taken] | None:
    """Take so many slots of a kind, evicting what was used least recently; None and nothing taken if it cannot be.

    Held objects and those that are read stay. No lock is held by the caller.
    """
    search = _Search(state, kind, count)
    try:
        if search.run():
            return search.taken
        state.notices.warn(_NO_ROOM, _what_is_free(state, kind, count))
    except OSError as error:
        state.notices.warn(_NO_ROOM, error)
        state.count("index_errors")
    state.give_back(search.taken)
    return None


def _what_is_free(state: StoreState, kind: SlotKind, count: int) -> str:
    """Say how much was wanted and how much there is, and what to do about it."""
    _, disk = state.directory.disk_bytes()
    with state.changing():
        capacity = max(0, state.space.available)
    advice = "free space on the disk" if disk < capacity else "raise the capacity"
    return (
        f"{count * kind.slot_bytes} B for {count} objects of {kind.payload_bytes} B; {disk} B of the disk and "
        f"{capacity} B of the capacity are free, and too few other objects may be evicted; {advice}"
    )


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
                            self._note_full_disk(free)
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
            self._note_full_disk(self._state.directory.disk_bytes()[1])
        elif error.errno in NO_NEW_FILES:
            self._state.notices.warn("no new file, evicting instead", error)
            self._state.count("disk_errors")
            self._may_make_files = False
        else:
            raise error
        self._may_grow = False

    def _note_full_disk(self, free: int) -> None:
        why = (
            f"{free} B are free, and a segment with an object of {self._kind.payload_bytes} B does not fit; "
            f"free space on it, or lower the capacity"
        )
        self._state.notices.warn("the disk is full, evicting instead", why)
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
