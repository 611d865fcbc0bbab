"""`kvlinker store`: looks after a store in a folder."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from kvlinker.cli.screen import (
    FOUND_A_PROBLEM,
    Json,
    heading,
    plain_table,
    plugins_at_work,
    print_json,
    reporting_errors,
    screen,
)
from kvlinker.discovery import load_plugins
from kvlinker.errors import ContractError, PluginNotFoundError
from kvlinker.installed import PluginKind
from kvlinker.plugins import StorePlugin
from kvlinker.quantities import amount, parse_bytes, parse_seconds
from kvlinker.registry import PluginRegistry
from kvlinker.store_tools import StoreContents, StoreTools

__all__ = ["make_store_app"]

_StorePath = Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the store.")]
_Plugin = Annotated[
    str | None,
    typer.Option("--plugin", metavar="NAME", help="Store plugin to ask; found by default."),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def make_store_app() -> typer.Typer:
    """Return the commands of `kvlinker store`."""
    app = typer.Typer(
        help="Look after a store in a folder, also while engines have it open where the store allows it.",
        no_args_is_help=True,
    )
    app.command("inspect")(inspect_store)
    app.command("verify")(verify_store)
    app.command("prune")(prune_store)
    return app


@reporting_errors
def inspect_store(path: _StorePath, *, plugin: _Plugin = None, as_json: _AsJson = False) -> None:
    """Show what a store holds, without reading its objects."""
    with plugins_at_work():
        contents = _tools(path, plugin).inspect()
    if as_json:
        print_json(_contents_form(contents))
    else:
        _show_contents(contents)


@reporting_errors
def verify_store(
    path: _StorePath,
    *,
    drop: Annotated[bool, typer.Option("--drop", help="Remove objects that are damaged.")] = False,
    plugin: _Plugin = None,
    as_json: _AsJson = False,
) -> None:
    """Read every object of a store and compare every checksum.

    Exit code 1 if one is damaged.
    """
    with plugins_at_work():
        found = _tools(path, plugin).verify(drop=drop)
    damaged = found.objects - found.intact
    if as_json:
        print_json(
            {
                "objects": found.objects,
                "intact": found.intact,
                "corrupt": found.corrupt,
                "foreign": found.foreign,
                "dropped": found.dropped,
                "payload_bytes": found.payload_bytes,
            }
        )
    else:
        console = screen()
        console.print(f"{found.objects:,} objects read, {amount(found.payload_bytes)}")
        if damaged:
            console.print(
                f"{damaged:,} damaged: {found.corrupt:,} with changed bytes, "
                f"{found.foreign:,} that are something else",
                style="bold red",
            )
            console.print(
                f"{found.dropped:,} removed"
                if drop
                else f"remove them: kvlinker store verify --drop {path}"
            )
        else:
            console.print("every one is what was written", style="bold green")
    if damaged:
        raise typer.Exit(FOUND_A_PROBLEM)


@reporting_errors
def prune_store(
    path: _StorePath,
    *,
    to: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Make the store this small, such as 10GiB."),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Remove what was not used for so long, such as 7d."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Remove one namespace, or what is old in it."),
    ] = None,
    plugin: _Plugin = None,
    as_json: _AsJson = False,
) -> None:
    """Remove objects from a store: the least recently used, the old, or those of one namespace."""
    if to is None and older_than is None and namespace is None:
        msg = "nothing to prune by; give --to, --older-than or --namespace"
        raise ContractError(msg)
    with plugins_at_work():
        pruned = _tools(path, plugin).prune(
            to_bytes=None if to is None else parse_bytes(to),
            older_than=None if older_than is None else parse_seconds(older_than),
            namespace=None if namespace is None else _parse_namespace(namespace),
        )
    if as_json:
        print_json(
            {
                "removed": pruned.removed,
                "objects": pruned.objects,
                "freed_bytes": pruned.freed_bytes,
                "disk_bytes": pruned.disk_bytes,
            }
        )
    else:
        screen().print(
            f"{pruned.removed:,} objects removed, {amount(pruned.freed_bytes)} given back; "
            f"{pruned.objects:,} objects left on {amount(pruned.disk_bytes)} of disk"
        )


# ---- which plugin -----------------------------------------------------------------------------


def _tools(path: Path, name: str | None) -> StoreTools:
    path = path.expanduser()
    if not path.is_dir():
        msg = f"{path} is no folder; name the folder of a store"
        raise ContractError(msg)
    registry = load_plugins(kinds=(PluginKind.STORE,))
    asked = [registry.store(name)] if name else [p for p in registry.stores() if p.has_tools]
    found = {plugin: tools for plugin in asked if (tools := plugin.tools(path.absolute()))}
    if len(found) > 1:
        names = " or ".join(f"--plugin {plugin.name}" for plugin in found)
        msg = f"several plugins know the store in {path}; choose one: {names}"
        raise ContractError(msg)
    if not found:
        raise _unknown_store(path, asked, registry)
    return next(iter(found.values()))


def _unknown_store(
    path: Path, asked: list[StorePlugin], registry: PluginRegistry
) -> PluginNotFoundError:
    names = ", ".join(str(plugin.record) for plugin in asked) or "none"
    stores = [record for record in registry.records if record.kind is PluginKind.STORE]
    broken = [str(record) for record in stores if record.reason]
    unusable = f"; not asked: {', '.join(broken)}, see kvlinker plugins" if broken else ""
    hint = (
        "install the plugin that made it, or name another folder; not every plugin has such tools"
    )
    msg = f"{path} holds no store that an installed plugin knows (asked: {names}{unusable}); {hint}"
    return PluginNotFoundError(msg)


def _parse_namespace(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        msg = f"--namespace takes hexadecimal digits as kvlinker store inspect shows them, got {text!r}"
        raise ContractError(msg) from error


# ---- contents ---------------------------------------------------------------------------------


def _contents_form(contents: StoreContents) -> dict[str, Json]:
    return {
        "path": str(contents.path),
        "capacity_bytes": contents.capacity_bytes,
        "disk_bytes": contents.disk_bytes,
        "objects": contents.objects,
        "payload_bytes": contents.payload_bytes,
        "namespaces": [
            {
                "namespace": space.namespace.hex(),
                "objects": space.objects,
                "payload_bytes": space.payload_bytes,
                "last_used": space.last_used,
            }
            for space in contents.namespaces
        ],
    }


def _show_contents(contents: StoreContents) -> None:
    console = screen()
    capacity = contents.capacity_bytes
    bound = "" if capacity is None else f" of {amount(capacity)}"
    console.print(f"{contents.path}")
    console.print(
        f"{contents.objects:,} objects, {amount(contents.payload_bytes)}; "
        f"{amount(contents.disk_bytes)}{bound} taken on disk"
    )
    if not contents.namespaces:
        return
    heading(console, "Namespaces")
    numbers = ("objects", "bytes")
    table = plain_table("namespace", *numbers, "last used", numbers=numbers)
    for space in contents.namespaces:
        used = datetime.fromtimestamp(space.last_used).astimezone()
        table.add_row(
            space.namespace.hex(),
            f"{space.objects:,}",
            amount(space.payload_bytes),
            used.isoformat(sep=" ", timespec="seconds"),
        )
    console.print(table)
