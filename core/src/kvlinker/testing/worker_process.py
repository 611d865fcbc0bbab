"""A process of a load or a soak as the test sees it: what it says, what it has, and how it is stopped and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from kvlinker.testing.worker_lines import CallError, Resources, parse_line

__all__ = ["WorkerProcess", "frozen"]

_WARM_UP = 2
"""Rounds after which a process has everything that it ever takes."""
_TREND_ROUNDS = 12
"""Rounds from which on a trend of the memory can be told from noise."""
_LATE_ROUNDS = 60
"""The same where a store lets go late: its pools of threads and of memory have their full size then."""
_GROWTH_KIB = 4096
_QUIET = frozenset("TtZXx")
"""States of threads that do nothing."""
_LAST_WORDS = 4000
_SECONDS = 30.0
"""How long the kernel may take to stop or to end a process."""


class WorkerProcess:
    """A worker that runs, or ran."""

    def __init__(
        self,
        command: Sequence[str],
        scratch: Path,
        *,
        number: int,
        dies: bool = False,
        lets_go_late: bool = False,
    ) -> None:
        """Start it.

        Args:
            command: program and arguments.
            scratch: where its output goes.
            number: of the process in this load.
            dies: it may kill itself at any time.
            lets_go_late: a closed store's threads and descriptors may end a little later than it; only a
                number of them that grows from round to round is a leak.
        """
        self.number = number
        self.counts: Counter[str] = Counter()
        """Answers of all its rounds."""
        self.calls = 0
        """Calls that it made, those of unfinished rounds included."""
        self._taken: list[Resources] = []
        """What it had after each round."""
        self._violations: list[str] = []
        self._heard_at = time.monotonic()
        self._stopped_until = 0.0
        """When it may go on; 0 for one that runs."""
        self._may_die = dies
        self._lets_go_late = lets_go_late
        self._errors: list[str] = []
        self._may_end = False
        self._out = scratch / f"{number}.out"
        self._err = scratch / f"{number}.err"
        self._read_bytes = 0
        threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                list(command),
                stdout=out,
                stderr=err,
                env={**os.environ, **threads},
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    # ---- what it says -------------------------------------------------------------------------

    def has_ended(self) -> bool:
        """Return whether it is gone, after a look at what it said, and at how it ended."""
        code = self._process.poll()
        for line in self._new_lines():
            self._hear(line)
        if code is None:
            return False
        # One that has just begun cannot take notice of SIGTERM yet.
        was_killed = code == -signal.SIGKILL and self._may_die
        was_asked = code in (0, -signal.SIGTERM) and self._may_end
        if not (was_killed or was_asked):
            self._accuse(f"ended with {code}:\n{self._last_words()}")
        return True

    def take_violations(self) -> list[str]:
        """Return what was not as it must be since the last call."""
        taken, self._violations = self._violations, []
        return taken

    def take_errors(self) -> list[str]:
        """Return the errors of the store as a whole since the last call."""
        taken, self._errors = self._errors, []
        return taken

    def _new_lines(self) -> list[str]:
        with self._out.open("rb") as out:
            out.seek(self._read_bytes)
            whole, newline, _ = out.read().rpartition(b"\n")
        self._read_bytes += len(whole) + len(newline)
        return whole.decode().splitlines()

    def _hear(self, line: str) -> None:
        self._heard_at = time.monotonic()
        match parse_line(line):
            case int(number):
                self.calls += number
            case str(violation):
                self._accuse(violation)
            case CallError() as error:
                self._errors.append(f"process {self.number} ({self.pid}): {error.text}")
            case said:
                self.counts.update(said.counts)
                self._taken.append(said.resources)
                for what in self._leaks():
                    self._accuse(f"after round {said.number}: {what}")

    def _accuse(self, violation: str) -> None:
        self._violations.append(f"process {self.number} ({self.pid}): {violation}")

    def _last_words(self) -> str:
        return self._err.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:]

    def _leaks(self) -> Iterator[str]:
        """Yield what it has after its last round and should not."""
        now = self._taken[-1]
        if now.mappings:
            yield f"{now.mappings} files of a closed store are mapped"
        if len(self._taken) > _WARM_UP and not self._lets_go_late:
            before = self._taken[_WARM_UP - 1]
            if now.descriptors > before.descriptors:
                yield f"{now.descriptors} descriptors are open, {before.descriptors} were"
            if now.threads > before.threads:
                yield f"{now.threads} threads run, {before.threads} did"
        if len(self._taken) >= (_LATE_ROUNDS if self._lets_go_late else _TREND_ROUNDS):
            yield from self._trends()

    def _trends(self) -> Iterator[str]:
        """Yield what has grown all the time."""
        taken = self._taken[_WARM_UP:]
        quarter = len(taken) // 4
        early, late = taken[:quarter], taken[-quarter:]
        rounds = f"in {len(self._taken)} rounds"
        grown = min(one.private_kib for one in late), max(one.private_kib for one in early)
        if grown[0] - grown[1] > _GROWTH_KIB:
            yield f"memory grew from {grown[1]} to {grown[0]} KiB {rounds}"
        if not self._lets_go_late:
            return
        for what in ("descriptors", "threads"):
            least = min(asdict(one)[what] for one in late)
            most = max(asdict(one)[what] for one in early)
            # A pool of threads grows to its size; what leaks grows with the rounds.
            if least - most > quarter:
                yield f"open {what} grew from {most} to {least} {rounds}"

    # ---- what is done to it -------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def stop(self, seconds: float) -> None:
        """Let it do nothing for a while."""
        self._stopped_until = time.monotonic() + seconds
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on, if its time has come."""
        now = time.monotonic()
        if now >= self._stopped_until:
            if self._stopped_until:
                self._stopped_until, self._heard_at = 0.0, now
            self.signal(signal.SIGCONT)

    def doom(self) -> None:
        """Kill it, and do not wait for its end."""
        self._may_die = True
        self.signal(signal.SIGKILL)

    def kill(self) -> None:
        """Kill it, whatever it does, and wait for its end."""
        self.doom()
        self._process.wait(_SECONDS)

    def ask_to_end(self) -> None:
        """Let it end after its round."""
        self._may_end = True
        self._stopped_until = 0.0
        self._heard_at = time.monotonic()
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    def kill_if_silent(self, seconds: float) -> None:
        """Kill it, and ask where it hangs, if it has said nothing for so long."""
        silence = time.monotonic() - self._heard_at
        if self._stopped_until or silence < seconds:
            return
        self.signal(signal.SIGUSR1)
        time.sleep(1)
        self._accuse(f"said nothing for {silence:.0f} s; it is at\n{self._last_words()}")
        self.kill()

    # ---- what it has --------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Return whether all of its threads are stopped."""
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                fields = (task / "stat").read_text(encoding="utf-8", errors="replace")
                if fields.rpartition(")")[2].split()[0] not in _QUIET:
                    return False
        return True

    def open_descriptors(self) -> int:
        """Return how many descriptors it has."""
        with suppress(FileNotFoundError, ProcessLookupError):
            return len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208 - counts, reads no file
        return 0


@contextmanager
def frozen(processes: Sequence[WorkerProcess]) -> Iterator[None]:
    """Stop all processes while something is looked at; those that were stopped before stay so."""
    for process in processes:
        process.signal(signal.SIGSTOP)
    limit = time.monotonic() + _SECONDS
    try:
        while not all(process.is_quiet() for process in processes):
            if time.monotonic() > limit:
                msg = "processes did not stop"
                raise TimeoutError(msg)
            time.sleep(0.0005)
        yield
    finally:
        for process in processes:
            process.resume()
