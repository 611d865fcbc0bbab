"""Forks processes that open a store, do one thing, and are killed at a given line of the store's code.

Run by test_kill_points.py. Arguments: folder, capacity, what to do. Each line of input is the number of the
line to die at, counted from the beginning of that one thing; the answer is `killed`, or `done` where the
thing has fewer lines. This process never opens the store, so that its children may.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from crash_writer import GROUP, kill_after
from file_shelf import Shelf, make_key

from kvlinker_file import FileStore, FileStoreOptions

VICTIM = 7
"""Namespace of what the killed process writes."""
OTHER_SIZE = 9000


def victim_keys(number: int) -> list[bytes]:
    """Return the keys that the process writes which dies at a line."""
    return [make_key(number * GROUP + i, VICTIM) for i in range(GROUP)]


def base_keys() -> list[bytes]:
    """Return the keys that were there before."""
    return [make_key(i) for i in range(GROUP)]


def write(store: FileStore, number: int) -> None:
    """Write objects of the size that is there."""
    Shelf(pages=GROUP).put(store, victim_keys(number))


def write_other(store: FileStore, number: int) -> None:
    """Write objects of another size, so that files are made, cut anew or deleted for them."""
    Shelf(row_bytes=OTHER_SIZE, pages=GROUP).put(store, victim_keys(number))


def delete(store: FileStore, number: int) -> None:
    """Delete what was there."""
    del number
    store.delete(base_keys())


def look(store: FileStore, number: int) -> None:
    """Hold, read and let go."""
    del number
    shelf = Shelf(pages=GROUP)
    hold = store.hold(base_keys(), seconds=600)
    with store.open_read(shelf.request(base_keys())) as session:
        shelf.read(session, base_keys())
    hold.release()


def close(store: FileStore, number: int) -> None:
    """Close."""
    del number
    store.close()


THINGS: dict[str, Callable[[FileStore, int], None]] = {
    "write": write,
    "write_other": write_other,
    "delete": delete,
    "look": look,
    "close": close,
    "open": close,
}


def run(folder: Path, capacity: int, what: str, number: int) -> None:
    """Do one thing in this process, which is a child, and die at a line of it."""
    if what == "open":
        sys.settrace(kill_after(number))
    store = FileStore(FileStoreOptions(path=folder, capacity=capacity))
    if what == "close":
        write(store, number)
    sys.settrace(kill_after(number))
    THINGS[what](store, number)
    sys.settrace(None)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Fork a process for each number."""
    folder, capacity, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                run(folder, capacity, what, int(line))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        ends = {-signal.SIGKILL: "killed", -signal.SIGTERM: "done"}
        print(ends.get(os.waitstatus_to_exitcode(status), "failed"), flush=True)  # noqa: T201  # the test that started this process reads it


if __name__ == "__main__":
    main()
