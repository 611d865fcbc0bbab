"""The store plugin `file`: pages in slab files of one directory on a local disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.store import Store
from kvlinker.store_tools import StoreTools
from kvlinker_file.directory import has_marker
from kvlinker_file.offline import inspect, prune, verify
from kvlinker_file.options import Durability, FileStoreOptions
from kvlinker_file.store import FileStore
from kvlinker_file.tools import FileStoreTools

__all__ = [
    "Durability",
    "FileStore",
    "FileStoreOptions",
    "describe_plugin",
    "inspect",
    "open_store",
    "open_store_tools",
    "prune",
    "verify",
]


@hookimpl
def describe_plugin() -> PluginInfo:
    """See kvlinker.hookspecs."""
    return PluginInfo(api_version=1, summary="embedded store in one directory of a local disk")


@hookimpl
def open_store(config: Mapping[str, object]) -> Store:
    """See kvlinker.hookspecs; the options are those of FileStoreOptions."""
    return FileStore(FileStoreOptions.of_config(config))


@hookimpl
def open_store_tools(path: Path) -> StoreTools | None:
    """See kvlinker.hookspecs."""
    return FileStoreTools(path) if has_marker(path) else None
