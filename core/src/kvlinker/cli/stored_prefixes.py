"""What a stored prefix costs for each distance of its restorable boundaries, and how much of it a store holds."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from kvlinker.capacity import StoredPrefix
from kvlinker.cli.screen import Json, heading, plain_table
from kvlinker.quantities import amount

__all__ = ["prefixes_form", "show_prefixes"]


def prefixes_form(prefixes: Sequence[StoredPrefix], store_bytes: int | None) -> list[Json]:
    """Return the JSON form: one object for each distance; tokens are null where no store is given."""
    return [
        {
            "interval_pages": prefix.interval_pages,
            "interval_tokens": prefix.interval_tokens,
            "page_bytes": prefix.page_bytes,
            "boundary_bytes": prefix.boundary_bytes,
            "bytes_per_token": prefix.bytes_per_token,
            "tokens": None if store_bytes is None else prefix.tokens_in(store_bytes),
        }
        for prefix in prefixes
    ]


def show_prefixes(
    console: Console, prefixes: Sequence[StoredPrefix], store_bytes: int | None
) -> None:
    """Show the distances; one sentence where boundaries cost nothing, and nothing where no store is given then."""
    if not any(prefix.boundary_bytes for prefix in prefixes):
        if store_bytes is not None:
            tokens = prefixes[0].tokens_in(store_bytes)
            console.print()
            console.print(
                f"at most {tokens:,} tokens in {amount(store_bytes)}, before headers and index; "
                f"every page is a boundary"
            )
        return
    held = "" if store_bytes is None else f"tokens in {amount(store_bytes)}"
    numbers = ("pages", "tokens", "bytes", "B/token", *([held] if held else []))
    heading(console, "A boundary every so many pages")
    table = plain_table(*numbers, numbers=numbers)
    for prefix in prefixes:
        table.add_row(
            f"{prefix.interval_pages}",
            f"{prefix.interval_tokens:,}",
            f"{prefix.interval_bytes:,}",
            f"{prefix.bytes_per_token:,.1f}",
            *([] if store_bytes is None else [f"{prefix.tokens_in(store_bytes):,}"]),
        )
    console.print(table)
    console.print("a prompt computes at most the tokens behind its last boundary anew")
    if held:
        console.print("tokens are at most so many, before a store's headers and index")
