"""A process that writes, replaces and deletes objects until it is killed; run by test_crashes.py.

Arguments: folder, capacity, seed, and how many lines of the store's code to run before it kills itself
(0: never). It prints `~ N` before it deletes group N, and after each answered call what the answer means:
`+ N` for group N stored, `- N` for group N deleted.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from file_shelf import Shelf, make_key

import kvlinker_file
from kvlinker_file import FileStore, FileStoreOptions

if TYPE_CHECKING:
    from _typeshed import TraceFunction

GROUP = 5
"""Objects that are written, and deleted, in one call."""
_SOURCE = str(Path(kvlinker_file.__file__).parent)


def group_keys(group: int) -> list[bytes]:
    """Return the keys of the objects that are written together."""
    return [make_key(group * GROUP + i) for i in range(GROUP)]


def shelves() -> list[Shelf]:
    """Return pools of three object sizes."""
    return [Shelf(row_bytes=size, pages=GROUP) for size in (1000, 5000, 20_000)]


def kill_after(lines: int) -> TraceFunction:
    """Return a trace function that kills the process at the n-th line of the store's code."""
    left = lines

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        nonlocal left
        if not frame.f_code.co_filename.startswith(_SOURCE):
            return None
        left -= event == "line"
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def say(line: str) -> None:
    """Tell the test at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Write until killed."""
    folder, capacity, seed, lines = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    choose = random.Random(seed)  # noqa: S311 - chooses calls, not secrets
    pools = shelves()
    if lines:
        sys.settrace(kill_after(lines))
    store = FileStore(FileStoreOptions(path=folder, capacity=capacity))
    say("open")
    for group in range(seed * 1000, seed * 1000 + 1000):
        shelf = pools[group % len(pools)]
        if all(status.is_stored for status in shelf.put(store, group_keys(group))):
            say(f"+ {group}")
        victim = choose.randrange(seed * 1000, group + 1)
        if choose.random() < 0.3:
            say(f"~ {victim}")
            store.delete(group_keys(victim))
            say(f"- {victim}")
        elif choose.random() < 0.5:
            pools[victim % len(pools)].get(store, group_keys(victim))


if __name__ == "__main__":
    main()
