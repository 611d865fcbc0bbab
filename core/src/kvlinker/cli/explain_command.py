"""`kvlinker explain`: which strategy lays a described cache, or a model's, out, and what its pages cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvlinker.capacity import stored_prefixes
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
from kvlinker.cli.stored_prefixes import prefixes_form, show_prefixes
from kvlinker.description import Fact, KVCacheDescription
from kvlinker.description_json import description_from_json
from kvlinker.discovery import load_plugins
from kvlinker.errors import ContractError
from kvlinker.explanation import Explanation, PoolExplanation, explain
from kvlinker.installed import PluginKind
from kvlinker.model_caches import describe_model
from kvlinker.model_config import ModelConfigRequest, model_config_from_json
from kvlinker.quantities import amount, parse_bytes
from kvlinker.registry import PluginRegistry

__all__ = ["explain_description", "fact_values"]

_LENGTHS = {"32k": 32 << 10, "128k": 128 << 10, "1M": 1 << 20}
"""Prefix lengths in tokens whose totals are shown."""
_MAX_DIGITS = 100
"""Longest number that a fact may be; a longer one is text, and no known value."""
_SHOWN = 3
"""Spans that are neither stored nor restored, before the others are only counted."""


@reporting_errors
def explain_description(
    description: Annotated[
        Path | None,
        typer.Argument(
            metavar="DESCRIPTION.json",
            help="JSON form of a KV cache's description; see examples/descriptions.",
        ),
    ] = None,
    *,
    model: Annotated[
        Path | None,
        typer.Option(
            help="config.json of a model that no engine runs yet, instead of a description.",
            metavar="CONFIG.json",
        ),
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(help="With --model: tokens in a page.", metavar="TOKENS")
    ] = None,
    draft_layers: Annotated[
        int, typer.Option(help="With --model: draft (MTP) layers that keep KV.", metavar="COUNT")
    ] = 0,
    fact: Annotated[
        list[str] | None,
        typer.Option(
            help="With --model: a value format, such as kv_format=fp8_e4m3fn; may be repeated.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Say how many tokens a store holds, such as 2TiB.", metavar="BYTES"),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Ask this model plugin alone.", metavar="NAME")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show which strategy takes a KV cache, why the others do not, and what a page costs.

    Needs no torch, no engine and no memory. Exit code 1 if no strategy takes it.
    """
    store_bytes = None if store is None else parse_bytes(store)
    request = ModelConfigRequest(
        page_size=page_size, draft_layers=draft_layers, facts=fact_values(fact or ())
    )
    with plugins_at_work():
        registry = load_plugins(kinds=(PluginKind.MODEL,))
        described = _described(description, model, request, registry)
        explanation = explain(described, registry, strategy=strategy)
    prefixes = stored_prefixes(explanation, page_size=described.page_size)
    if as_json:
        stored = prefixes_form(prefixes if explanation.winner else (), store_bytes)
        print_json({**_form(described, explanation), "stored": stored})
    else:
        _show(described, explanation)
        if explanation.winner:
            show_prefixes(screen(), prefixes, store_bytes)
    if explanation.winner is None:
        raise typer.Exit(FOUND_A_PROBLEM)


def _described(
    description: Path | None,
    model: Path | None,
    request: ModelConfigRequest,
    registry: PluginRegistry,
) -> KVCacheDescription:
    """Return the cache that one of the files describes; both, or none, are refused."""
    if model is not None and description is None:
        return describe_model(model_config_from_json(read_text(model)), request, registry=registry)
    if description is None or model is not None:
        msg = "name one file: a description, or a model's config.json with --model"
        raise ContractError(msg)
    if request != ModelConfigRequest():
        msg = (
            "--page-size, --draft-layers and --fact need --model; a description states them itself"
        )
        raise ContractError(msg)
    return description_from_json(read_text(description))


def fact_values(facts: Sequence[str]) -> Mapping[str, Fact]:
    """Return the values of NAME=VALUE pairs; digits are a number, anything else is text.

    Raises:
        ContractError: one is no such pair.

    >>> dict(fact_values(["kv_format=bf16", "state_ring_rows=16"]))
    {'kv_format': 'bf16', 'state_ring_rows': 16}
    """
    values: dict[str, Fact] = {}
    for fact in facts:
        name, _, text = fact.partition("=")
        if not name or not text:
            msg = f"--fact takes NAME=VALUE, got {fact!r}"
            raise ContractError(msg)
        values[name] = int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else text
    return values


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
