"""Processes that use a memory store: what they are told on stdin they do, and say so.

Arguments: folder, capacity in bytes, and bytes of an object. Commands, each a line: `write FIRST COUNT`,
`read FIRST COUNT`, `hold FIRST COUNT`, `die FIRST COUNT` in the middle of a write, `fill COUNT`, `close`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kvlinker.store import ObjectKey, ReadStatus
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker_memory import MemoryStoreOptions, open_memory_store

__all__ = ["KEYS", "STEP", "User", "bytes_in", "open_shelf"]

KEYS: Sequence[ObjectKey] = object_keys(1024)
STEP = 8
"""Objects of a write where there are many."""


class User:
    """Another process that has the store open."""

    def __init__(
        self, folder: Path, *, capacity: int, page_bytes: int, within: Sequence[str] = ()
    ) -> None:
        """Start it, by another command where one is given, and wait until it has opened the store."""
        command = [*within, sys.executable, __file__, str(folder), str(capacity), str(page_bytes)]
        self.process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._answer() == "open"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, *words: object) -> str:
        """Let it do something and return what became of it; empty where it died."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        """End it as the system does when memory is short."""
        self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        """Let it close the store and end."""
        assert self.tell("close") == "closed"
        self.process.communicate()


def open_shelf(folder: Path, *, capacity: int, page_bytes: int, keep: bool = False) -> Shelf:
    """Open a store and return the pool beside it."""
    options = MemoryStoreOptions(path=folder, capacity=capacity, keep=keep)
    return Shelf(open_memory_store(options), page_bytes=page_bytes)


def bytes_in(folder: Path) -> int:
    """Return the memory that all files of a folder take, which others may delete meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(place, name).stat().st_blocks * 512
    return total


def _die() -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    return True


def _fill(shelf: Shelf, count: int) -> str:
    """Write objects, some at a time, read them, and say how many were stored and how many of them are left.

    Whatever is read must have the right bytes, which the shelf sees to; others evict too.
    """
    stored: list[ObjectKey] = []
    for start in range(0, count, STEP):
        keys = KEYS[start : start + STEP]
        statuses = zip(keys, shelf.write(keys), strict=True)
        stored += [key for key, status in statuses if status.is_stored]
        assert set(shelf.read(keys)) <= {ReadStatus.OK, ReadStatus.MISS}
    left = sum(shelf.store.exists(stored))
    return f"{len(stored)} {left}"


def _obey(shelf: Shelf, command: str, numbers: Sequence[int]) -> str:
    first, count = (*numbers, 0, 0)[:2]
    keys = KEYS[first : first + count]
    commands: dict[str, Callable[[], object]] = {
        "write": lambda: {status.value for status in shelf.write(keys)},
        "read": lambda: {status.value for status in shelf.read(keys)},
        "hold": lambda: "held" if shelf.store.hold(keys, seconds=600).present else "",
        "die": lambda: shelf.write(keys, may_publish=_die),
        "fill": lambda: _fill(shelf, first),
    }
    answer = commands[command]()
    return " ".join(sorted(answer)) if isinstance(answer, set) else str(answer)


def main() -> None:
    """Open the store and do what the other end says."""
    folder, capacity, page_bytes = sys.argv[1:]
    shelf = open_shelf(Path(folder), capacity=int(capacity), page_bytes=int(page_bytes))
    _say("open")
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "close":
            break
        _say(_obey(shelf, command, list(map(int, numbers))))
    shelf.store.close()
    _say("closed")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
