"""A process of a load: opens the store, lets its users do everything, closes it, again and again; run by load_run.py.

It ends after the round in which it gets SIGTERM, and says after each what was done and what it has taken.
Each call, and what was not as it must be, it says at once.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parent))

from crash_writer import kill_after
from load_plants import Plant, Planter
from load_user import LoadUser

from kvlinker.errors import KVLinkerError
from kvlinker.testing.worker_lines import Round, resources_now
from kvlinker_file import FileStore, FileStoreOptions

_FEWEST_STEPS, _MOST_STEPS = 10, 60
"""Calls of each user between opening and closing."""
_AS_COUNTED = {"written": "written", "discarded": "discarded", "missed": "read miss"}
"""What the store counts, and what its users must have seen as often."""
_NEVER = ("corrupt", "disk_errors", "index_errors", "index_lost", "lost_at_open")


_stopping = threading.Event()


def say(line: str) -> None:
    """Tell the test, in one piece."""
    os.write(1, f"{line}\n".encode())


def report(violation: str) -> None:
    """Tell the test that something is not as it must be."""
    say(json.dumps(violation))


class Worker:
    """The process's users, and their rounds."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Make the users."""
        self._folder = Path(arguments.folder)
        self._options = FileStoreOptions(path=self._folder, capacity=arguments.capacity)
        self._plant = Plant(arguments.plant) if arguments.plant else None
        self._planter = Planter(self._plant, self._folder, arguments.capacity)
        self._users = [
            LoadUser(
                f"{arguments.seed}.{os.getpid()}.{number}",
                numbers=arguments.numbers,
                replaces=arguments.replaces,
                plant=self._plant,
                report=report,
            )
            for number in range(arguments.users)
        ]

    def run_round(self, number: int) -> None:
        """Open, do, close, and say what was done."""
        try:
            store = FileStore(self._options)
        except KVLinkerError as error:
            report(f"opening raised {type(error).__name__}: {error}")
            return
        self._use(store)
        counts = self._counts(store)
        try:
            store.close()
        except KVLinkerError as error:
            report(f"closing raised {type(error).__name__}: {error}")
        del store
        self._planter.do_wrong()
        gc.collect()
        resources = resources_now(self._folder)
        say(Round(number=number, counts=counts, resources=resources).line())

    def _use(self, store: FileStore) -> None:
        for user in self._users:
            user.begin(store)
        if len(self._users) == 1:
            _run(self._users[0])
        else:
            with ThreadPoolExecutor(len(self._users)) as threads:
                list(threads.map(_run, self._users))

    def _counts(self, store: FileStore) -> Counter[str]:
        """Return what was done, after a look whether the store counted the same."""
        counted = store.stats().counters
        seen = sum((user.counts for user in self._users), Counter[str]())
        if self._plant is Plant.MISCOUNT:
            seen["written"] += 1
        for name, answer in _AS_COUNTED.items():
            if counted[name] != seen[answer]:
                report(f"the store counted {counted[name]} {name}, its users {seen[answer]}")
        for name in _NEVER:
            if counted[name]:
                report(f"the store counted {counted[name]} {name}")
        seen.update({f"store {name}": number for name, number in counted.items()})
        return seen


def _run(user: LoadUser) -> None:
    """Make a round's calls, fewer once the process is to end."""
    for _ in range(user.some_steps(_FEWEST_STEPS, _MOST_STEPS)):
        if _stopping.is_set():
            break
        user.step()
        say("1")
    user.end()


def _stop(number: int, frame: FrameType | None) -> None:
    del number, frame
    _stopping.set()


def parse_arguments() -> argparse.Namespace:
    """Return what the process was told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--capacity", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--users", type=int, default=1, help="threads")
    parser.add_argument("--numbers", type=int, default=120, help="objects of each kind and family")
    parser.add_argument("--replaces", action="store_true", help="write keys as other kinds too")
    parser.add_argument("--die-after", type=int, default=0, help="lines of the store's code")
    parser.add_argument("--plant", default="", help="what to do wrong")
    return parser.parse_args()


def main() -> None:
    """Run rounds until told to stop."""
    faulthandler.register(signal.SIGUSR1)
    faulthandler.enable()
    signal.signal(signal.SIGTERM, _stop)
    arguments = parse_arguments()
    if arguments.die_after:
        die = kill_after(arguments.die_after)
        threading.settrace(die)
        sys.settrace(die)
    worker = Worker(arguments)
    number = 0
    while not _stopping.is_set():
        worker.run_round(number)
        number += 1


if __name__ == "__main__":
    main()
