"""Run every benchmark, each in a process of its own, and write one table of ratios into docs/performance.md."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from measuring import Row, duration, missing_peer

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
DOCUMENT = ROOT / "docs" / "performance.md"
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
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
SGLANG_BEGIN, SGLANG_END = "<!-- measured in SGLang: begin -->", "<!-- measured in SGLang: end -->"
HEADER = ("what", "against", "ratio", "lowest to highest", "target", "met", "figures")
SCRIPT_SECONDS = 300.0
"""How long a script may take: none that is sound needs as much, and no table waits for one that hangs."""
LATE_SECONDS, LATE_ROUNDS = 270.0, 3
"""What begins so late measures fewer rounds, so that it ends sooner."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a script."""

    script: str
    rows: tuple[Row, ...]
    problem: str = ""
    """Why it did not get to its end; what it measured before counts all the same."""


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
        told = errors.read()
    sys.stderr.write(told)
    last = told.strip().splitlines()[-1:] or [f"it ended with {code}"]
    return f"Error: {last[0]}" if code else ""


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
        yield _line(HEADER)
        yield _line("---" for _ in HEADER)
        yield from (_line(row.cells()) for row in found)
        yield ""
        for reason, missed in _misses(found).items():
            yield f"Missed {missed} times, at worst by a factor of {_worst(found, reason):.1f}. {reason}"
            yield ""


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
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    head = [
        f"`{command}` on {today}, in {duration(seconds)}: {machine()}.",
        *remarks,
        f"{sum(judged)} of {len(judged)} targets are met.",
        "",
    ]
    return "\n".join([*head, *tables(rows)])


def insert(document: str, measured: str, *, begin: str = BEGIN, end: str = END) -> str:
    """Return the document with the measured part between two lines replaced.

    Raises:
        ValueError: it has no such part.
    """
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        msg = f"{DOCUMENT.name} must have the lines {begin} and {end}"
        raise ValueError(msg)
    return f"{before}{begin}\n\n{measured}\n{end}{after}"


def main() -> None:
    """Run what was asked for; only a whole run at full size is written down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written down")
    parser.add_argument("--only", choices=SCRIPTS, default=None, help="one script; likewise")
    arguments = parser.parse_args()
    start = time.perf_counter()
    passed_on = ["--quick"] if arguments.quick else []
    scripts = [arguments.only] if arguments.only else SCRIPTS
    outcomes: list[Outcome] = []
    late: list[str] = []
    for script in scripts:
        options = passed_on
        if time.perf_counter() - start > LATE_SECONDS:
            options = [*passed_on, "--rounds", str(LATE_ROUNDS)]
            late.append(f"`{script}.py`")
        outcomes.append(run(FOLDER / f"{script}.py", options))
    rows = [row for outcome in outcomes for row in outcome.rows]
    remarks = [f"Of {LATE_ROUNDS} rounds, as time ran out: {', '.join(late)}."] if late else []
    measured = report(rows, time.perf_counter() - start, remarks=remarks)
    print(measured)
    if not arguments.quick and not arguments.only:
        DOCUMENT.write_text(insert(DOCUMENT.read_text(), measured))
    if failed := [
        f"{outcome.script}: {outcome.problem}" for outcome in outcomes if outcome.problem
    ]:
        sys.exit("\n".join(["not every script got to its end:", *failed]))


if __name__ == "__main__":
    main()
