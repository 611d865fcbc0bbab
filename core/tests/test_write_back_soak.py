"""Many threads write, read and delete behind tiers that write back, while both stores fail now and then."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from kvlinker.errors import StoreError, StoreTimeoutError
from kvlinker.store import ObjectKey
from kvlinker.stores.tiered import TieredStore
from kvlinker.stores.write_back import WriteBackLimits
from kvlinker.testing import Call, FaultStore, MemoryStore, Raise, Rule
from kvlinker.testing.shelves import Shelf, object_keys

PAGE = 640
THREADS = 4


def failing(store: MemoryStore, *, chance: float, seed: int) -> FaultStore:
    """Return a store whose calls fail with a chance."""
    calls = (Call.WRITE, Call.EXISTS, Call.READ, Call.DELETE, Call.HOLD)
    error = Raise(error=StoreError("now and then"))
    return FaultStore(
        store, [Rule(call=call, fault=error, chance=chance) for call in calls], seed=seed
    )


class Load:
    """What one thread does, and which objects must be there in the end."""

    def __init__(self, shelf: Shelf, seed: int, *, calls: int) -> None:
        self._shelf, self._random, self._seed = shelf, random.Random(seed), seed  # noqa: S311  # chooses calls
        self._calls = calls
        self.stored: set[ObjectKey] = set()

    def run(self) -> None:
        for number in range(self._calls):
            keys = object_keys(self._random.randint(1, 5), chain=f"{self._seed} {number}")
            statuses = self._shelf.write(keys)
            there = [key for key, status in zip(keys, statuses, strict=True) if status.is_stored]
            if self._random.random() < 0.3:
                self._delete(there)
            else:
                self.stored.update(there)
            self._shelf.read(keys)  # which checks every byte

    def _delete(self, keys: list[ObjectKey]) -> None:
        with suppress(StoreError):  # then nobody knows what is left
            self._shelf.store.delete(keys)
            assert not any(self._shelf.store.exists(keys))


@pytest.mark.parametrize(
    ("seed", "calls"), [(1, 100), *(pytest.param(n, 4000, marks=pytest.mark.soak) for n in (2, 3))]
)
def test_b71_nothing_that_was_answered_as_stored_is_lost_beside_failures(
    seed: int, calls: int
) -> None:
    near, far = MemoryStore(capacity_bytes=40 * PAGE), MemoryStore()
    faulty = failing(far, chance=0.05, seed=seed)
    faulty.script.add(
        Rule(call=Call.WRITE, fault=Raise(error=StoreTimeoutError("no answer")), chance=0.02)
    )
    limits = WriteBackLimits(max_bytes=20 * PAGE, pause_seconds=0.002)
    store = TieredStore(
        failing(near, chance=0.02, seed=seed), faulty, write_back=limits, pause_seconds=0.02
    )
    shelves = [Shelf(store)]
    for _ in range(THREADS - 1):
        shelves.append(shelves[-1].beside())
    loads = [Load(shelf, 10 * seed + n, calls=calls) for n, shelf in enumerate(shelves)]

    with ThreadPoolExecutor(THREADS) as pool:
        for task in [pool.submit(load.run) for load in loads]:
            task.result()

    assert store.flush(60)
    assert store.wait_for_promotions(60)
    stored = [key for load in loads for key in load.stored]
    assert stored
    is_there = zip(near.exists(stored), far.exists(stored), strict=True)
    missing = sum(not (here or there) for here, there in is_there)
    assert missing <= store.stats().counters.get("write_back_dropped", 0)
    assert near.kept() == 0
    store.close()
