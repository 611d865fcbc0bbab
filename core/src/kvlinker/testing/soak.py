"""A soak: processes that share one store and do everything with it, are killed and stopped, and lose their server.

Any store can be soaked whose objects several processes see: describe it as a `SoakTarget`.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvlinker.testing.soak_plants import Plant
from kvlinker.testing.soak_worker import WorkerSettings, owner_names
from kvlinker.testing.worker_process import WorkerProcess

__all__ = ["Outage", "SoakPlan", "SoakReport", "SoakTarget", "run_soak"]

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from kvlinker.testing.soak_worker import run_worker
run_worker(sys.argv[2])
"""
_OLD = 1
"""Processes that are killed only together with all others, so that their memory shows a trend."""
_PAUSE = 0.02, 0.1
"""Seconds between two looks."""
_STOP = 0.3, 2.0
"""Seconds for which a process is stopped."""
_PATIENCE_SECONDS = 60.0
"""How much longer a soak goes on for answers that nobody has had yet: a busy machine makes few calls."""
_END_SECONDS = 120.0
"""How long processes may take to end their rounds."""
_LATEST_FOR_ALL = 0.5
"""Part of the soak after which no more all of them are killed, so that some grow old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Something that happens to what the store depends on, and is over after a while."""

    name: str
    begin: Callable[[], None]
    end: Callable[[], None]
    seconds: tuple[float, float] = (0.1, 1.0)
    """Least and most time between both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakTarget:
    """A store as a soak needs it."""

    module: str
    """Name of the module that the plugin's entry point names."""
    config: Mapping[str, object]
    """The store's options, in values that JSON has; impatient ones, where there is a server."""
    outages: tuple[Outage, ...] = ()
    """What can happen to its server."""
    grace_seconds: float = 1.0
    """How long after an outage, or after it was stopped, a process may still be told of errors."""
    lets_go_late: bool = False
    """A closed store's threads and descriptors may end a little later than it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """How long, and how rough."""

    seconds: float
    """Least time until it ends."""
    calls: int = 0
    """Least number of calls until it ends, however long they take."""
    processes: int = 3
    users: int = 2
    """Threads of each process."""
    page_bytes: tuple[int, ...] = (640, 4096, 40 << 10)
    """Of each kind of object."""
    numbers: int = 40
    """Objects of each kind that everybody knows, and again as many that come and go."""
    kills: int = 0
    """Times that one process is killed, or two, or all."""
    stops: int = 0
    """Times that one process does nothing for a while."""
    outages: int = 0
    """Times that one of the target's outages happens, in turn."""
    silence_seconds: float = 60
    """Time after which a process that says nothing hangs."""
    seed: int = 1
    plant: Plant | None = None

    @classmethod
    def long(cls, seconds: float) -> SoakPlan:
        """Return the long form: something happens every few seconds, and never twice in the same order."""
        return cls(
            seconds=seconds,
            numbers=120,
            kills=int(seconds / 4),
            stops=int(seconds / 15),
            outages=int(seconds / 20),
            seed=random.SystemRandom().randrange(1 << 30),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """What became of a soak."""

    violations: tuple[str, ...]
    seconds: float
    """From the first start to the last end."""
    calls: int
    """Calls that were made."""
    counts: Counter[str]
    """Answers of all finished rounds, and as `error` those of `errors`, which no killed process takes along."""
    processes: int
    """All that ever ran."""
    kills: int
    outages: Counter[str]
    errors: int
    """Errors that processes were told of while a server was away, or just after it."""
    peak_descriptors: int
    """The most that one process had."""
    owners: tuple[str, ...]
    """Names of all users."""


def run_soak(
    target: SoakTarget, scratch: Path, plan: SoakPlan, *, answers: Collection[str] = ()
) -> SoakReport:
    """Run a soak to its end, or to the first violation.

    Args:
        target: the store, whose server runs.
        scratch: where the processes' output goes.
        plan: how much.
        answers: those that someone should have had: it goes on for them, for a minute at most.
    """
    soak = _Soak(target, scratch, plan, answers)
    try:
        soak.run()
    finally:
        soak.end()
    return soak.report()


@dataclass(slots=True, eq=False)
class _Figures:
    """What is counted while a soak runs."""

    violations: list[str] = field(default_factory=list)
    outages: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    errors: int = 0
    peak_descriptors: int = 0


class _Soak:
    """A soak while it runs."""

    def __init__(
        self, target: SoakTarget, scratch: Path, plan: SoakPlan, answers: Collection[str]
    ) -> None:
        self._target = target
        self._scratch = scratch
        self._plan = plan
        self._answers = answers
        self._choose = random.Random(plan.seed)  # noqa: S311 - chooses moments, not secrets
        self._figures = _Figures()
        self._everybody: list[WorkerProcess] = []
        self._running: dict[int, WorkerProcess] = {}
        """By the number of their place."""
        self._away: Outage | None = None
        self._away_until = 0.0
        self._excused_until = 0.0
        """Until when errors are what a server that was away, or a process that was stopped, brings."""
        self._started_at = time.monotonic()
        self._ended_at = self._started_at
        self._events = sorted(self._make_events(), key=lambda event: -event[0])
        """What happens at which part of the soak, the last first."""

    def _make_events(self) -> list[tuple[float, Callable[[], None]]]:
        acts = (self._kill_one, self._kill_one, self._kill_all, self._kill_one, self._kill_two)
        events: list[tuple[float, Callable[[], None]]] = []
        for i in range(self._plan.kills):
            act = acts[i % len(acts)]
            latest = _LATEST_FOR_ALL if act == self._kill_all else 0.95
            events.append((self._choose.uniform(0.05, latest), act))
        stops = [self._choose.uniform(0.05, 0.95) for _ in range(self._plan.stops)]
        events.extend((moment, self._stop_one) for moment in stops)
        return events + self._make_outages()

    def _make_outages(self) -> list[tuple[float, Callable[[], None]]]:
        """Return outages, one after the other."""
        events: list[tuple[float, Callable[[], None]]] = []
        count = self._plan.outages if self._target.outages else 0
        for i in range(count):
            outage = self._target.outages[i % len(self._target.outages)]
            moment = (i + self._choose.uniform(0.2, 0.5)) / count
            events.append((moment, partial(self._begin_outage, outage)))
        return events

    # ---- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until the time is over or something is not as it must be."""
        while not self._is_over() and not self._figures.violations:
            for place in range(self._plan.processes):
                if place not in self._running:
                    self._start(place)
            time.sleep(self._choose.uniform(*_PAUSE))
            self._listen()
            if time.monotonic() >= self._away_until:
                self._end_outage()
            while self._running and self._events and self._events[-1][0] <= self._progress():
                self._events.pop()[1]()
        self._end_outage()
        for process in self._running.values():
            process.ask_to_end()
        limit = time.monotonic() + _END_SECONDS
        while self._running and time.monotonic() < limit:
            time.sleep(_PAUSE[0])
            self._listen()
        if self._running:
            msg = f"{len(self._running)} processes did not end within {_END_SECONDS} s"
            self._figures.violations.append(msg)

    def end(self) -> None:
        """Leave no process behind, and no server away."""
        self._end_outage()
        for process in self._running.values():
            process.kill()
        self._ended_at = time.monotonic()

    def report(self) -> SoakReport:
        """Return what became of it."""
        figures, plan = self._figures, self._plan
        owners = [
            name for place in range(plan.processes) for name in owner_names(place, plan.users)
        ]
        counts = self._counts()
        return SoakReport(
            violations=tuple(figures.violations),
            seconds=self._ended_at - self._started_at,
            calls=self._calls(),
            counts=counts,
            processes=len(self._everybody),
            kills=figures.kills,
            outages=figures.outages,
            errors=figures.errors,
            peak_descriptors=figures.peak_descriptors,
            owners=tuple(owners),
        )

    def _is_over(self) -> bool:
        if self._progress() < 1:
            return False
        latest = self._started_at + self._plan.seconds + _PATIENCE_SECONDS
        return time.monotonic() > latest or all(map(self._counts().__getitem__, self._answers))

    def _counts(self) -> Counter[str]:
        counts = sum((process.counts for process in self._everybody), Counter[str]())
        counts["error"] = self._figures.errors
        return counts

    def _progress(self) -> float:
        passed = (time.monotonic() - self._started_at) / self._plan.seconds
        return min(passed, self._calls() / self._plan.calls) if self._plan.calls else passed

    def _calls(self) -> int:
        return sum(process.calls for process in self._everybody)

    def _start(self, place: int) -> None:
        number = len(self._everybody)
        settings = WorkerSettings(
            module=self._target.module,
            config=self._target.config,
            number=place,
            seed=f"{self._plan.seed} {number}",
            users=self._plan.users,
            page_bytes=self._plan.page_bytes,
            numbers=self._plan.numbers,
            plant=self._plan.plant.value if self._plan.plant else "",
        )
        process = WorkerProcess(
            [sys.executable, "-c", _CHILD, json.dumps(sys.path), settings.text()],
            self._scratch,
            number=number,
            lets_go_late=self._target.lets_go_late,
        )
        self._everybody.append(process)
        self._running[place] = process

    def _listen(self) -> None:
        """Take what was said, and let go of what has ended."""
        figures = self._figures
        for place, process in list(self._running.items()):
            process.resume()
            figures.peak_descriptors = max(figures.peak_descriptors, process.open_descriptors())
            if process.has_ended():
                del self._running[place]
            else:
                process.kill_if_silent(self._plan.silence_seconds)
            figures.violations.extend(process.take_violations())
            self._hear_errors(process.take_errors())

    def _hear_errors(self, errors: Sequence[str]) -> None:
        is_excused = self._away is not None or time.monotonic() < self._excused_until
        self._figures.errors += len(errors)
        if not is_excused:
            says = "no server was away, and no process was stopped"
            self._figures.violations.extend(f"{error}; {says}" for error in errors)

    def _excuse(self, seconds: float = 0.0) -> None:
        until = time.monotonic() + seconds + self._target.grace_seconds
        self._excused_until = max(self._excused_until, until)

    # ---- what happens ---------------------------------------------------------------------------

    def _begin_outage(self, outage: Outage) -> None:
        self._end_outage()
        self._away = outage
        self._away_until = time.monotonic() + self._choose.uniform(*outage.seconds)
        self._figures.outages[outage.name] += 1
        outage.begin()

    def _end_outage(self) -> None:
        if self._away is not None:
            self._away.end()
            self._excuse()
            self._away = None

    def _kill(self, victims: Sequence[WorkerProcess]) -> None:
        for process in victims:
            process.doom()
        for process in victims:
            process.kill()
        self._figures.kills += len(victims)

    def _kill_one(self) -> None:
        self._kill(self._some(1))

    def _kill_two(self) -> None:
        self._kill(self._some(2))

    def _kill_all(self) -> None:
        self._kill(list(self._running.values()))

    def _stop_one(self) -> None:
        for process in self._some(1):
            seconds = self._choose.uniform(*_STOP)
            self._excuse(seconds)
            process.stop(seconds)

    def _some(self, count: int) -> list[WorkerProcess]:
        """Return some processes; not the oldest, unless there are no others."""
        everybody = sorted(self._running.values(), key=lambda process: process.number)
        chosen = everybody[_OLD:] or everybody
        return self._choose.sample(chosen, min(count, len(chosen)))
