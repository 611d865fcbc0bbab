"""Kill -9 at random points: the store opens by itself, and everything that exists then reads back right."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from file_shelf import OpenStore, Shelf

from kvlinker.store import ReadStatus
from kvlinker_file import verify

Key = Callable[..., bytes]
WRITER = Path(__file__).parent / "crash_writer.py"
GROUP = 5
MIB = 1 << 20
ROOMY, TIGHT = 256 * MIB, 3 * MIB


def run_and_kill(folder: Path, capacity: int, seed: int) -> list[str]:
    """Run a writer, kill it at some point, and return the lines it had printed."""
    choose = random.Random(seed)  # noqa: S311 - chooses moments, not secrets
    lines = int(10 ** choose.uniform(1, 4.5)) if seed % 2 else 0
    command = [sys.executable, str(WRITER), str(folder), str(capacity), str(seed), str(lines)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        if not lines:
            writer.stdout.readline()
            time.sleep(choose.uniform(0, 0.1))
            writer.kill()
        output = writer.stdout.read()
    return output.splitlines()


def answers(lines: list[str]) -> list[tuple[str, int]]:
    """Return what the writer said: a sign, and the group that was stored, deleted or about to be deleted."""
    pairs = [line.split(" ") for line in lines if line[:1] in "+-~"]
    return [(sign, int(group)) for sign, group in pairs]


@pytest.mark.parametrize("capacity", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.soak)])
def test_t2_after_kill_9_every_object_that_exists_is_whole(
    open_store: OpenStore,
    make_shelf: type[Shelf],
    folder: Path,
    key: Key,
    disk_bytes: Callable[[], int],
    *,
    capacity: int,
    kills: int,
) -> None:
    pools = [make_shelf(row_bytes=size, pages=GROUP) for size in (1000, 5000, 20_000)]
    acknowledged: set[int] = set()
    for seed in range(1, kills + 1):
        for sign, number in answers(run_and_kill(folder, capacity, seed)):
            change = acknowledged.add if sign == "+" else acknowledged.discard
            change(number)

        assert disk_bytes() <= capacity
        store = open_store(capacity=capacity)
        assert disk_bytes() <= capacity
        assert store.stats().counters["index_lost"] == 0
        assert store.stats().counters["lost_at_open"] == 0
        for group in range(seed * 1000, seed * 1000 + 1000):
            keys = [key(group * GROUP + i) for i in range(GROUP)]
            present = store.exists(keys)
            if capacity == ROOMY:
                assert len(set(present)) == 1, "a batch is visible as a whole or not at all"
                assert present[0] or group not in acknowledged, "what was acknowledged stays"
            if any(present):
                statuses = pools[group % len(pools)].get(store, keys)
                assert [status is ReadStatus.OK for status in statuses] == list(present)
        store.close()
    report = verify(folder)
    assert report.is_clean
    assert report.objects > 0


def test_a_deleted_object_does_not_come_back_after_a_kill(
    open_store: OpenStore, folder: Path, key: Key
) -> None:
    last = {group: sign for sign, group in answers(run_and_kill(folder, ROOMY, 2))}

    store = open_store(capacity=ROOMY)

    deleted = [group for group, sign in last.items() if sign == "-"]
    assert deleted
    for group in deleted:
        keys = [key(group * GROUP + i) for i in range(GROUP)]
        assert store.exists(keys) == (False,) * GROUP
