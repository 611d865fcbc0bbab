"""Memory in front of a folder, as a plugin that a child process can open."""

from __future__ import annotations

from collections.abc import Mapping

import folder_store

from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.store import Store
from kvlinker.stores.tiered import TieredStore
from kvlinker.testing import MemoryStore

__all__ = ["describe_plugin", "open_both", "open_store"]

NEAR_BYTES = 16 << 10


@hookimpl
def describe_plugin() -> PluginInfo:
    return PluginInfo(api_version=1, summary="memory in front of a folder")


def open_both(config: Mapping[str, object]) -> tuple[MemoryStore, folder_store.FolderStore]:
    """Return the near store and the far one."""
    far = folder_store.open_store(config)
    assert isinstance(far, folder_store.FolderStore)
    return MemoryStore(capacity_bytes=NEAR_BYTES), far


@hookimpl
def open_store(config: Mapping[str, object]) -> Store:
    return TieredStore(*open_both(config))
