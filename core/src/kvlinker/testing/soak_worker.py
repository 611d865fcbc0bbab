"""A process of a soak: opens the store, lets its users do everything, closes it, again and again; run by `soak`.

It ends after the round in which it gets SIGTERM, and says after each what was done and what it has taken.
Each call, each error, and what was not as it must be, it says at once.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Protocol

from kvlinker.errors import KVLinkerError, StoreError
from kvlinker.store import Store
from kvlinker.testing.shelves import shelves_of
from kvlinker.testing.soak_keys import SoakKeys
from kvlinker.testing.soak_plants import Plant, plant_leak
from kvlinker.testing.soak_user import SoakUser
from kvlinker.testing.worker_lines import CallError, Round, resources_now

__all__ = ["WorkerSettings", "owner_names", "run_worker"]

_FEWEST_STEPS, _MOST_STEPS = 10, 60
"""Calls of each user between opening and closing."""
_PAUSE_SECONDS = 0.02
"""After an error: a server that is away is not asked without pause."""

_stopping = threading.Event()


class _Opens(Protocol):
    """A module with the hook of a store plugin."""

    def open_store(self, config: Mapping[str, object]) -> Store:
        """See `kvlinker.hookspecs`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a process of a soak is told."""

    module: str
    config: Mapping[str, object]
    """Of the store, in values that JSON has."""
    number: int
    """Of the place among those that run; who takes a killed one's place takes its number too."""
    seed: str
    users: int
    page_bytes: tuple[int, ...]
    """Of each kind of object."""
    numbers: int
    plant: str = ""

    def text(self) -> str:
        """Return them as one argument of a command."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> WorkerSettings:
        """Return what `text` says."""
        found = json.loads(text)
        return cls(**{**found, "page_bytes": tuple(found["page_bytes"])})


def owner_names(number: int, users: int) -> list[str]:
    """Return the names of the users of a process."""
    return [f"{number}.{user}" for user in range(users)]


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # in one piece


def _report(violation: str) -> None:
    _say(json.dumps(violation))


def _note_error(text: str) -> None:
    _say(CallError(text=text).line())
    time.sleep(_PAUSE_SECONDS)


class _Worker:
    """The process's users, and their rounds."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._plugin: _Opens = importlib.import_module(settings.module)
        self._plant = Plant(settings.plant) if settings.plant else None
        self._leaks: list[object] = []
        keys = SoakKeys(kinds=len(settings.page_bytes), numbers=settings.numbers)
        self._users = [
            SoakUser(
                name,
                keys,
                seed=f"{settings.seed} {name}",
                plant=self._plant,
                report=_report,
                note_error=_note_error,
            )
            for name in owner_names(settings.number, settings.users)
        ]

    def run_round(self, number: int) -> None:
        """Open, do, close, and say what was done."""
        try:
            store = self._plugin.open_store(self._settings.config)
        except StoreError as error:
            _note_error(f"opening raised {type(error).__name__}: {error}")
            return
        self._use(store)
        counts = sum((user.counts for user in self._users), Counter[str]())
        try:
            store.close()
        except KVLinkerError as error:
            _report(f"closing raised {type(error).__name__}: {error}")
        del store
        plant_leak(self._plant, self._leaks)
        gc.collect()
        _say(Round(number=number, counts=counts, resources=resources_now()).line())

    def _use(self, store: Store) -> None:
        sizes = self._settings.page_bytes
        shelves = shelves_of(store, sizes * len(self._users))
        for user in self._users:
            user.begin(store, [next(shelves) for _ in sizes])
        with ThreadPoolExecutor(len(self._users)) as threads:
            list(threads.map(_run, self._users))


def _run(user: SoakUser) -> None:
    """Make a round's calls, fewer once the process is to end."""
    for _ in range(user.some_steps(_FEWEST_STEPS, _MOST_STEPS)):
        if _stopping.is_set():
            break
        user.step()
        _say("1")
    user.end()


def _stop(number: int, frame: FrameType | None) -> None:
    del number, frame
    _stopping.set()


def run_worker(settings: str) -> None:
    """Run rounds until told to stop, as the child of a soak."""
    faulthandler.register(signal.SIGUSR1)
    faulthandler.enable()
    signal.signal(signal.SIGTERM, _stop)
    worker = _Worker(WorkerSettings.of_text(settings))
    number = 0
    while not _stopping.is_set():
        worker.run_round(number)
        number += 1
