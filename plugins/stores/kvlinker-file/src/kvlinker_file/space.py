"""Space is the set of segments that all openers share: what each costs, and which rows it has."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvlinker.description import IndexArray
from kvlinker_file.buckets import distinct
from kvlinker_file.catalog import BASE_BYTES, SLOT_BYTES, SegmentRecord
from kvlinker_file.directory import StoreDirectory
from kvlinker_file.segments import Segment, SlotKind
from kvlinker_file.table_layout import ROW_BYTES, Word, table_bytes
from kvlinker_file.tables import DamagedTablesError, SharedTables

__all__ = ["SlabSpace", "Taken"]

_PAGE = 4096
_MAX_RANGES = 1 << 16
_STEPS = 64
"""Segments that a disk is taken in which is smaller than one of the usual size."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Taken:
    """Slots of one segment that a writer took."""

    segment: Segment
    slots: IndexArray

    @property
    def addresses(self) -> IndexArray:
        """Where the slots begin."""
        return self.segment.addresses(self.slots)

    @property
    def rows(self) -> IndexArray:
        """Their rows."""
        return self.segment.first_row + self.slots


class SlabSpace:
    """Segments within a capacity; not locked, the store's lock guards every call."""

    def __init__(
        self, tables: SharedTables, directory: StoreDirectory, *, segment_size: int
    ) -> None:
        """Take the shared tables; `refresh` reads the segments in them."""
        self.capacity = tables.config.capacity
        self._tables = tables
        self._directory = directory
        self._segment_size = segment_size
        self._segments: dict[int, Segment] = {}
        """By entry of the shared table, in order of number."""
        self._entries: dict[int, int] = {}
        """Segment number to entry."""
        self._kinds: dict[SlotKind, list[int]] = {}
        """Entries of the segments of each kind, in order of number."""
        self._retiring: set[tuple[int, int]] = set()
        """Number and incarnation of the segments that this opener is about to delete or to cut anew."""
        self._gone: deque[Segment] = deque()
        """Pinned ones that no table has any more."""
        self._version = -1
        self._catalog_bytes = 0
        self._index_rows()

    # ---- segments -----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take over what other openers changed.

        Raises:
            DamagedTablesError: the shared table does not make sense.
        """
        version = int(self._tables.words[Word.SEGMENTS_VERSION])
        if version == self._version:
            return
        table = self._tables.segments
        entries = np.flatnonzero(table["incarnation"] > 0)
        entries = entries[np.argsort(table["number"][entries], kind="stable")]
        known = {(item.number, item.incarnation): item for item in self._segments.values()}
        found = {entry: self._adopt(entry, known) for entry in entries.tolist()}
        if len({segment.number for segment in found.values()}) < len(found):
            msg = f"shared tables of {self._directory.path}: a segment is there twice"
            raise DamagedTablesError(msg)
        kept = set(found.values())
        for segment in self._segments.values():
            if segment not in kept:
                self._let_go(segment)
        self._segments = found
        self._entries = {segment.number: entry for entry, segment in found.items()}
        self._kinds = {}
        for entry, segment in found.items():
            self._kinds.setdefault(segment.kind, []).append(entry)
        self._index_rows()
        self._version = version

    def _let_go(self, segment: Segment) -> None:
        """Unmap a segment that is no more, or have `close_gone` do it: a device may take its time to unpin it."""
        if segment.is_pinned:
            self._gone.append(segment)
        else:
            segment.close()

    def close_gone(self) -> None:
        """Unpin and unmap the segments that are no more; for whoever has left the locks."""
        while self._gone:
            with suppress(IndexError):  # another thread was faster
                self._gone.popleft().close()

    def _adopt(self, entry: int, known: Mapping[tuple[int, int], Segment]) -> Segment:
        """Return the segment of an entry: the one that is known, if it still is that."""
        number, first_row, slots, file_bytes, payload, ranges, incarnation = (
            int(value) for value in self._tables.segments[entry].tolist()[:7]
        )
        if (same := known.get((number, incarnation))) is not None:
            return same
        kind = SlotKind(payload_bytes=payload, ranges=ranges)
        is_sensible = (
            0 < number < 1 << 30
            and 0 < ranges <= _MAX_RANGES
            and 0 < payload <= file_bytes <= self.capacity
            and 0 < slots * kind.slot_bytes <= file_bytes
            and 0 <= first_row <= len(self._tables.rows) - slots
        )
        if not is_sensible:
            msg = f"shared tables of {self._directory.path}: entry {entry} is no segment"
            raise DamagedTablesError(msg)
        return self.segment_of(
            SegmentRecord(
                number=number,
                file_bytes=file_bytes,
                kind=kind,
                slots=slots,
                first_row=first_row,
                incarnation=incarnation,
            )
        )

    def segment_of(self, record: SegmentRecord) -> Segment:
        """Return a segment that is not mapped yet."""
        return Segment(
            number=record.number,
            file_bytes=record.file_bytes,
            kind=record.kind,
            slots=record.slots,
            open_file=self._directory.open_segment,
            first_row=record.first_row,
            incarnation=record.incarnation,
        )

    def _index_rows(self) -> None:
        spans = sorted(
            (segment.first_row, segment.first_row + segment.slots, entry)
            for entry, segment in self._segments.items()
        )
        table = np.array([(-1, 0, -1), *spans], dtype=np.int64)
        self._starts, self._ends, self._order = table[:, 0], table[:, 1].copy(), table[:, 2]
        if np.any(self._starts[1:] < self._ends[:-1]):
            msg = f"shared tables of {self._directory.path}: segments have rows in common"
            raise DamagedTablesError(msg)

    def entries_of(self, rows: IndexArray) -> IndexArray:
        """Return the entry of each row's segment; -1 where there is none."""
        place = np.searchsorted(self._starts, rows, side="right") - 1
        return np.where(rows < self._ends[place], self._order[place], -1)

    def segments_of(self, rows: IndexArray) -> Iterator[tuple[Segment, IndexArray]]:
        """Yield each segment that some of the rows belong to, and the positions of these."""
        entries = self.entries_of(rows)
        for entry in distinct(entries).tolist():
            if entry >= 0:
                yield self._segments[entry], np.flatnonzero(entries == entry)

    def payloads_of(self, rows: IndexArray) -> IndexArray:
        """Return the object length of each row's segment; 0 where there is none."""
        entries = self.entries_of(rows)
        lengths = self._tables.segments["payload_bytes"][entries]
        return np.where(entries >= 0, lengths, 0)

    def __iter__(self) -> Iterator[Segment]:
        return iter(tuple(self._segments.values()))

    def entry_of(self, segment: Segment) -> int:
        """Return where a segment stands in the shared table."""
        return self._entries[segment.number]

    def of_kind(self, kind: SlotKind) -> list[Segment]:
        """Return the segments that give slots of a kind."""
        return self._offered(self._kinds.get(kind, []))

    def of_other_kinds(self, kind: SlotKind) -> list[Segment]:
        """Return the segments that give slots of other kinds."""
        others = (entries for other, entries in self._kinds.items() if other != kind)
        return [segment for entries in others for segment in self._offered(entries)]

    def with_free_slots(self, kind: SlotKind) -> list[Segment]:
        """Return the segments of a kind that have a free slot."""
        table, entries = self._tables.segments, self._kinds.get(kind, [])
        has_free = table["used"][entries] < table["slots"][entries]
        return self._offered([entries[i] for i in np.flatnonzero(has_free).tolist()])

    def _offered(self, entries: list[int]) -> list[Segment]:
        """Return the segments of entries that nobody is about to remove."""
        is_retired = self._tables.segments["is_retired"][entries].tolist()
        pairs = zip(entries, is_retired, strict=True)
        return [self._segments[entry] for entry, is_gone in pairs if not is_gone]

    def add(self, record: SegmentRecord) -> None:
        """Let everybody take slots of a segment from now on.

        One that is there stays as it is: the tables were made again from the catalog meanwhile.
        """
        table = self._tables.segments
        entry = self._entries.get(record.number)
        if entry is not None and self._segments[entry].incarnation == record.incarnation:
            return
        if entry is None:
            entry = int(np.flatnonzero(table["incarnation"] == 0)[0])
        kind = record.kind
        sizes = record.number, record.first_row, record.slots, record.file_bytes
        cut = kind.payload_bytes, kind.ranges, record.incarnation
        table[entry] = (*sizes, *cut, 0, 0, 0, 0, 0.0)
        words = self._tables.words
        words[Word.LAST_INCARNATION] = max(int(words[Word.LAST_INCARNATION]), record.incarnation)
        self._change()

    def retire(self, segment: Segment, *, is_retired: bool = True) -> None:
        """Let nobody take slots of a segment, or let them again."""
        place = segment.number, segment.incarnation
        (self._retiring.add if is_retired else self._retiring.discard)(place)
        if segment.number in self._entries:
            self._tables.segments["is_retired"][self.entry_of(segment)] = is_retired

    def retire_again(self) -> None:
        """Retire what this opener was retiring when the tables were made again: it still deletes or cuts it anew."""
        self._retiring &= {(segment.number, segment.incarnation) for segment in self}
        for segment in self:
            if (segment.number, segment.incarnation) in self._retiring:
                self.retire(segment)

    def retire_empty(self, *, keep: int) -> list[Segment]:
        """Retire the segments without taken slots, but for some of each kind; return them."""
        found = []
        for kind in self._kinds:
            empty = [item for item in self.of_kind(kind) if not self.counted(item, "used")]
            found.extend(empty[keep:])
        for segment in found:
            self.retire(segment)
        return found

    def remove(self, segment: Segment) -> None:
        """Forget a segment and what it costs."""
        if segment.number in self._entries:
            self._tables.segments[self.entry_of(segment)] = (*(0,) * 11, 0.0)
            self._change()

    def _change(self) -> None:
        self._tables.count_on(Word.SEGMENTS_VERSION, 1)
        self.refresh()

    def close(self) -> None:
        """Unmap everything."""
        self.close_gone()
        for segment in self:
            segment.close()

    # ---- figures ------------------------------------------------------------------------------

    def counted(self, segment: Segment, column: str) -> int:
        """Return one of a segment's figures: used, objects, or busy."""
        return int(self._tables.segments[column][self.entry_of(segment)])

    def count(self, rows: IndexArray, **changes: int) -> None:
        """Add to figures of the rows' segments, once for each row."""
        entries = self.entries_of(rows)
        for column, change in changes.items():
            np.add.at(self._tables.segments[column], entries, change)

    def count_ticks(self, rows: IndexArray, change: IndexArray) -> None:
        """Add to the sum of the ticks of the rows' segments."""
        ticks = self._tables.segments["ticks"]
        np.add.at(ticks, self.entries_of(rows), change.astype(np.float64))

    def mean_tick(self, segment: Segment) -> float:
        """Return when the objects of a segment were used on average; 0 for none."""
        count = self.counted(segment, "objects")
        ticks = float(self._tables.segments["ticks"][self.entry_of(segment)])
        return ticks / count if count else 0.0

    # ---- capacity -----------------------------------------------------------------------------

    @property
    def file_bytes(self) -> int:
        """Bytes of the segment files."""
        return sum(segment.file_bytes for segment in self)

    @property
    def end_row(self) -> int:
        """The row behind the last one that a segment has."""
        return int(self._ends.max())

    def note_index_bytes(self, actual: int) -> None:
        """Note what the index takes on disk: a database that has shrunk may not have given its pages back."""
        self._catalog_bytes = max(0, actual - self._table_bytes(0))

    def _table_bytes(self, rows: int) -> int:
        return table_bytes(self._tables.config, max(rows, len(self._tables.rows)))

    @property
    def available(self) -> int:
        """Bytes that new segments may cost."""
        slots = sum(segment.slots for segment in self)
        catalog = max(BASE_BYTES + slots * SLOT_BYTES, self._catalog_bytes)
        return self.capacity - self.file_bytes - catalog - self._table_bytes(0)

    @property
    def may_have_more_segments(self) -> bool:
        """Whether the tables have room for another segment."""
        return len(self._segments) < self._tables.config.segment_limit

    def plan_growth(self, kind: SlotKind, *, disk_bytes: int) -> SegmentRecord | None:
        """Return the segment that could be made for a kind now; None where the capacity or the disk is used up.

        Args:
            kind: of the slots.
            disk_bytes: free on the disk, for the segment and for what its rows add to the tables.
        """
        if not self.may_have_more_segments:
            return None
        left = min(self.available, disk_bytes)
        size = self._segment_size
        if (
            size > disk_bytes
        ):  # the capacity is far above the disk: grow in steps that leave others room
            size = disk_bytes // _STEPS
        slots = min(
            max(1, kind.slots_in(size)),
            (left - _PAGE) // (kind.slot_bytes + SLOT_BYTES + ROW_BYTES),
        )
        while slots > 0:
            record = self._planned(kind, slots)
            missing = record.cost + self._table_bytes(record.end_row) - self._table_bytes(0) - left
            if missing <= 0:
                return record
            slots -= -(-missing // (kind.slot_bytes + SLOT_BYTES + ROW_BYTES))
        return None

    def _planned(self, kind: SlotKind, slots: int) -> SegmentRecord:
        number = 1
        while number in self._entries:
            number += 1
        return SegmentRecord(
            number=number,
            file_bytes=-(-slots * kind.slot_bytes // _PAGE) * _PAGE,
            kind=kind,
            slots=slots,
            first_row=self._free_rows(slots, without=None),
            incarnation=self.next_incarnation,
        )

    @property
    def next_incarnation(self) -> int:
        """A number that no segment ever had."""
        last = int(self._tables.words[Word.LAST_INCARNATION]) & (1 << 61) - 1  # or written over
        return max(
            last + 1, time.time_ns() // 1000
        )  # later than all before, though the tables were lost

    def _free_rows(self, count: int, *, without: Segment | None) -> int:
        """Return the first of so many rows in a row that belong to no segment."""
        first = 0
        spans: Sequence[tuple[int, int]] = sorted(
            (item.first_row, item.first_row + item.slots) for item in self if item is not without
        )
        for start, end in spans:
            if start - first >= count:
                break
            first = end
        return first

    def recut(self, segment: Segment, kind: SlotKind) -> SegmentRecord | None:
        """Return how an empty segment could be cut into slots of a kind; None where a new file fits better."""
        slots = kind.slots_in(segment.file_bytes)
        wasted = segment.file_bytes - slots * kind.slot_bytes
        if not slots or wasted > segment.file_bytes // 8:
            return None
        record = SegmentRecord(
            number=segment.number,
            file_bytes=segment.file_bytes,
            kind=kind,
            slots=slots,
            first_row=self._free_rows(slots, without=segment),
            incarnation=self.next_incarnation,
        )
        paid = self.available + segment.slots * SLOT_BYTES
        needed = self._table_bytes(record.end_row) - self._table_bytes(0)
        return record if slots * SLOT_BYTES + needed <= paid else None

    def largest_payload(self) -> int:
        """Return the bytes of the longest object with one range that an empty space could take."""
        overhead = SlotKind(payload_bytes=1, ranges=1).slot_bytes + SLOT_BYTES + BASE_BYTES + _PAGE
        return self.capacity - overhead - table_bytes(self._tables.config, 1)
