"""A load: processes that share one store and do everything with it, and some that are stopped and killed meanwhile."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from disk_watch import DiskWatch
from load_plants import Plant

from kvlinker.testing.worker_process import WorkerProcess, frozen

__all__ = ["LoadPlan", "LoadReport", "run_load"]

_WORKER = Path(__file__).parent / "load_worker.py"
_OLD = 2
"""Processes that are killed only together with all others, so that their memory shows a trend."""
_TRACED_EVERY = 3
"""One in so many of those that take a killed one's place kills itself at some line of the store's code."""
_PAUSE = 0.02, 0.1
"""Seconds between two looks."""
_STOP = 0.3, 3.0
"""Seconds for which a process is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How much, and how rough."""

    capacity: int
    processes: int = 8
    numbers: int = 120
    """Objects of each kind and family; all together take more than the capacity."""
    operations: int = 0
    """Calls after which it ends, whatever time they take."""
    seconds: float = 0
    """Time after which it ends, if no number of calls is given."""
    kills: int = 0
    """Times that one process is killed, or two, or all."""
    stops: int = 0
    """Times that one process does nothing for a while."""
    replaces: bool = True
    """Write some keys as objects of other kinds too."""
    silence_seconds: float = 60
    """Time after which a process that says nothing hangs."""
    seed: int = 1
    plant: Plant | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of a load."""

    violations: tuple[str, ...]
    calls: int
    """Calls that were made."""
    counts: Counter[str]
    """Answers of all finished rounds."""
    processes: int
    """All that ever ran."""
    kills: int
    """Processes that were killed, those not counted that killed themselves."""
    samples: int
    """Times that the disk was measured while nobody ran."""
    peak_bytes: int
    """The most that the files took on the disk."""
    peak_descriptors: int
    """The most that one process had."""


def run_load(folder: Path, scratch: Path, plan: LoadPlan) -> LoadReport:
    """Run a load to its end, or to the first violation.

    Args:
        folder: of the store.
        scratch: where the processes' output goes.
        plan: how much.
    """
    load = _Load(folder, scratch, plan)
    try:
        load.run()
    finally:
        load.end()
    return load.report()


class _Load:
    """A load while it runs."""

    def __init__(self, folder: Path, scratch: Path, plan: LoadPlan) -> None:
        self._folder = folder
        self._scratch = scratch
        self._plan = plan
        self._choose = random.Random(plan.seed)  # noqa: S311 - chooses moments, not secrets
        self._watch = DiskWatch(folder)
        self._started_at = time.monotonic()
        self._everybody: list[WorkerProcess] = []
        self._running: list[WorkerProcess] = []
        self._violations: list[str] = []
        self._kills = 0
        self._samples = self._peak_bytes = self._peak_descriptors = 0
        self._events = self._make_events()

    def _make_events(self) -> list[tuple[float, Callable[[], None]]]:
        """Return what happens at which part of the load, the last first."""
        acts = (self._kill_one, self._kill_one, self._kill_all, self._kill_one, self._kill_two)
        events: list[tuple[float, Callable[[], None]]] = []
        for i in range(self._plan.kills):
            act = acts[i % len(acts)]
            latest = 0.5 if act == self._kill_all else 0.95  # so that some processes grow old
            events.append((self._choose.uniform(0.05, latest), act))
        stops = [self._choose.uniform(0.05, 0.95) for _ in range(self._plan.stops)]
        events.extend((moment, self._stop_one) for moment in stops)
        return sorted(events, key=lambda event: -event[0])

    # ---- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until the plan is done or something is not as it must be."""
        for _ in range(self._plan.processes):
            self._start(traced=False)
        while (self._events or self._progress() < 1) and not self._violations:
            time.sleep(self._choose.uniform(*_PAUSE))
            self._listen()
            while len(self._running) < self._plan.processes:
                self._start(traced=len(self._everybody) % _TRACED_EVERY == 0)
            if self._events and self._events[-1][0] <= self._progress():
                self._events.pop()[1]()
            self._sample()
        for process in self._running:
            process.ask_to_end()
        while self._running:
            time.sleep(_PAUSE[0])
            self._listen()
            self._sample()

    def end(self) -> None:
        """Leave no process behind."""
        for process in self._running:
            process.kill()
        self._watch.close()

    def report(self) -> LoadReport:
        """Return what became of it."""
        return LoadReport(
            violations=tuple(self._violations),
            calls=self._calls(),
            counts=self._counts(),
            processes=len(self._everybody),
            kills=self._kills,
            samples=self._samples,
            peak_bytes=self._peak_bytes,
            peak_descriptors=self._peak_descriptors,
        )

    def _progress(self) -> float:
        if not self._plan.operations:
            return (time.monotonic() - self._started_at) / self._plan.seconds
        return self._calls() / self._plan.operations

    def _calls(self) -> int:
        return sum(process.calls for process in self._everybody)

    def _counts(self) -> Counter[str]:
        return sum((process.counts for process in self._everybody), Counter[str]())

    def _start(self, *, traced: bool) -> None:
        number = len(self._everybody)
        lines = int(10 ** self._choose.uniform(2, 4.3)) if traced else 0
        arguments = [
            str(self._folder),
            f"--capacity={self._plan.capacity}",
            f"--seed={self._plan.seed}",
            f"--users={1 + number % 2}",
            f"--numbers={self._plan.numbers}",
            f"--die-after={lines}",
            f"--plant={self._plan.plant.value if self._plan.plant else ''}",
            *(["--replaces"] if self._plan.replaces else []),
        ]
        command = [sys.executable, str(_WORKER), *arguments]
        process = WorkerProcess(command, self._scratch, number=number, dies=traced)
        self._everybody.append(process)
        self._running.append(process)

    def _listen(self) -> None:
        """Take what was said, and let go of what has ended."""
        for process in list(self._running):
            process.resume()
            if process.has_ended():
                self._running.remove(process)
            else:
                process.kill_if_silent(self._plan.silence_seconds)
            self._violations.extend(process.take_violations())

    def _sample(self) -> None:
        """Measure what all of them have, while none of them runs."""
        with frozen(self._running):
            size = self._watch.measure([process.pid for process in self._running])
            most = max((process.open_descriptors() for process in self._running), default=0)
        self._samples += 1
        self._peak_bytes = max(self._peak_bytes, size)
        self._peak_descriptors = max(self._peak_descriptors, most)
        if size > self._plan.capacity:
            msg = f"{size} bytes were on the disk, the capacity is {self._plan.capacity}"
            self._violations.append(msg)

    # ---- what happens to them -----------------------------------------------------------------

    def _kill(self, victims: Sequence[WorkerProcess]) -> None:
        for process in victims:
            process.doom()
        for process in victims:
            process.kill()
        self._kills += len(victims)

    def _kill_one(self) -> None:
        self._kill(self._some(1))

    def _kill_two(self) -> None:
        self._kill(self._some(2))

    def _kill_all(self) -> None:
        self._kill(self._running)

    def _stop_one(self) -> None:
        for process in self._some(1):
            process.stop(self._choose.uniform(*_STOP))

    def _some(self, count: int) -> list[WorkerProcess]:
        """Return some processes; not the oldest two, unless there are no others."""
        youngest = sorted(self._running, key=lambda process: process.number)[_OLD:]
        return self._choose.sample(youngest or self._running, min(count, len(youngest) or 1))
