"""A process that dies at any line of the store's code leaves a sound store to the others, and nothing of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from crash_writer import GROUP
from file_shelf import OpenStore, Shelf
from kill_points import OTHER_SIZE, base_keys, victim_keys

from kvlinker.store import ReadStatus
from kvlinker_file import FileStore, FileStoreOptions, verify
from kvlinker_file.opening import open_state
from kvlinker_file.table_layout import RowState, Word

SCRIPT = Path(__file__).with_name("kill_points.py")
OK, MISS = ReadStatus.OK, ReadStatus.MISS
ROOMY, TIGHT = 8 << 20, 5 << 19


@contextmanager
def killer(folder: Path, capacity: int, what: str) -> Iterator[Callable[[int], bool]]:
    """Give a function that lets a process die at a line of something; False where it has fewer lines."""
    command = [sys.executable, str(SCRIPT), str(folder), str(capacity), what]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:  # type: ignore[call-overload]  # two pipes

        def kill(line: int) -> bool:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            answer = process.stdout.readline().strip()
            assert answer in ("killed", "done"), answer
            return bool(answer == "killed")

        yield kill
        assert process.stdin is not None
        process.stdin.close()


def check_tables(folder: Path, capacity: int) -> None:
    """Fail if a row is not what the catalog says, or somebody who is gone has marks."""
    options = FileStoreOptions(path=folder, capacity=capacity)
    with closing(open_state(options)) as state, state.changing():
        rows, words = state.tables.rows, state.tables.words
        assert int(words[Word.SEATS]) == state.openers.living_mask()
        living = np.uint64(state.openers.living_mask())
        assert not (rows.pins & ~living).any()
        assert not (rows.holds & ~living).any()
        assert not (rows.state == RowState.TAKEN).any()
        named = {place for part in state.catalog.objects() for place, *_ in part}
        state.index.adopt_leaving()
        leaving = (
            state.index.leaving()
        )  # removed by one that died: forgotten with the next transaction
        assert named == set(state.places_of(np.concatenate([state.index.all_rows(), leaving])))
        for segment in state.space:
            states = rows.state[segment.rows]
            assert state.space.counted(segment, "used") == np.count_nonzero(states)
            assert state.space.counted(segment, "objects") == (states == RowState.LIVING).sum()
        assert len(state.index) == len(named) - len(leaving)


def check_contents(store: FileStore, number: int, *, size: int, whole: bool) -> None:
    """Fail if the killed process left anything but whole objects, or the others cannot go on."""
    keys = victim_keys(number)
    present = store.exists(keys)
    assert not whole or len(set(present)) == 1, "a batch is there as a whole or not at all"
    found = Shelf(row_bytes=size, pages=GROUP).get(store, keys)
    assert found == tuple(OK if there else MISS for there in present)
    base = store.exists(base_keys())
    assert Shelf(pages=GROUP).get(store, base_keys()) == tuple(OK if b else MISS for b in base)
    again = Shelf(pages=GROUP)
    assert all(status.is_stored for status in again.put(store, base_keys()))
    assert again.get(store, base_keys()) == (OK,) * GROUP


CASES = [
    ("open", ROOMY, 1024),
    ("write", ROOMY, 1024),
    ("write", TIGHT, 1024),
    ("write_other", ROOMY, OTHER_SIZE),
    ("write_other", TIGHT, OTHER_SIZE),
    ("delete", ROOMY, 1024),
    ("look", ROOMY, 1024),
    ("close", ROOMY, 1024),
]


@pytest.mark.parametrize(("what", "capacity", "size"), CASES)
@pytest.mark.parametrize("others", [True, False], ids=["beside others", "alone"])
@pytest.mark.parametrize("growth", [0.5, pytest.param(0.03, marks=pytest.mark.soak)])
def test_t2_a_process_killed_at_any_line_leaves_a_sound_store(
    open_store: OpenStore,
    folder: Path,
    disk_bytes: Callable[[], int],
    *,
    what: str,
    capacity: int,
    size: int,
    others: bool,
    growth: float,
) -> None:
    filler = Shelf(pages=32)
    with closing(open_store(capacity=capacity)) as store:
        filler.put(store, base_keys())
        if capacity == TIGHT:
            for first in range(100, 1000, 32):
                filler.put(
                    store,
                    [bytes([3]) * 12 + bytes(16) + i.to_bytes(4) for i in range(first, first + 32)],
                )
    beside = open_store(capacity=capacity) if others else None

    with killer(folder, capacity, what) as kill:
        line = 1
        while kill(line):
            store = beside or open_store(capacity=capacity)
            check_contents(store, line, size=size, whole=capacity == ROOMY)
            assert disk_bytes() <= capacity
            check_tables(folder, capacity)
            if not others:
                store.close()
            line += 1 + int(line * growth)
    assert line > 10, "it has lines to die at"
    if beside is not None:
        check_tables(folder, capacity)
        beside.close()
    assert verify(folder).is_clean
