"""`kvlinker demo`: an engine shows that a new process continues what another one stored."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from kvlinker.cli.screen import FOUND_A_PROBLEM, reporting_errors
from kvlinker.discovery import load_plugins
from kvlinker.errors import ContractError, PluginNotFoundError
from kvlinker.hookspecs import DemoRequest
from kvlinker.installed import PluginKind
from kvlinker.plugins import EnginePlugin
from kvlinker.registry import PluginRegistry

__all__ = ["demonstrate"]


@reporting_errors
def demonstrate(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Show one small model alone.")] = False,
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep what the demo stores in this new or empty folder.", metavar="DIR"),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Engine plugin that shows itself.", metavar="NAME")
    ] = None,
) -> None:
    """Store the KV of a text, restore it in a new process, and compare what both go on to write.

    Exit code 1 if anything differs.
    """
    plugin = _engine(load_plugins(), engine)
    if keep is None:
        with TemporaryDirectory(prefix="kvlinker-demo-") as folder:
            is_right = plugin.demo(DemoRequest(folder=Path(folder), quick=quick))
    else:
        is_right = plugin.demo(DemoRequest(folder=_empty_folder(keep), quick=quick))
    if not is_right:
        raise typer.Exit(FOUND_A_PROBLEM)


def _engine(registry: PluginRegistry, name: str | None) -> EnginePlugin:
    if name is not None:
        return registry.engine(name)
    found = [plugin for plugin in registry.engines() if plugin.has_demo]
    if not found:
        broken = [str(r) for r in registry.records if r.kind is PluginKind.ENGINE and r.reason]
        cause = f" ({', '.join(broken)}: see kvlinker plugins)" if broken else ""
        msg = (
            f"no engine plugin with a demo is installed{cause}; "
            f"try: pip install 'kvlinker-transformers[demo]'"
        )
        raise PluginNotFoundError(msg)
    if len(found) > 1:
        names = " or ".join(f"--engine {plugin.name}" for plugin in found)
        msg = f"several engines have a demo; choose one: {names}"
        raise ContractError(msg)
    return found[0]


def _empty_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        msg = f"{folder} is not empty; name a new folder for --keep"
        raise ContractError(msg)
    return folder.absolute()
