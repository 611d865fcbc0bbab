"""Show: runs every case in two processes, and prints what a person wants to see."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvlinker.cli.screen import heading, plain_table, screen
from kvlinker.errors import UnsupportedOperationError
from kvlinker.hookspecs import DemoRequest
from kvlinker.quantities import amount
from kvlinker_transformers.demo.cases import CASES, DemoCase
from kvlinker_transformers.demo.comparison import differences
from kvlinker_transformers.demo.processes import DemoProcessError, run_process
from kvlinker_transformers.demo.records import Logits, Part, RunRecord

__all__ = ["Between", "show"]

Run = tuple[RunRecord, Logits]
Between = Callable[[DemoCase, Path], None]
"""Called between the two processes of a case, with the demo's folder."""

_QUICK_CASES = ("dsa",)
_MILLISECONDS = 1e3
_COUNTED = {1: "The model", 2: "Both models"}


def _nothing(_case: DemoCase, _folder: Path) -> None:
    """Leave what the first process stored as it is."""


def show(
    request: DemoRequest,
    *,
    cases: Sequence[DemoCase] | None = None,
    between: Between = _nothing,
) -> bool:
    """Show every case, and return whether all that could be shown was right.

    Args:
        request: folder and extent.
        cases: what to show instead of the usual models.
        between: what happens to the folder after the first process of a case and before the second.
    """
    console = screen()
    _introduce(console, request.folder)
    usual = [CASES[name] for name in (_QUICK_CASES if request.quick else CASES)]
    outcomes = [
        _show_case(console, case, request.folder, between)
        for case in (usual if cases is None else cases)
    ]
    shown = [outcome for outcome in outcomes if outcome is not None]
    if not shown:
        console.print("no model could be shown", style="bold red")
        return False
    _show_store(console, request.folder / "store")
    _conclude(console, shown)
    return all(shown)


def _introduce(console: Console, folder: Path) -> None:
    console.print(
        "Process 1 reads a text, stores its KV pages in a file store, and goes on writing. Then it ends."
    )
    console.print(
        "Process 2 starts with pools full of 0xFF, restores the pages to other places, and goes on writing."
    )
    console.print("Both must come to the same logits, bit for bit.")
    console.print(f"Folder: {folder}", style="dim")


def _show_case(console: Console, case: DemoCase, folder: Path, between: Between) -> bool | None:
    """Show one case; None where its model cannot be had."""
    heading(console, case.title)
    try:
        case.check()
    except UnsupportedOperationError as error:
        console.print(f"left out: {error}", style="yellow")
        return None
    try:
        read, continued = _run_both(console, case, folder, between)
    except DemoProcessError as error:
        console.print(str(error), style="red")
        return False
    wrong = differences(read, continued)
    _show_table(console, read, continued, wrong)
    _show_text(console, read[0], continued[0])
    return not wrong


def _run_both(console: Console, case: DemoCase, folder: Path, between: Between) -> tuple[Run, Run]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        _run_one(progress, case, Part.READ, folder)
        between(case, folder)
        _run_one(progress, case, Part.CONTINUE, folder)
    read, continued = (RunRecord.load(folder, case.name, part) for part in Part)
    return read, continued


def _run_one(progress: Progress, case: DemoCase, part: Part, folder: Path) -> None:
    name = f"process {list(Part).index(part) + 1}"
    task = progress.add_task(f"{name} starts", total=None)
    run_process(
        case,
        part,
        folder,
        lambda step: progress.update(
            task,
            description=f"{name} {step.step}",
            completed=step.done,
            total=case.new_tokens if step.done else None,
        ),
    )
    progress.update(task, description=f"{name} is done", completed=1, total=1)


# ---- what was found ---------------------------------------------------------------------------


def _show_table(console: Console, read: Run, continued: Run, wrong: Sequence[str]) -> None:
    (cold, logits), (warm, _) = read, continued
    table = plain_table("", "process 1", text="process 2")
    pages = warm.cached_tokens // warm.page_size
    table.add_row(
        "prompt",
        f"{cold.prompt_tokens:,} tokens read",
        f"{warm.cached_tokens:,} tokens restored, {warm.prompt_tokens - warm.cached_tokens:,} read",
    )
    table.add_row(
        "pages",
        f"{cold.prompt_tokens // cold.page_size} whole ones of {cold.page_size} tokens",
        f"{pages}, to other places",
    )
    table.add_row(
        "bytes",
        f"{amount(cold.moved_bytes)} stored",
        f"{amount(warm.moved_bytes)} restored, alone in {warm.restore_seconds * _MILLISECONDS:.0f} ms "
        f"({amount(warm.moved_bytes / warm.restore_seconds)}/s)",
    )
    table.add_row(
        "first token",
        f"after {cold.first_token_seconds:.2f} s",
        f"after {warm.first_token_seconds:.2f} s, "
        f"{cold.first_token_seconds / warm.first_token_seconds:.1f} times sooner",
    )
    equal = f"{logits.shape[0]} x {logits.shape[1]:,} logits equal, bit for bit"
    verdict = Text("; ".join(wrong), "bold red") if wrong else Text(equal, "bold green")
    table.add_row("comparison", "", verdict)
    console.print(table)
    sizes = ", ".join(f"{name} {size:,} B" for name, size in cold.pools.items())
    console.print(f"a page: {sizes}", style="dim")


def _show_text(console: Console, read: RunRecord, continued: RunRecord) -> None:
    if read.prompt_end:
        console.print("the text ends:", style="dim")
        console.print(f"  ... {read.prompt_end}")
    for number, record in enumerate((read, continued), 1):
        kind = "" if record.prompt_end else " (numbers of tokens)"
        console.print(f"process {number} goes on{kind}:", style="dim")
        console.print(f"  {record.text.strip()}")


def _show_store(console: Console, path: Path) -> None:
    heading(console, "What the store holds now")
    command = [sys.executable, "-m", "kvlinker", "store", "inspect", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    console.print((done.stdout or done.stderr).rstrip())


def _conclude(console: Console, shown: Sequence[bool]) -> None:
    console.print()
    if all(shown):
        models = _COUNTED.get(len(shown), f"All {len(shown)} models")
        console.print(f"{models} went on exactly as without a restore.", style="bold green")
    else:
        count = len(shown) - sum(shown)
        console.print(f"{count} of {len(shown)} models went on differently.", style="bold red")
