"""Random calls of two openers against a dictionary: a store may forget by evicting, and never anything else."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from file_shelf import Shelf, make_key
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvlinker.store import Hold, ReadSession, ReadStatus, WriteStatus
from kvlinker_file import FileStore, FileStoreOptions

MIB = 1 << 20
OK, MISS = ReadStatus.OK, ReadStatus.MISS
SIZES = (500, 9_000, 60_000)
"""Bytes of a layer of each kind of object; four layers make an object."""
kinds = st.integers(0, len(SIZES) - 1)
numbers = st.lists(st.integers(0, 24), min_size=1, max_size=6, unique=True)


class Clock:
    """Seconds that pass when the machine says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class StoreMachine(RuleBasedStateMachine):
    """A store of some MiB that is open twice: `maybe` is written and not deleted, `held` must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.shelves = [Shelf(row_bytes=size, pages=6) for size in SIZES]
        self.maybe: set[bytes] = set()
        self.holds: list[tuple[Hold, set[bytes], float]] = []
        self.sessions: list[tuple[ReadSession, Shelf, list[bytes], tuple[bool, ...]]] = []
        self.capacity = 4 * MIB
        self.store, self.other = self.open(), self.open()

    def open(self) -> FileStore:
        options = FileStoreOptions(path=self.folder / "store", capacity=self.capacity)
        return FileStore(options, clock=self.clock)

    def keys(self, kind: int, chosen: list[int]) -> list[bytes]:
        return [make_key(number, kind + 1) for number in chosen]

    def held(self) -> set[bytes]:
        """Objects that may not be evicted now."""
        found = {key for _, keys, until in self.holds if until > self.clock.now for key in keys}
        for _, _, keys, present in self.sessions:
            found.update(key for key, there in zip(keys, present, strict=True) if there)
        return found & self.maybe

    @rule(kind=kinds, chosen=numbers, allowed=st.sampled_from([True, True, True, False]))
    def write(self, kind: int, chosen: list[int], *, allowed: bool) -> None:
        keys, held = self.keys(kind, chosen), self.held()
        present = self.store.exists(keys)
        statuses = self.shelves[kind].put(self.store, keys, allowed=allowed)
        fresh = {status for status, there in zip(statuses, present, strict=True) if not there}
        expected = WriteStatus.WRITTEN if allowed else WriteStatus.DISCARDED
        assert fresh in (set(), {expected}, {WriteStatus.FULL})
        assert all(
            status is WriteStatus.EXISTS
            for status, there in zip(statuses, present, strict=True)
            if there
        )
        stored = [key for key, status in zip(keys, statuses, strict=True) if status.is_stored]
        self.maybe.update(stored)
        assert self.store.exists(stored) == (True,) * len(stored)
        assert self.store.exists(sorted(held)) == (True,) * len(held)

    @rule(kind=kinds, chosen=numbers, by_layer=st.booleans())
    def read(self, kind: int, chosen: list[int], *, by_layer: bool) -> None:
        keys = self.keys(kind, chosen)
        present = self.store.exists(keys)
        statuses = self.shelves[kind].get(self.store, keys, by_layer=by_layer)
        assert statuses == tuple(OK if there else MISS for there in present)

    @rule(kind=kinds, chosen=numbers)
    def read_another_layout(self, kind: int, chosen: list[int]) -> None:
        other = Shelf(row_bytes=SIZES[kind], pages=6, fingerprint=b"another")
        assert set(other.get(self.store, self.keys(kind, chosen))) == {MISS}

    @precondition(lambda self: len(self.sessions) < 3)
    @rule(kind=kinds, chosen=numbers)
    def open_session(self, kind: int, chosen: list[int]) -> None:
        keys, shelf = self.keys(kind, chosen), self.shelves[kind]
        present = self.store.exists(keys)
        session = self.store.open_read(shelf.request(keys))
        self.sessions.append((session, shelf, keys, present))

    @precondition(lambda self: self.sessions)
    @rule(choice=st.integers(0, 2), close=st.booleans())
    def read_session(self, choice: int, *, close: bool) -> None:
        place = choice % len(self.sessions)
        session, shelf, keys, present = self.sessions[place]
        assert shelf.read(session, keys) == tuple(OK if there else MISS for there in present)
        if close:
            session.close()
            del self.sessions[place]

    @rule(kind=kinds, chosen=numbers, seconds=st.integers(1, 20))
    def hold(self, kind: int, chosen: list[int], seconds: int) -> None:
        keys = self.keys(kind, chosen)
        hold = self.store.hold(keys, seconds=seconds)
        assert hold.present == self.store.exists(keys)
        there = {key for key, is_there in zip(keys, hold.present, strict=True) if is_there}
        self.holds.append((hold, there, self.clock.now + seconds))

    @precondition(lambda self: self.holds)
    @rule(choice=st.integers(0, 100))
    def release(self, choice: int) -> None:
        hold, _, _ = self.holds.pop(choice % len(self.holds))
        hold.release()

    @rule()
    def switch(self) -> None:
        self.store, self.other = self.other, self.store

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(kind=kinds, chosen=numbers)
    def delete(self, kind: int, chosen: list[int]) -> None:
        keys = self.keys(kind, chosen)
        assert self.store.exists(keys) == self.store.delete(keys)
        self.forget(keys)

    @rule(kind=kinds)
    def clear(self, kind: int) -> None:
        before = self.store.stats().objects
        removed = self.store.clear(bytes([kind + 1]) * 12)
        assert self.store.stats().objects == before - removed
        self.forget([key for key in self.maybe if key[0] == kind + 1])

    def forget(self, keys: list[bytes]) -> None:
        self.maybe.difference_update(keys)
        self.holds = [(hold, held - set(keys), until) for hold, held, until in self.holds]
        self.sessions = [
            (session, shelf, asked, present) for session, shelf, asked, present in self.sessions
        ]

    @rule(capacity=st.sampled_from([3, 4, 6]))
    def reopen(self, capacity: int) -> None:
        before = set(self.existing())
        grows = capacity * MIB >= self.capacity
        self.store.close()
        self.other.close()
        self.sessions.clear()
        self.holds.clear()
        self.capacity = capacity * MIB
        self.store, self.other = self.open(), self.open()
        after = set(self.existing())
        assert after <= before
        assert after == before or not grows

    def existing(self) -> list[bytes]:
        asked = sorted(self.maybe)
        return [key for key, there in zip(asked, self.store.exists(asked), strict=True) if there]

    @invariant()
    def bytes_stay_within_the_capacity(self) -> None:
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        on_disk = sum(path.stat().st_blocks * 512 for path in files)
        stats = self.store.stats()
        assert stats.used_bytes == on_disk <= self.capacity
        assert stats.objects == len(self.existing())
        assert stats.counters["corrupt"] == self.other.stats().counters["corrupt"] == 0

    def teardown(self) -> None:
        for session, *_ in self.sessions:
            session.close()
        self.store.close()
        self.other.close()
        shutil.rmtree(self.folder)


@pytest.mark.parametrize(
    ("examples", "steps"), [(25, 30), pytest.param(600, 60, marks=pytest.mark.soak)]
)
def test_a_store_does_what_a_dictionary_with_eviction_would(examples: int, steps: int) -> None:
    chosen = settings(max_examples=examples, stateful_step_count=steps)

    run_state_machine_as_test(StoreMachine, settings=chosen)
