"""`kvlinker explain`: which strategy lays a described cache out, and what its pages cost."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvlinker.cli.quantities import amount
from kvlinker.cli.screen import (
    FOUND_A_PROBLEM,
    Json,
    heading,
    plain_table,
    plugins_at_work,
    print_json,
    read_text,
    reporting_errors,
    screen,
)
from kvlinker.description import KVCacheDescription
from kvlinker.description_json import description_from_json
from kvlinker.discovery import load_plugins
from kvlinker.explanation import Explanation, PoolExplanation, explain
from kvlinker.installed import PluginKind

__all__ = ["explain_description"]

_LENGTHS = {"32k": 32 << 10, "128k": 128 << 10, "1M": 1 << 20}
"""Prefix lengths in tokens whose totals are shown."""
_SHOWN = 3
"""Spans that are neither stored nor restored, before the others are only counted."""


@reporting_errors
def explain_description(
    description: Annotated[
        Path,
        typer.Argument(
            metavar="DESCRIPTION.json",
            help="JSON form of a KV cache's description; see examples/descriptions.",
        ),
    ],
    *,
    strategy: Annotated[
        str | None, typer.Option(help="Ask this model plugin alone.", metavar="NAME")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show which strategy takes a KV cache, why the others do not, and what a page costs.

    Needs no torch, no engine and no memory. Exit code 1 if no strategy takes it.
    """
    described = description_from_json(read_text(description))
    with plugins_at_work():
        registry = load_plugins(kinds=(PluginKind.MODEL,))
        explanation = explain(described, registry, strategy=strategy)
    if as_json:
        print_json(_form(described, explanation))
    else:
        _show(described, explanation)
    if explanation.winner is None:
        raise typer.Exit(FOUND_A_PROBLEM)


# ---- JSON -------------------------------------------------------------------------------------


def _form(described: KVCacheDescription, explanation: Explanation) -> dict[str, Json]:
    return {
        "family": described.family,
        "page_size": described.page_size,
        "strategy": explanation.winner,
        "problem": explanation.problem,
        "verdicts": [
            {
                "name": verdict.record.name,
                "distribution": verdict.record.distribution,
                "version": verdict.record.version,
                "outcome": verdict.outcome.value,
                "reason": verdict.reason,
            }
            for verdict in explanation.verdicts
        ],
        "pools": [_pool_form(pool) for pool in explanation.pools],
        "bytes_per_token": explanation.bytes_per_token,
        "bytes_per_boundary": explanation.bytes_per_boundary,
        "totals": [
            {"tokens": tokens, "restored_bytes": explanation.restored_bytes(tokens)}
            for tokens in _LENGTHS.values()
        ],
        "omitted": dict(explanation.omitted),
        "fingerprint": explanation.fingerprint,
    }


def _pool_form(pool: PoolExplanation) -> dict[str, Json]:
    return {
        "name": pool.name,
        "indices_from_pool": pool.indices_from_pool,
        "page_size": pool.page_size,
        "page_bytes": pool.page_bytes,
        "bytes_per_token": pool.bytes_per_token,
        "boundary_pages": pool.boundary_pages,
        "layers": pool.layers,
        "spans": pool.spans,
        "objects_per_page": pool.objects_per_page,
    }


# ---- text -------------------------------------------------------------------------------------


def _show(described: KVCacheDescription, explanation: Explanation) -> None:
    console = screen()
    start, end = described.layer_range
    console.print(
        f"family {described.family}, layers {start} to {end - 1}, pages of {described.page_size} tokens"
    )
    if explanation.winner is None:
        console.print("no strategy lays it out", style="bold red")
        _show_verdicts(console, explanation)
        heading(console, "Why there is no group")
        console.print(explanation.problem)
        return
    console.print(f"strategy {explanation.winner} lays it out", style="bold green")
    _show_verdicts(console, explanation)
    _show_pools(console, explanation)
    _show_totals(console, explanation)


def _show_verdicts(console: Console, explanation: Explanation) -> None:
    heading(console, "What each strategy said")
    table = plain_table("strategy", "distribution", "verdict", text="reason")
    for verdict in explanation.verdicts:
        record = verdict.record
        where, outcome = f"{record.distribution} {record.version}", verdict.outcome.value
        table.add_row(record.name, where, outcome, verdict.reason.removeprefix(outcome))
    console.print(table)


def _show_pools(console: Console, explanation: Explanation) -> None:
    numbers = ("layers", "B/page", "B/token")
    table = plain_table("pool", *numbers, text="needed", numbers=numbers)
    for pool in explanation.pools:
        table.add_row(
            pool.name,
            f"{pool.layers}",
            f"{pool.page_bytes:,}",
            f"{pool.bytes_per_token:,.1f}" if pool.grows else "",
            _when_needed(pool),
        )
    heading(console, "Pools")
    console.print(table)
    if explanation.omitted:
        heading(console, "Neither stored nor restored")
        for label, reason in islice(explanation.omitted.items(), _SHOWN):
            console.print(f"{label}: {reason}")
        if (more := len(explanation.omitted) - _SHOWN) > 0:
            console.print(f"and {more} more, which --json lists")


def _when_needed(pool: PoolExplanation) -> str:
    if pool.grows:
        pages = "every page"
    elif pool.holds_states:
        pages = "last state"
    else:
        pages = "last page" if pool.boundary_pages == 1 else f"last {pool.boundary_pages} pages"
    return f"{pages} of {pool.indices_from_pool}"


def _show_totals(console: Console, explanation: Explanation) -> None:
    heading(console, "Sizes")
    console.print(f"every token takes {explanation.bytes_per_token:,.1f} B")
    if explanation.bytes_per_boundary:
        console.print(
            f"every stored boundary takes {explanation.bytes_per_boundary:,} B more: "
            f"what its last pages alone need"
        )
    table = plain_table("tokens restored", "bytes", "", numbers=("tokens restored", "bytes"))
    for name, tokens in _LENGTHS.items():
        size = explanation.restored_bytes(tokens)
        table.add_row(name, f"{size:,}", amount(size))
    console.print(table)
