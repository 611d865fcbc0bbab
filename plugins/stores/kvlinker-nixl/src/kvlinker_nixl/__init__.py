"""The store plugin `nixl`: pages in a file, in another process, or in object storage, moved by NIXL."""

from __future__ import annotations

from collections.abc import Mapping

from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.store import Store
from kvlinker_nixl.opening import open_nixl_store
from kvlinker_nixl.options import Backend, FileIo, NixlStoreOptions

__all__ = [
    "Backend",
    "FileIo",
    "NixlStoreOptions",
    "describe_plugin",
    "open_nixl_store",
    "open_store",
]


@hookimpl
def describe_plugin() -> PluginInfo:
    """See kvlinker.hookspecs."""
    return PluginInfo(api_version=1, summary="files, processes and object storage through NIXL")


@hookimpl
def open_store(config: Mapping[str, object]) -> Store:
    """See kvlinker.hookspecs; the options are those of NixlStoreOptions."""
    return open_nixl_store(NixlStoreOptions.of_config(config))
