"""The store plugin `memory`: pages in the memory of one machine, which its processes share."""

from __future__ import annotations

from collections.abc import Mapping

from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.store import Store
from kvlinker_memory.options import MemoryStoreOptions
from kvlinker_memory.store import open_memory_store

__all__ = ["MemoryStoreOptions", "describe_plugin", "open_memory_store", "open_store"]


@hookimpl
def describe_plugin() -> PluginInfo:
    """See kvlinker.hookspecs."""
    return PluginInfo(api_version=1, summary="memory of one machine that its processes share")


@hookimpl
def open_store(config: Mapping[str, object]) -> Store:
    """See kvlinker.hookspecs; the options are those of MemoryStoreOptions."""
    return open_memory_store(MemoryStoreOptions.of_config(config))
