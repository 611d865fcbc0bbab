"""Room is found by taking free slots, by growing, by evicting, and by moving a cold segment to another kind."""

from __future__ import annotations

import logging

from kvlinker.errors import StoreError
from kvlinker_file.catalog import SegmentRecord
from kvlinker_file.directory import NO_SPACE
from kvlinker_file.segments import Segment, SlotKind
from kvlinker_file.space import Growth, Taken
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
        self.taken: list[Taken] = []

    def run(self) -> bool:
        """Search until all slots are there; False when nothing more can be done."""
        state = self._state
        with state.lock:
            state.holds.expire()
            self._take()
            if self._missing and not self._is_possible():
                return False
        while self._missing:
            if not (self._grow() or self._make_free()):
                return False
            with state.lock:
                self._take()
        return True

    def _take(self) -> None:
        for taken in self._state.space.take(self._kind, self._missing):
            self.taken.append(taken)
            self._missing -= len(taken.slots)

    def _is_possible(self) -> bool:
        """Whether everything that may go would be enough; evicting for nothing helps nobody."""
        space, index = self._state.space, self._state.index
        slots = index.evictable(space.kind_id(self._kind))
        others = sum(
            segment.file_bytes
            for segment in space.of_other_kinds(self._kind)
            if self._is_idle(segment)
        )
        slots += self._kind.slots_in(max(0, space.available) + others)
        return slots >= self._missing

    def _is_idle(self, segment: Segment) -> bool:
        index = self._state.index
        return segment.used_slots == index.objects_in(segment.number) and not index.is_busy(
            segment.number
        )

    # ---- growing ------------------------------------------------------------------------------

    def _grow(self) -> bool:
        state = self._state
        index_bytes = state.directory.index_bytes()
        with state.lock:
            state.space.note_index_bytes(index_bytes)
            growth = state.space.plan_growth(self._kind) if self._may_grow else None
            if growth is None:
                return False
            state.space.promise(growth)
        try:
            segment = _make_segment(state, growth)
        except BaseException as error:
            with state.lock:
                state.space.withdraw(growth)
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                state.count("disk_full")
                self._may_grow = False
                return False
            raise
        with state.lock:
            state.space.add(segment)
        return True

    # ---- evicting -----------------------------------------------------------------------------

    def _make_free(self) -> bool:
        """Evict some of the own kind, or all of a segment of another kind that is colder on average."""
        state, index = self._state, self._state.index
        number = state.space.kind_id(self._kind)
        with state.lock:
            own = index.oldest_tick(number)
            segment = self._coldest_segment()
            if segment is not None and (own is None or index.mean_tick(segment.number) < own):
                rows = index.rows_in(segment.number)
                index.remove(rows)
                state.space.retire(segment)
            else:
                segment = None
                rows = index.evict(number, self._missing)
        try:
            if segment is not None:
                is_gone = not _move_segment(state, segment, self._kind)
                self._may_grow |= is_gone  # even a full disk has room again
            elif len(rows):
                state.save_removals()
        except OSError:
            with state.lock:
                index.restore(rows)
            raise
        state.count("evicted", len(rows))
        return segment is not None or len(rows) > 0

    def _coldest_segment(self) -> Segment | None:
        idle = filter(self._is_idle, self._state.space.of_other_kinds(self._kind))
        mean_tick = self._state.index.mean_tick
        return min(idle, key=lambda segment: mean_tick(segment.number), default=None)


def _make_segment(state: StoreState, growth: Growth) -> Segment:
    segment = Segment(
        number=growth.number,
        descriptor=state.directory.create_segment(growth.number, growth.file_bytes),
        file_bytes=growth.file_bytes,
        kind=growth.kind,
        slots=growth.slots,
    )
    try:
        if state.is_durable:
            state.directory.sync()
        with state.commit_lock:
            state.commit(segments=[growth.record])
    except BaseException:
        segment.close()
        state.directory.remove_segment(growth.number)
        raise
    return segment


def _move_segment(state: StoreState, segment: Segment, kind: SlotKind) -> bool:
    """Cut an empty, retired segment anew and return True, or delete it where another file would fit better."""
    with state.commit_lock:
        with state.lock:
            slots = state.space.slots_after_reuse(segment, kind)
        if not slots:
            state.delete_segments([segment])
            return False
        record = SegmentRecord(
            number=segment.number, file_bytes=segment.file_bytes, kind=kind, slots=slots
        )
        try:
            state.commit(segments=[record])
        except StoreError:
            with state.lock:
                state.space.add(segment)
            raise
        state.remap(segment, record)
    return True
