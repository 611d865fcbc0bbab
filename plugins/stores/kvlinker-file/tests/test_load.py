"""Eight processes do everything with one store, and are killed meanwhile: no wrong byte, and nothing over the capacity.

The long form runs for ten minutes; KVLINKER_SOAK_SECONDS says otherwise.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from file_shelf import OpenStore
from load_pages import Family, LoadPages, load_key
from load_plants import Plant
from load_run import LoadPlan, LoadReport, run_load

from kvlinker_file import FileStore, prune, verify

_log = logging.getLogger(__name__)

MIB = 1 << 20
SOAK_SECONDS = float(os.environ.get("KVLINKER_SOAK_SECONDS", "600"))
SHORT = LoadPlan(capacity=8 * MIB, operations=1000, kills=4, stops=1)
LONG = LoadPlan(
    capacity=32 * MIB,
    numbers=500,
    seconds=SOAK_SECONDS,
    kills=int(SOAK_SECONDS / 3),
    stops=int(SOAK_SECONDS / 10),
    seed=random.SystemRandom().randrange(1 << 30),
)
MOST_DESCRIPTORS = 24
FILLING = 64
KINDS_FILLED = (1, 3)


def objects_that_fit(store: FileStore, kind: int) -> int:
    """Fill an empty store with objects of a kind until the first one goes; return how many there were."""
    pages, numbers, before = LoadPages(kind, pages=FILLING), itertools.count(), 0
    while not store.stats().counters["evicted"]:
        before = store.stats().objects
        keys = [load_key(Family.STABLE, kind, next(numbers)) for _ in range(FILLING)]
        assert all(status.is_stored for status in pages.put(store, keys))
    return before


@pytest.mark.parametrize("plan", [SHORT, pytest.param(LONG, marks=pytest.mark.soak)])
def test_processes_that_are_killed_leave_right_bytes_free_space_and_nothing_held(
    folder: Path,
    tmp_path: Path,
    open_store: OpenStore,
    disk_bytes: Callable[[], int],
    plan: LoadPlan,
) -> None:
    report = run_load(folder, tmp_path, plan)

    _log.info("%s", report)
    assert report.violations == ()
    assert report.peak_descriptors <= MOST_DESCRIPTORS
    assert_all_was_done(report, plan)
    found = verify(folder)
    assert found.is_clean
    assert found.objects > 0
    store = open_store(capacity=plan.capacity)
    counters = store.stats().counters
    assert (counters["lost_at_open"], counters["index_lost"]) == (0, 0)
    assert store.stats().objects == found.objects
    assert store.stats().used_bytes == disk_bytes() <= plan.capacity
    store.close()
    assert disk_bytes() <= plan.capacity


def assert_all_was_done(report: LoadReport, plan: LoadPlan) -> None:
    """Check that the load was one: everything happened, and under pressure."""
    counts = report.counts
    for answer in ("written", "exists", "discarded", "removed", "read ok", "read miss"):
        assert counts[answer] > 0
    assert counts["read again"] > 0
    assert counts["held and read"] > 0
    assert counts["store evicted"] > 0
    assert counts["full"] < counts["written"]
    assert report.kills >= plan.kills
    assert report.samples > 0


def test_what_processes_counted_adds_up_to_what_the_store_holds(
    folder: Path, tmp_path: Path, open_store: OpenStore
) -> None:
    plan = LoadPlan(capacity=8 * MIB, operations=1000, replaces=False)

    report = run_load(folder, tmp_path, plan)

    assert report.violations == ()
    counts = report.counts
    left = counts["written"] - counts["store evicted"] - counts["removed"]
    assert counts["store evicted"] > 0
    assert open_store(capacity=plan.capacity).stats().objects == left


def test_after_kills_the_whole_capacity_can_be_written_again(
    folder: Path, tmp_path: Path, open_store: OpenStore
) -> None:
    plan = LoadPlan(processes=3, capacity=8 * MIB, operations=400, kills=3)
    fitting = {
        kind: objects_that_fit(open_store(path=tmp_path / f"{kind}", capacity=8 * MIB), kind)
        for kind in KINDS_FILLED
    }

    report = run_load(folder, tmp_path, plan)

    assert report.violations == ()
    for kind, most in fitting.items():
        assert prune(folder, older_than=0).objects == 0
        used = open_store(capacity=plan.capacity)
        assert objects_that_fit(used, kind) >= most * 0.95
        used.close()


@pytest.mark.parametrize(
    ("plant", "violation"),
    [
        (Plant.LIE, "wrong bytes were read as right ones"),
        (Plant.LOSE, "are held, and exist"),
        (Plant.RESURRECT, "it was deleted or never stored"),
        (Plant.MISCOUNT, "the store counted"),
        (Plant.OVER_CAPACITY, "bytes were on the disk, the capacity is"),
        (Plant.UNLINKED, "bytes were on the disk, the capacity is"),
        (Plant.DESCRIPTOR, "descriptors are open"),
        (Plant.MAPPING, "files of a closed store are mapped"),
        (Plant.THREAD, "threads run"),
        (Plant.MEMORY, "memory grew from"),
        (Plant.HANG, "said nothing for"),
        (Plant.CRASH, "ended with -11"),
    ],
    ids=lambda value: value.value if isinstance(value, Plant) else "",
)
def test_the_load_notices_what_is_planted(
    folder: Path, tmp_path: Path, plant: Plant, violation: str
) -> None:
    plan = LoadPlan(
        processes=1,
        capacity=4 * MIB,
        operations=3000,
        silence_seconds=1 if plant is Plant.HANG else 60,
        plant=plant,
    )

    report = run_load(folder, tmp_path, plan)

    assert any(violation in found for found in report.violations), report
