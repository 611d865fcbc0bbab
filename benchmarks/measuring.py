"""Measures in turn and tells ratios: how many times faster ours is than a peer, or than a limit.

What is compared runs in the same process, round by round, with the same setting of the garbage collector.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

__all__ = [
    "Ratio",
    "Row",
    "Scale",
    "Times",
    "duration",
    "in_turn",
    "missing_peer",
    "run_script",
    "shown",
    "size",
    "timed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times faster ours is: the median of all rounds, and the lowest and the highest one."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Ratio:
        """Return the ratio of several rounds."""
        found = sorted(values)
        return cls(median=statistics.median(found), low=found[0], high=found[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    topic: str
    what: str
    """What of ours was measured."""
    against: str
    """The peer or the limit."""
    ratio: Ratio | None
    """None where the peer could not run."""
    figures: str
    """What the ratio was made of, or why there is none."""
    target: float | None = None
    why_missed: str = ""
    """What is known about a miss; shown only when the target is missed."""

    @property
    def is_met(self) -> bool | None:
        """Whether the median reaches the target; None without either."""
        if self.ratio is None or self.target is None:
            return None
        return self.ratio.median >= self.target

    def cells(self) -> tuple[str, ...]:
        """Return what, against, ratio, spread, target, met and figures as text."""
        met = {True: "yes", False: "**no**", None: ""}[self.is_met]
        target = "" if self.target is None else f"{self.target:g}"
        if self.ratio is None:
            return self.what, self.against, "not run", "", target, "", self.figures
        spread = f"{shown(self.ratio.low)} to {shown(self.ratio.high)}"
        return self.what, self.against, shown(self.ratio.median), spread, target, met, self.figures

    def dump(self) -> str:
        """Return the row as a line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, line: str) -> Row:
        """Return the row of a line of JSON."""
        fields = json.loads(line)
        ratio = fields.pop("ratio")
        return cls(ratio=None if ratio is None else Ratio(**ratio), **fields)


def shown(ratio: float) -> str:
    """Return a ratio with two or three digits that mean something."""
    for limit, digits in ((1, 2), (10, 1)):
        if ratio < limit:
            return f"{ratio:.{digits}f}"
    return f"{ratio:.0f}"


def missing_peer(topic: str, what: str, against: str, reason: str) -> Row:
    """Return the line of a peer that could not run."""
    return Row(topic=topic, what=what, against=against, ratio=None, figures=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    rounds: int
    is_quick: bool
    """Small sizes: enough to see that a script works, and no figures to keep."""

    def choose(self, full: int, quick: int) -> int:
        """Return one of two sizes."""
        return quick if self.is_quick else full


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of everything that was measured in turn, one a round."""

    seconds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """Return the median of one."""
        return statistics.median(self.seconds[name])

    def ratio(self, peer: str, ours: str) -> Ratio:
        """Return how many times faster ours was, round by round."""
        pairs = zip(self.seconds[peer], self.seconds[ours], strict=True)
        return Ratio.of(theirs / mine for theirs, mine in pairs)

    def figures(self, peer: str, ours: str) -> str:
        """Return the two medians in words, the peer's first."""
        return f"{duration(self.median(peer))} / {duration(self.median(ours))}"


def duration(seconds: float) -> str:
    """Return seconds in a unit that fits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def size(count: int) -> str:
    """Return bytes in a unit that fits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Return a function that runs and returns the seconds, the release of the result included."""

    def measure() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return measure


def in_turn(runs: Mapping[str, Callable[[], float]], *, rounds: int, warm_ups: int = 1) -> Times:
    """Run everything once a round and keep the seconds that it returns; every other round runs backwards.

    Args:
        runs: name to a function that does its work and returns the seconds that count.
        rounds: how many are kept.
        warm_ups: rounds before, which are not.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(warm_ups + rounds):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            gc.collect()
            found = runs[name]()
            if number >= warm_ups:
                seconds[name].append(found)
    return Times(seconds)


def run_script(description: str | None, measure: Callable[[Scale], Iterable[Row]]) -> None:
    """Be a script: measure, print each row, and write them where asked."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes, to try a script")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--rows", type=Path, default=None, help="file to add the rows to, as JSON")
    arguments = parser.parse_args()
    # Whoever ends a script ends the servers that it started: what runs at its end kills them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    rounds = arguments.rounds or (3 if arguments.quick else 5)
    for row in measure(Scale(rounds=rounds, is_quick=arguments.quick)):
        print("  ".join(cell for cell in chain([row.topic], row.cells()) if cell), flush=True)
        if arguments.rows is not None:
            # One by one: what was measured counts, whatever becomes of the rest.
            with arguments.rows.open("a", encoding="utf-8") as rows:
                rows.write(row.dump() + "\n")
