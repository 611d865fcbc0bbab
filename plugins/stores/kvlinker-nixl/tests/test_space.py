"""Slots of a space: whatever comes and goes, no two objects share a byte, and the books agree."""

from __future__ import annotations

import errno
import random
from itertools import pairwise

import pytest

from kvlinker_nixl.space import Entry, Segment, Space, SpaceLayout

LAYOUT = SpaceLayout(
    first_offset=4096, segment_bytes=8192, segments=4, alignment=64, record_bytes=64
)


class Journal:
    """Writes nothing down, and may have no room."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.can_cut = True

    def cut(self, segment: Segment) -> None:
        """See Journal."""
        if not self.can_cut:
            raise OSError(errno.EIO, f"segment {segment.number} cannot be cut")

    def back(self, segment: Segment, end: int) -> None:
        """See Journal."""
        assert end > segment.number
        if end > self.room:
            raise OSError(errno.ENOSPC, "no room")

    def note(self, entry: Entry) -> None:
        """See Journal."""

    def forget(self, entry: Entry) -> None:
        """See Journal."""


def check(space: Space, reserved: list[Entry]) -> None:
    """Fail if two objects share a byte, or one leaves its segment."""
    places = []
    for segment in space.segments:
        start = LAYOUT.start_of(segment.number)
        for slot, entry in segment.entries.items():
            assert entry.slot == slot
            end = entry.offset + entry.frame_bytes
            assert start + LAYOUT.table_bytes(segment.slots) <= entry.offset
            assert end <= start + LAYOUT.segment_bytes
            places.append((entry.offset, end))
    places.sort()
    assert all(first[1] <= second[0] for first, second in pairwise(places))
    assert all(entry.segment.entries[entry.slot] is entry for entry in reserved)


class Crowd:
    """Writers, readers and holders of a few objects, who do what dice say."""

    def __init__(self, seed: int) -> None:
        self.space = Space(LAYOUT, Journal())
        self._dice = random.Random(seed)  # noqa: S311  # the same steps each time
        self._reserved: list[Entry] = []
        self._pinned: list[Entry] = []
        self._holds: dict[int, bytes] = {}

    def step(self) -> None:
        """Do one thing."""
        key = self._dice.randrange(40).to_bytes(32, "big")
        steps = (*(self._reserve, self._publish) * 3, self._pin, self._pin)
        self._dice.choice((*steps, self._unpin, self._hold, self._release, self._remove))(key)

    def check(self) -> None:
        """Fail unless everything is where it should be."""
        check(self.space, [*self._reserved, *self._pinned])
        assert all(self.space.find(key) is not None for key in self._holds.values())

    def end(self) -> None:
        """Let go of everything."""
        for entry in [*self._reserved, *self._pinned]:
            self.space.unpin(entry)
        for number in self._holds:
            self.space.release(number)

    def _reserve(self, key: bytes) -> None:
        entry = self.space.take(key, self._dice.choice([300, 900, 4000]))
        if entry is not None:
            self._reserved.append(entry)

    def _publish(self, _key: bytes) -> None:
        if self._reserved:
            entry = self._reserved.pop(self._dice.randrange(len(self._reserved)))
            if self._dice.randrange(5):
                self._release_replaced(entry)
                self.space.publish(entry)
            else:
                self.space.unpin(entry)

    def _release_replaced(self, entry: Entry) -> None:
        """Give up holds of an object that one of another length is about to replace."""
        there = self.space.find(entry.key)
        if there is not None and there.frame_bytes != entry.frame_bytes:
            for number in [one for one, key in self._holds.items() if key == entry.key]:
                del self._holds[number]
                self.space.release(number)

    def _pin(self, key: bytes) -> None:
        if (found := self.space.find(key)) is not None:
            self.space.pin(found)
            self._pinned.append(found)

    def _unpin(self, _key: bytes) -> None:
        if self._pinned:
            self.space.unpin(self._pinned.pop(self._dice.randrange(len(self._pinned))))

    def _hold(self, key: bytes) -> None:
        if (found := self.space.find(key)) is not None and len(self._holds) < 5:
            self._holds[self.space.hold([found], 600)] = key

    def _remove(self, key: bytes) -> None:
        if (found := self.space.find(key)) is not None and key not in self._holds.values():
            self.space.remove(found)

    def _release(self, _key: bytes) -> None:
        if self._holds:
            self.space.release(self._holds.popitem()[0])


@pytest.mark.parametrize("seed", range(4))
def test_t3_no_two_objects_ever_share_a_byte_and_what_is_pinned_or_held_stays(seed: int) -> None:
    crowd = Crowd(seed)

    for _ in range(1500):
        crowd.step()
        crowd.check()

    crowd.end()
    assert crowd.space.counters["evicted"] > 50
    assert crowd.space.take(b"k" * 32, 4000) is not None


def test_b82_lengths_above_four_gib_are_counted_without_overflow() -> None:
    layout = SpaceLayout(first_offset=0, segment_bytes=8 << 30, segments=2, alignment=64)
    journal = Journal()
    journal.room = 1 << 50
    space = Space(layout, journal)

    first, second = space.take(b"a" * 32, 3 << 30), space.take(b"b" * 32, 3 << 30)
    third = space.take(b"c" * 32, 5 << 30)

    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.offset, second.offset, third.offset) == (0, 3 << 30, 8 << 30)
    assert space.take(b"d" * 32, 9 << 30) is None


def test_a_disk_without_room_makes_room_among_what_is_there() -> None:
    journal = Journal()
    space = Space(LAYOUT, journal)
    first = space.take(b"a" * 32, 900)
    assert first is not None
    space.publish(first)
    journal.room = 0

    second = space.take(b"b" * 32, 900)

    assert second is not None
    assert second.offset == first.offset
    assert space.find(b"a" * 32) is None
    assert space.counters["disk_full"] > 0


def filled(journal: Journal, frame_bytes: int) -> Space:
    """Return a space that is full of objects of one length."""
    space = Space(LAYOUT, journal)
    for number in range(LAYOUT.segments * LAYOUT.slots_of(frame_bytes)):
        entry = space.take(number.to_bytes(32, "big"), frame_bytes)
        assert entry is not None
        space.publish(entry)
    assert space.counters["evicted"] == 0
    return space


def test_t3_objects_stay_apart_behind_a_segment_that_could_not_be_cut_anew() -> None:
    journal = Journal()
    space = filled(journal, 4096)
    journal.can_cut = False
    assert space.take(b"s" * 32, 64) is None
    journal.can_cut = True

    for number in range(40, 60):
        entry = space.take(number.to_bytes(32, "big"), 4096)
        assert entry is not None
        space.publish(entry)
        check(space, [])


def test_t3_a_full_disk_costs_no_objects_where_that_makes_no_room() -> None:
    journal = Journal()
    space = filled(journal, 64)
    there = len(space)
    journal.room = 0

    assert [space.take(b"l" * 32, 4096) for _ in range(8)] == [None] * 8

    assert len(space) == there
    assert space.counters["disk_full"] > 0
