"""The store plugin `redis`: pages as values of a Redis server or cluster."""

from __future__ import annotations

from collections.abc import Mapping

from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.store import Store
from kvlinker_redis.options import RedisStoreOptions
from kvlinker_redis.store import RedisStore

__all__ = ["RedisStore", "RedisStoreOptions", "describe_plugin", "open_store"]


@hookimpl
def describe_plugin() -> PluginInfo:
    """See kvlinker.hookspecs."""
    return PluginInfo(api_version=1, summary="values of a Redis server or cluster")


@hookimpl
def open_store(config: Mapping[str, object]) -> Store:
    """See kvlinker.hookspecs; the options are those of RedisStoreOptions."""
    return RedisStore(RedisStoreOptions.of_config(config))
