"""Space is the set of segments, what each costs against the capacity, and which kind of slot it gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvlinker.description import IndexArray
from kvlinker_file.catalog import BASE_BYTES, SLOT_BYTES, SegmentRecord
from kvlinker_file.segments import Segment, SlotKind

__all__ = ["Growth", "SlabSpace", "Taken"]

_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Taken:
    """Slots of one segment that a writer took."""

    segment: Segment
    slots: IndexArray

    @property
    def addresses(self) -> IndexArray:
        """Where the slots begin."""
        return self.segment.addresses(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A segment that is paid for and not made yet."""

    number: int
    kind: SlotKind
    slots: int

    @property
    def file_bytes(self) -> int:
        """Bytes of its file."""
        return -(-self.slots * self.kind.slot_bytes // _PAGE) * _PAGE

    @property
    def record(self) -> SegmentRecord:
        """What the catalog must know of it."""
        return SegmentRecord(
            number=self.number, file_bytes=self.file_bytes, kind=self.kind, slots=self.slots
        )


class SlabSpace:
    """Segments within a capacity; not locked, the store's lock guards every call."""

    def __init__(self, *, capacity: int, segment_size: int) -> None:
        """Make a space without segments."""
        self.capacity = capacity
        self._segment_size = segment_size
        self._segments: dict[int, Segment] = {}
        self._open: dict[SlotKind, list[Segment]] = {}
        self._kind_ids: dict[SlotKind, int] = {}
        self._promised: dict[int, Growth] = {}
        self._excess_index_bytes = 0

    # ---- kinds --------------------------------------------------------------------------------

    def kind_id(self, kind: SlotKind) -> int:
        """Return the small number of a kind, the same for as long as the store is open."""
        return self._kind_ids.setdefault(kind, len(self._kind_ids))

    def kinds_of_length(self, payload_bytes: int) -> tuple[int, ...]:
        """Return the numbers of the kinds whose objects have so many bytes."""
        return tuple(
            number for kind, number in self._kind_ids.items() if kind.payload_bytes == payload_bytes
        )

    # ---- segments -----------------------------------------------------------------------------

    def __getitem__(self, number: int) -> Segment:
        return self._segments[number]

    def __iter__(self) -> Iterator[Segment]:
        return iter(tuple(self._segments.values()))

    def of_kind(self, kind: SlotKind) -> Sequence[Segment]:
        """Return the segments that give slots of a kind."""
        return self._open.get(kind, ())

    def of_other_kinds(self, kind: SlotKind) -> tuple[Segment, ...]:
        """Return the segments that give slots of other kinds."""
        others = (segments for other, segments in self._open.items() if other != kind)
        return tuple(segment for segments in others for segment in segments)

    def add(self, segment: Segment) -> None:
        """Take slots from a segment from now on; a promise of it is kept with that."""
        self._promised.pop(segment.number, None)
        self._segments[segment.number] = segment
        self._open.setdefault(segment.kind, []).append(segment)

    def retire(self, segment: Segment) -> None:
        """Take no more slots from a segment."""
        self._open[segment.kind].remove(segment)

    def retire_empty(self, *, keep: int) -> list[Segment]:
        """Retire the segments without taken slots, but for some of each kind; return them."""
        found = []
        for segments in self._open.values():
            empty = [segment for segment in segments if not segment.used_slots]
            found.extend(empty[keep:])
        for segment in found:
            self.retire(segment)
        return found

    def remove(self, segment: Segment) -> None:
        """Forget a retired segment and what it costs."""
        del self._segments[segment.number]

    def take(self, kind: SlotKind, count: int) -> list[Taken]:
        """Take up to so many free slots of a kind."""
        found = []
        for segment in self.of_kind(kind):
            if count and segment.free_slots:
                slots = segment.take(count)
                found.append(Taken(segment=segment, slots=slots))
                count -= len(slots)
        return found

    # ---- capacity -----------------------------------------------------------------------------

    @property
    def file_bytes(self) -> int:
        """Bytes of the segment files, promised ones included."""
        made = sum(segment.file_bytes for segment in self)
        return made + sum(growth.file_bytes for growth in self._promised.values())

    @property
    def _slots(self) -> int:
        made = sum(segment.slots for segment in self)
        return made + sum(growth.slots for growth in self._promised.values())

    @property
    def available(self) -> int:
        """Bytes that new segments may cost."""
        index_bytes = BASE_BYTES + self._slots * SLOT_BYTES + self._excess_index_bytes
        return self.capacity - self.file_bytes - index_bytes

    def note_index_bytes(self, actual: int) -> None:
        """Note what the index takes on disk: a database that has shrunk may not have given its pages back."""
        self._excess_index_bytes = max(0, actual - BASE_BYTES - self._slots * SLOT_BYTES)

    def plan_growth(self, kind: SlotKind) -> Growth | None:
        """Return the segment that could be made for a kind now; None where the capacity is used up."""
        most = max(1, kind.slots_in(self._segment_size))
        slots = min(most, (self.available - _PAGE) // (kind.slot_bytes + SLOT_BYTES))
        if slots < 1:
            return None
        return Growth(number=self._free_number(), kind=kind, slots=slots)

    def _free_number(self) -> int:
        number = 1
        while number in self._segments or number in self._promised:
            number += 1
        return number

    def promise(self, growth: Growth) -> None:
        """Pay for a segment before it is made."""
        self._promised[growth.number] = growth

    def withdraw(self, growth: Growth) -> None:
        """Take back a promise that was not kept."""
        self._promised.pop(growth.number, None)

    def slots_after_reuse(self, segment: Segment, kind: SlotKind) -> int:
        """Return how many slots of a kind a segment could be cut into; 0 where a new file fits better."""
        slots = kind.slots_in(segment.file_bytes)
        wasted = segment.file_bytes - slots * kind.slot_bytes
        if wasted > segment.file_bytes // 8:
            return 0
        paid = self.available + segment.slots * SLOT_BYTES
        return slots if slots * SLOT_BYTES <= paid else 0

    def largest_payload(self) -> int:
        """Return the bytes of the longest object with one range that an empty space could take."""
        overhead = SlotKind(payload_bytes=1, ranges=1).slot_bytes + SLOT_BYTES + BASE_BYTES + _PAGE
        return self.capacity - overhead
