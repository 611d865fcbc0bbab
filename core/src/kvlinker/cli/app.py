"""The commands together, as one program."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer

from kvlinker import __version__
from kvlinker.cli.demo_command import demonstrate
from kvlinker.cli.doctor_command import examine
from kvlinker.cli.explain_command import explain_description
from kvlinker.cli.plugins_command import show_plugins
from kvlinker.cli.screen import NOT_DONE, screen
from kvlinker.cli.store_commands import make_store_app

__all__ = ["make_app", "run"]

_SUMMARY = "Link the device KV pools of an LLM engine straight to an external KV store."
_EXIT_CODES = (
    "Exit codes: 0 all is well; 1 something is wrong, and the output says what; "
    "2 the command could not be run, and the last line says why."
)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit."""
    # What a command has to say of a plugin is in its output; the log would say it twice.
    logging.basicConfig(level=logging.CRITICAL)
    _prepare_streams()
    try:
        make_app()(arguments, prog_name="kvlinker")
    except OSError as error:  # help and version are written outside of any command
        sys.stderr.write(f"error: {error}\n")
        sys.exit(NOT_DONE)


def _prepare_streams() -> None:
    """Let the command write where the shell closed a stream, and any text: a name may be no valid Unicode."""
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def make_app() -> typer.Typer:
    """Return the program with all of its commands."""
    app = typer.Typer(
        help=_SUMMARY,
        epilog=_EXIT_CODES,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    app.command("plugins")(show_plugins)
    app.command("explain")(explain_description)
    app.command("doctor")(examine)
    app.add_typer(make_store_app(), name="store")
    app.command("demo")(demonstrate)
    return app


def _show_version(asked: bool) -> None:  # noqa: FBT001  # called by typer with the option's value
    if asked:
        screen().print(f"kvlinker {__version__}")
        raise typer.Exit


def _options(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    del version
