"""`kvlinker plugins`: what is installed, and what becomes of it when it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from kvlinker import __version__
from kvlinker.cli.screen import (
    FOUND_A_PROBLEM,
    Json,
    plain_table,
    print_json,
    reporting_errors,
    screen,
)
from kvlinker.hookspecs import API_VERSION
from kvlinker.installed import PluginRecord, PluginStatus
from kvlinker.probing import probe_plugins

__all__ = ["is_problem", "plugin_form", "show_plugins"]

_STYLES = {
    PluginStatus.LOADED: "green",
    PluginStatus.DISABLED: "dim",
    PluginStatus.BROKEN: "red",
    PluginStatus.DUPLICATE: "red",
}


@reporting_errors
def show_plugins(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    deadline: Annotated[
        float, typer.Option(help="Seconds that one plugin may take to load.", metavar="SECONDS")
    ] = 30.0,
) -> None:
    """Show every installed plugin, each loaded in a process of its own.

    Exit code 1 if one is broken or claimed by two distributions.
    """
    records = probe_plugins(deadline)
    if as_json:
        print_json(
            {
                "kvlinker": __version__,
                "api_version": API_VERSION,
                "plugins": [plugin_form(record) for record in records],
            }
        )
    else:
        _show(records)
    if any(is_problem(record) for record in records):
        raise typer.Exit(FOUND_A_PROBLEM)


def is_problem(record: PluginRecord) -> bool:
    """Return whether the plugin cannot be used by its name."""
    return record.status in {PluginStatus.BROKEN, PluginStatus.DUPLICATE}


def plugin_form(record: PluginRecord) -> dict[str, Json]:
    """Return everything that is known of a plugin, for JSON."""
    return {
        "name": record.name,
        "kind": record.kind.value,
        "distribution": record.distribution,
        "version": record.version,
        "api_version": record.api_version,
        "status": record.status.value,
        "reason": record.reason,
        "summary": record.summary,
        "module": record.module,
        "location": record.location,
        "editable": record.editable,
        "shadowed": list(record.shadowed),
        "traceback": record.traceback,
    }


def _show(records: Sequence[PluginRecord]) -> None:
    console = screen()
    if not records:
        console.print("no plugin is installed; try: pip install kvlinker-mha kvlinker-file")
        return
    table = plain_table("plugin", "kind", "distribution", "version", "API", "status")
    for record in sorted(records, key=lambda record: record.kind.value):
        version = "" if record.api_version is None else str(record.api_version)
        status = Text(record.status.value, style=_STYLES.get(record.status, ""))
        table.add_row(
            record.name, record.kind.value, record.distribution, record.version, version, status
        )
    console.print(table)
    for record in records:
        if record.reason:
            console.print()
            console.print(f"{record} is {record.status.value}: {record.reason}")
