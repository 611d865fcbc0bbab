"""A memory store in front of a file store, as a plugin that a child process can open."""

from __future__ import annotations

from collections.abc import Mapping

from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.store import Store
from kvlinker.stores.tiered import TieredStore
from kvlinker_file import FileStore, FileStoreOptions
from kvlinker_memory import MemoryStoreOptions, open_memory_store

__all__ = ["describe_plugin", "open_store"]


@hookimpl
def describe_plugin() -> PluginInfo:
    return PluginInfo(api_version=1, summary="memory in front of files")


@hookimpl
def open_store(config: Mapping[str, object]) -> Store:
    near = MemoryStoreOptions(path=str(config["near"]), capacity="2MiB")
    far = FileStoreOptions.of_config({"path": config["far"], "capacity": "4MiB"})
    return TieredStore(open_memory_store(near), FileStore(far), names=("memory", "file"))
