"""What the commands share: where they write, how they end, and how numbers read."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import ParamSpec, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from kvlinker.errors import ContractError, KVLinkerError

__all__ = [
    "FOUND_A_PROBLEM",
    "NOT_DONE",
    "Json",
    "heading",
    "plain_table",
    "plugins_at_work",
    "print_json",
    "read_text",
    "reporting_errors",
    "screen",
]

FOUND_A_PROBLEM = 1
"""Exit code of a command that did its work and found something wrong."""
NOT_DONE = 2
"""Exit code of a command that could not do its work: a wrong argument, a missing file, a refusal."""

Json: TypeAlias = bool | int | float | str | list["Json"] | Mapping[str, "Json"] | None

_P = ParamSpec("_P")
_WIDTH = 100


def screen() -> Console:
    """Return a console on the current standard output; text is shown as it is, never as markup.

    It is as wide as the terminal, as COLUMNS says, or 100 columns where the output goes elsewhere.
    """
    columns = os.environ.get("COLUMNS", "")
    is_known = bool(columns.strip("0")) or (sys.stdout.isatty() and not columns)
    width = None if is_known else _WIDTH
    return Console(file=sys.stdout, width=width, markup=False, emoji=False, highlight=False)


def print_json(form: Json) -> None:
    """Write JSON to standard output, and nothing else."""
    sys.stdout.write(json.dumps(form, indent=2) + "\n")
    sys.stdout.flush()


def plain_table(*names: str, text: str = "", numbers: tuple[str, ...] = ()) -> Table:
    """Return an empty table in which only the column `text`, the last one, is wrapped.

    Args:
        names: of the columns, whose values are short.
        text: name of a column of sentences; none by default.
        numbers: columns that are aligned to the right.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    if text:
        table.add_column(text, overflow="fold")
    return table


def heading(console: Console, text: str) -> None:
    """Write a title with an empty line above it."""
    console.print()
    console.print(text, style="bold")


def reporting_errors(command: Callable[_P, None]) -> Callable[_P, None]:
    """Turn an error of kvlinker, or of the file system, into its text and an exit code; others are bugs."""

    @functools.wraps(command)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            raise
        except KVLinkerError as error:
            raise _refused(str(error)) from error
        except OSError as error:
            text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise _refused(text) from error

    return call


def _refused(text: str) -> typer.Exit:
    sys.stderr.write(f"error: {text}\n")
    return typer.Exit(NOT_DONE)


@contextmanager
def plugins_at_work() -> Iterator[None]:
    """Send what a plugin prints to standard error, so that standard output holds the command's own answer."""
    with redirect_stdout(sys.stderr):
        yield


def read_text(path: Path) -> str:
    """Return a text file's content.

    Raises:
        OSError: it cannot be read.
        ContractError: it is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        msg = f"{path} is no UTF-8 text: {error}"
        raise ContractError(msg) from error
