"""A space is cut into segments, and a segment into slots of one length: who has which slot, and who goes next.

It knows numbers alone: whether offsets are those of a file or of memory is the journal's and the caller's business.
Nothing here takes a lock.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvlinker.store import ObjectKey

__all__ = ["Entry", "Journal", "Segment", "Space", "SpaceLayout", "round_up"]


def round_up(value: int, step: int) -> int:
    """Return the next multiple of a step."""
    return -(-value // step) * step


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceLayout:
    """Where segments and slots are."""

    first_offset: int
    """Of segment 0."""
    segment_bytes: int
    segments: int
    alignment: int
    """Slots begin at multiples of it, and are multiples of it long."""
    record_bytes: int = 0
    """A table with as many bytes for each slot, and once more, is in front of a segment's slots; 0 for none."""
    table_alignment: int = 4096

    def table_bytes(self, slots: int) -> int:
        """Return the bytes of a segment's table."""
        return round_up((slots + 1) * self.record_bytes, self.table_alignment)

    def slots_of(self, slot_bytes: int) -> int:
        """Return how many slots of a length a segment has; 0 where one is too long."""
        slots = self.segment_bytes // (slot_bytes + self.record_bytes)
        while slots and self.table_bytes(slots) + slots * slot_bytes > self.segment_bytes:
            slots -= 1
        return slots

    @property
    def longest_slot(self) -> int:
        """Bytes of a segment's only slot."""
        return (self.segment_bytes - self.table_bytes(1)) // self.alignment * self.alignment

    def start_of(self, segment: int) -> int:
        """Return where a segment begins."""
        return self.first_offset + segment * self.segment_bytes


@dataclass(slots=True, eq=False)
class Entry:
    """An object, or room for one that is being written."""

    key: ObjectKey
    frame_bytes: int
    """Bytes of header and payload."""
    segment: Segment
    slot: int
    tick: int = 0
    """When it was last used, in uses of the space."""
    pins: int = 0
    """Readers and writers that are at it now."""
    holds: int = 0
    is_living: bool = False
    """Whether it is found under its key."""

    @property
    def offset(self) -> int:
        """Where its frame begins in the space."""
        return self.segment.first_slot + self.slot * self.segment.slot_bytes


@dataclass(slots=True, eq=False)
class Segment:
    """A part of the space."""

    number: int
    slot_bytes: int = 0
    """0 where it is not cut."""
    slots: int = 0
    first_slot: int = 0
    """Where its first slot begins in the space."""
    free: list[int] = field(default_factory=list)
    fresh: int = 0
    """The first slot that nobody has used since the segment was cut."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """By slot: everything that has one, living or not."""
    last_used: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody needs any of its objects now."""
        return not any(entry.pins or entry.holds for entry in self.entries.values())


class Journal(Protocol):
    """Where it is written down what has which slot."""

    def cut(self, segment: Segment) -> None:
        """Note that a segment is empty and has other slots.

        Raises:
            OSError: there is no room for it.
        """
        ...

    def back(self, segment: Segment, end: int) -> None:
        """Make sure that there is room up to an offset of the space.

        Raises:
            OSError: there is none.
        """
        ...

    def note(self, entry: Entry) -> None:
        """Note an object."""
        ...

    def forget(self, entry: Entry) -> None:
        """Note that an object is gone."""
        ...


class Space:
    """The slots of a store and the objects in them."""

    def __init__(self, layout: SpaceLayout, journal: Journal) -> None:
        """Make an empty space."""
        self.layout = layout
        self.counters: Counter[str] = Counter()
        self._journal = journal
        self._segments = [Segment(number) for number in range(layout.segments)]
        self._objects: dict[ObjectKey, Entry] = {}
        self._orders: dict[int, OrderedDict[ObjectKey, Entry]] = {}
        """By length of slot: living objects, the one that was not used for longest first."""
        self._ticks = 0
        self._numbers = 0
        self._holds: dict[int, tuple[float, tuple[Entry, ...]]] = {}

    # ---- looking --------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return how many objects there are."""
        return len(self._objects)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All of them."""
        return tuple(self._segments)

    def find(self, key: ObjectKey) -> Entry | None:
        """Return an object."""
        return self._objects.get(key)

    def keys_of(self, namespace: bytes) -> list[ObjectKey]:
        """Return the keys that begin so."""
        return [key for key in self._objects if key.startswith(namespace)]

    def use(self, entry: Entry) -> None:
        """Note that an object is used: the others go first."""
        self._ticks += 1
        entry.tick = entry.segment.last_used = self._ticks
        if entry.is_living:
            self._orders[entry.segment.slot_bytes].move_to_end(entry.key)

    # ---- coming ---------------------------------------------------------------------------------

    def restore(
        self, number: int, slot_bytes: int, found: Iterable[tuple[int, ObjectKey, int, int]]
    ) -> None:
        """Take over a segment and its objects, (slot, key, bytes, tick), as they were found."""
        segment = self._segments[number]
        self._shape(segment, slot_bytes)
        for slot, key, frame_bytes, tick in found:
            entry = Entry(key, frame_bytes, segment, slot, tick=tick, is_living=True)
            segment.entries[slot] = entry
            twin = self._objects.get(key)
            if twin is not None and twin.tick >= tick:
                self._let_out(entry)
                continue
            if twin is not None:
                self.remove(twin)
            self._objects[key] = entry
            segment.last_used = max(segment.last_used, tick)
        used = set(segment.entries)
        segment.fresh = max(used, default=-1) + 1
        segment.free = [slot for slot in range(segment.fresh) if slot not in used]

    def sort_restored(self) -> None:
        """Put all objects that were taken over in the order of their ticks."""
        for entry in sorted(self._objects.values(), key=lambda one: one.tick):
            self._order_of(entry)[entry.key] = entry
            self._ticks = max(self._ticks, entry.tick)

    def take(self, key: ObjectKey, frame_bytes: int) -> Entry | None:
        """Return room for an object, pinned; None where nothing can go for it."""
        slot_bytes = round_up(frame_bytes, self.layout.alignment)
        if slot_bytes > self.layout.longest_slot:
            return None
        place = self._free_slot(slot_bytes)
        if place is None and self._make_room(slot_bytes):
            place = self._free_slot(slot_bytes)
        if place is None:
            return None
        segment, slot = place
        entry = Entry(key, frame_bytes, segment, slot, pins=1)
        segment.entries[slot] = entry
        return entry

    def _free_slot(self, slot_bytes: int) -> tuple[Segment, int] | None:
        cut = [segment for segment in self._segments if segment.slot_bytes == slot_bytes]
        for segment in cut:
            if segment.free:
                return segment, segment.free.pop()
        for segment in cut:
            if segment.fresh < segment.slots and self._back(segment, segment.fresh):
                segment.fresh += 1
                return segment, segment.fresh - 1
        blank = next((segment for segment in self._segments if not segment.slot_bytes), None)
        if blank is None or not self._cut(blank, slot_bytes) or not self._back(blank, 0):
            return None
        blank.fresh = 1
        return blank, 0

    def _cut(self, segment: Segment, slot_bytes: int) -> bool:
        """Cut an empty segment; where that cannot be written down, it is cut when it is needed next."""
        self._shape(segment, slot_bytes)
        try:
            self._journal.cut(segment)
        except OSError:
            self.counters["disk_full"] += 1
            segment.slot_bytes = 0
            return False
        return True

    def _shape(self, segment: Segment, slot_bytes: int) -> None:
        layout = self.layout
        segment.slot_bytes, segment.slots = slot_bytes, layout.slots_of(slot_bytes)
        segment.first_slot = layout.start_of(segment.number) + layout.table_bytes(segment.slots)
        segment.free, segment.fresh = [], 0

    def _back(self, segment: Segment, slot: int) -> bool:
        return self._backed(segment, segment.first_slot + (slot + 1) * segment.slot_bytes)

    def _backed(self, segment: Segment, end: int) -> bool:
        try:
            self._journal.back(segment, end)
        except OSError:
            self.counters["disk_full"] += 1
            return False
        return True

    def publish(self, entry: Entry) -> bool:
        """Let an object be found under its key; False where another writer was faster, and its object stays.

        An object of another length that has the key goes.
        """
        there = self._objects.get(entry.key)
        if there is not None and there.frame_bytes == entry.frame_bytes:
            self.unpin(entry)
            return False
        if there is not None:
            self.remove(there)
        entry.is_living = True
        self._objects[entry.key] = entry
        self._order_of(entry)[entry.key] = entry
        self.use(entry)
        try:
            self._journal.note(entry)
        except OSError:
            self.counters["index_errors"] += 1  # it is found for as long as the store is open
        self.unpin(entry)
        self.counters["written"] += 1
        return True

    # ---- staying --------------------------------------------------------------------------------

    def pin(self, entry: Entry) -> None:
        """Keep an object's bytes where they are, whatever happens to the object."""
        entry.pins += 1
        self.use(entry)

    def unpin(self, entry: Entry) -> None:
        """Let the bytes go once nobody else has pinned them and the object is gone."""
        entry.pins -= 1
        if not entry.pins and not entry.is_living:
            self._let_out(entry)

    def hold(self, entries: Iterable[Entry], seconds: float) -> int:
        """Keep objects from eviction for some seconds; return a number to release them by."""
        held = tuple(entries)
        for entry in held:
            entry.holds += 1
            self.use(entry)
        self._numbers += 1
        self._holds[self._numbers] = (time.monotonic() + seconds, held)
        return self._numbers

    def release(self, number: int) -> None:
        """Let objects be evicted again; a number that is not known is no error."""
        for entry in self._holds.pop(number, (0.0, ()))[1]:
            entry.holds -= 1

    def _expire(self) -> None:
        now = time.monotonic()
        for number in [number for number, (until, _) in self._holds.items() if until <= now]:
            self.release(number)

    # ---- going ----------------------------------------------------------------------------------

    def remove(self, entry: Entry) -> None:
        """Let an object not be found any more."""
        if not entry.is_living:
            return
        entry.is_living = False
        self._objects.pop(entry.key, None)
        self._order_of(entry).pop(entry.key, None)
        self._journal.forget(entry)
        if not entry.pins:
            self._let_out(entry)

    def _let_out(self, entry: Entry) -> None:
        segment = entry.segment
        if segment.entries.get(entry.slot) is entry:
            del segment.entries[entry.slot]
            segment.free.append(entry.slot)

    def _order_of(self, entry: Entry) -> OrderedDict[ObjectKey, Entry]:
        return self._orders.setdefault(entry.segment.slot_bytes, OrderedDict())

    def _make_room(self, slot_bytes: int) -> bool:
        """Evict one object of the length, or all of another segment that was not used for longer."""
        self._expire()
        victim = self._oldest(slot_bytes)
        for segment in sorted(self._segments, key=lambda one: one.last_used):
            is_other = segment.slot_bytes not in {0, slot_bytes}
            if victim is not None and segment.last_used > victim.tick:
                break
            if is_other and segment.is_idle and self._can_hold_one(segment, slot_bytes):
                return self._recut(segment, slot_bytes)
        if victim is None:
            return False
        self._evict(victim)
        return True

    def _can_hold_one(self, segment: Segment, slot_bytes: int) -> bool:
        """Whether a segment has room on disk for one slot of another length: else its objects would go for nothing."""
        table_bytes = self.layout.table_bytes(self.layout.slots_of(slot_bytes))
        return self._backed(
            segment, self.layout.start_of(segment.number) + table_bytes + slot_bytes
        )

    def _oldest(self, slot_bytes: int) -> Entry | None:
        order = self._orders.get(slot_bytes, OrderedDict())
        for key, entry in self._turns(order):
            if not entry.pins and not entry.holds:
                return entry
            order.move_to_end(key)  # it is needed now, which is a use
        return None

    @staticmethod
    def _turns(
        order: OrderedDict[ObjectKey, Entry],
    ) -> Iterator[tuple[ObjectKey, Entry]]:
        for _ in range(len(order)):
            yield next(iter(order.items()))

    def _evict(self, entry: Entry) -> None:
        self.remove(entry)
        self.counters["evicted"] += 1

    def _recut(self, segment: Segment, slot_bytes: int) -> bool:
        for entry in list(segment.entries.values()):
            self._evict(entry)
        segment.last_used = self._ticks
        return self._cut(segment, slot_bytes)
