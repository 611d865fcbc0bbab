"""Run every benchmark, each in a process of its own, and write one table of ratios into docs/performance.md."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from measuring import Row, duration

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "performance.md"
SCRIPTS = (
    "bench_plans",
    "bench_copies",
    "bench_peers",
    "bench_lookup",
    "bench_file_index",
    "bench_redis",
    "bench_s3",
    "bench_startup",
)
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
SGLANG_BEGIN, SGLANG_END = "<!-- measured in SGLang: begin -->", "<!-- measured in SGLang: end -->"
HEADER = ("what", "against", "ratio", "lowest to highest", "target", "met", "figures")
GIB = 1 << 30


def rows_of(script: str, arguments: Sequence[str]) -> Iterator[Row]:
    """Run a script and yield its rows.

    Raises:
        CalledProcessError: it failed.
    """
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as found:
        path = Path(__file__).with_name(f"{script}.py")
        command = [sys.executable, str(path), "--rows", found.name, *arguments]
        subprocess.run(command, check=True)
        for line in Path(found.name).read_text().splitlines():
            yield Row.load(line)


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
    rows = [row for script in scripts for row in rows_of(script, passed_on)]
    measured = report(rows, time.perf_counter() - start)
    print(measured)
    if not arguments.quick and not arguments.only:
        DOCUMENT.write_text(insert(DOCUMENT.read_text(), measured))


if __name__ == "__main__":
    main()
