"""Run benchmarks, each in a process of its own, and write their tables of ratios into docs/performance.md.

Each script has a part of the document, which is written as soon as it is done; all other parts stay as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from measuring import Row, duration, missing_peer, shown
from parts import has_part, replace, with_part

from kvlinker.moving import current_mover

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
DOCUMENT = ROOT / "docs" / "performance.md"
OTHER_DOCUMENTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("bench_mooncake", "bench_redis", "bench_s3"), "performance-servers.md"),
        **dict.fromkeys(("bench_tiers", "bench_codecs"), "performance-servers.md"),
        "bench_nixl": "performance-nixl.md",
    }
)
"""Documents beside it of scripts with very many rows."""
SCRIPTS = (
    "bench_plans",
    "bench_copies",
    "bench_peers",
    "bench_lookup",
    "bench_file_index",
    "bench_local",
    "bench_mooncake",
    "bench_redis",
    "bench_nixl",
    "bench_s3",
    "bench_tiers",
    "bench_codecs",
    "bench_startup",
)
SGLANG_BEGIN, SGLANG_END = "<!-- measured in SGLang: begin -->", "<!-- measured in SGLang: end -->"
HEADER = ("what", "against", "ratio", "lowest to highest", "target", "met", "figures")
SCRIPT_SECONDS = 480.0
"""How long a script may take: none that is sound needs as much, and no table waits for one that hangs."""
LIBRARY_LOG = re.compile(r"[IWE]\d{4} |WARNING: Logging before InitGoogleLogging")
"""Lines that Mooncake's library writes about each object, and behind the error that ended a script."""
MANY_ROWS = 12
"""A table as long as this begins with what its rows are like."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a script."""

    script: str
    rows: tuple[Row, ...]
    problem: str = ""
    """Why it did not get to its end; what it measured before counts all the same."""

    @property
    def has_figures(self) -> bool:
        """Whether anything was measured."""
        return any(row.ratio is not None for row in self.rows)


def run(script: Path, arguments: Sequence[str], *, seconds: float = SCRIPT_SECONDS) -> Outcome:
    """Run a script to its end, or to its time's end, and return what it measured; it leaves no process behind.

    Args:
        script: the file.
        arguments: passed on to it.
        seconds: after which it and all that it started are killed.
    """
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as found:
        command = [sys.executable, str(script), "--rows", found.name, *arguments]
        problem = _problem(command, seconds)
        rows = [Row.load(line) for line in Path(found.name).read_text().splitlines()]
    if problem:
        topic = rows[-1].topic if rows else script.stem
        rows.append(missing_peer(topic, "the rest", "", problem))
    return Outcome(script.stem, tuple(rows), problem)


def _problem(command: Sequence[str], seconds: float) -> str:
    """Run a command in a session of its own; return why it failed, or an empty text."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(command, start_new_session=True, stderr=errors)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"Error: not done within {duration(seconds)}"
        finally:
            # Servers that it started are in its session, whatever became of it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        told = errors.read().strip().splitlines()
    said = [line for line in told if not LIBRARY_LOG.match(line)]
    sys.stderr.write("".join(f"{line}\n" for line in said))
    return f"Error: {(said or [f'it ended with {code}'])[-1]}" if code else ""


def machine() -> str:
    """Return what the figures were measured on, in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory / GIB:.0f} GiB of memory, {platform.system()} "
        f"{platform.release().partition('-')[0]}, Python {platform.python_version()}, no GPU"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tables(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of all tables, a topic each, with what is known about missed targets behind them."""
    for topic, group in groupby(rows, key=lambda row: row.topic):
        found = list(group)
        yield f"### {topic}"
        yield ""
        if len(found) >= MANY_ROWS and (medians := _medians(found)):
            yield f"The middle one of all rows' ratios: {medians}."
            yield ""
        yield _line(HEADER)
        yield _line("---" for _ in HEADER)
        yield from (_line(row.cells()) for row in found)
        yield ""
        for reason, missed in _misses(found).items():
            yield f"Missed {missed} times, at worst by a factor of {_worst(found, reason):.1f}. {reason}"
            yield ""


def _medians(rows: Iterable[Row]) -> str:
    """Return the median ratio against each peer or limit that has more than one row, in words."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.ratio is not None:
            ratios.setdefault(row.against, []).append(row.ratio.median)
    return ", ".join(
        f"{shown(statistics.median(found))} against {against}"
        for against, found in ratios.items()
        if len(found) > 1
    )


def _misses(rows: Iterable[Row]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        if row.is_met is False and row.why_missed:
            counts[row.why_missed] = counts.get(row.why_missed, 0) + 1
    return counts


def _worst(rows: Iterable[Row], reason: str) -> float:
    return max(
        row.target / row.ratio.median
        for row in rows
        if row.is_met is False and row.why_missed == reason and row.target and row.ratio
    )


def report(
    rows: Sequence[Row], seconds: float, *, command: str = "make bench", remarks: Sequence[str] = ()
) -> str:
    """Return the measured part of the document."""
    judged = [row.is_met for row in rows if row.is_met is not None]
    now = dt.datetime.now(tz=dt.UTC)
    head = [
        f"`{command}` on {now:%Y-%m-%d} at {now:%H:%M} UTC, in {duration(seconds)}: {machine()}.",
        *remarks,
        *([f"{sum(judged)} of {len(judged)} targets are met."] if judged else []),
        "",
    ]
    return "\n".join([*head, *tables(rows)])


def measure(
    scripts: Sequence[Path], options: Sequence[str], document: Path | None
) -> Iterator[Outcome]:
    """Run one script after the other, and yield what became of each.

    Args:
        scripts: the files.
        options: passed on to all of them.
        document: it, or one beside it, gets the part of each script as soon as that is done; None to write nothing.
    """
    for script in scripts:
        about = [
            f"Load average of the machine before it: {os.getloadavg()[0]:.1f}.",
            f"Copies of host memory: {current_mover() or 'by Python, on one core'}.",
        ]
        start = time.perf_counter()
        outcome = run(script, options)
        seconds = time.perf_counter() - start
        measured = report(outcome.rows, seconds, command=script.name, remarks=about)
        print(measured, flush=True)
        if document is not None:
            write(document_of(script.stem, document), outcome, measured)
        yield outcome


def document_of(script: str, document: Path) -> Path:
    """Return the document that has a script's part: the main one, or another one in its folder."""
    return document.with_name(OTHER_DOCUMENTS.get(script, document.name))


def write(document: Path, outcome: Outcome, measured: str) -> None:
    """Put a script's part into the document; one without any figure takes the place of no other."""
    text = document.read_text(encoding="utf-8")
    if outcome.has_figures or not has_part(text, outcome.script):
        replace(document, with_part(text, outcome.script, measured, SCRIPTS))
    else:
        print(f"{outcome.script} has no figures: the part of its last run stays", file=sys.stderr)


def main() -> None:
    """Run what was asked for; only full sizes are written down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written down")
    parser.add_argument(
        "--only", choices=SCRIPTS, nargs="+", default=SCRIPTS, help="these scripts and no others"
    )
    arguments = parser.parse_args()
    # Without this, servers of the script that runs would outlive whoever ends this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    scripts = [FOLDER / f"{name}.py" for name in dict.fromkeys(arguments.only)]
    is_quick = arguments.quick
    outcomes = list(measure(scripts, ["--quick"] * is_quick, None if is_quick else DOCUMENT))
    if failed := [
        f"{outcome.script}: {outcome.problem}" for outcome in outcomes if outcome.problem
    ]:
        sys.exit("\n".join(["not every script got to its end:", *failed]))


if __name__ == "__main__":
    main()
