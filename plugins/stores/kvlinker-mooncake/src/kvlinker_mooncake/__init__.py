"""The store plugin `mooncake`: pages as objects of a Mooncake Store, the memory of a cluster."""

from __future__ import annotations

from collections.abc import Mapping

from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.store import Store
from kvlinker_mooncake.options import MooncakeStoreOptions
from kvlinker_mooncake.store import MooncakeStore

__all__ = ["MooncakeStore", "MooncakeStoreOptions", "describe_plugin", "open_store"]


@hookimpl
def describe_plugin() -> PluginInfo:
    """See kvlinker.hookspecs."""
    return PluginInfo(api_version=1, summary="the memory of a cluster, through Mooncake Store")


@hookimpl
def open_store(config: Mapping[str, object]) -> Store:
    """See kvlinker.hookspecs; the options are those of MooncakeStoreOptions."""
    return MooncakeStore(MooncakeStoreOptions.of_config(config))
