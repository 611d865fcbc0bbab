"""A describer and a strategy for the pools of an engine that nobody here knows, in one distribution.

The engine is called `tiles`. It keeps a page of K and V of one layer in a tile, and scales beside the tiles.
"""

from __future__ import annotations

from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.hookspecs import PluginInfo, StrategyMatch, hookimpl
from kvlinker.pools import DevicePoolGroup
from kvlinker_example_engine.describe import describe_tiles, is_tile_pool
from kvlinker_example_engine.layout import FAMILY, check_tiles, lay_out_tiles

__all__ = [
    "build_direct_linker_pool_group",
    "describe_kv_cache",
    "describe_plugin",
    "match_kv_cache",
]

ENGINE = "tiles"
"""The name under which the engine asks for a description."""


@hookimpl
def describe_plugin() -> PluginInfo:
    """See `kvlinker.hookspecs`."""
    return PluginInfo(
        api_version=1, summary="an invented engine's tiles, as a template for new ones"
    )


# ---- the engine adapter: what is in memory, and no decisions ----------------------------------


@hookimpl
def describe_kv_cache(
    engine: str, kv_cache: object, request: DescribeRequest
) -> KVCacheDescription | None:
    """Describe a pool of this engine.

    Raises:
        KVLinkerError: the pool is this engine's, and its memory cannot be described; the text says why.
    """
    # Every adapter is asked about every cache, and exactly one may answer.
    if engine != ENGINE or not is_tile_pool(kv_cache):
        return None
    return describe_tiles(kv_cache, request)


# ---- the model plugin: decisions, from the description alone -----------------------------------


@hookimpl
def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
    """Claim the whole cache, or decline.

    Raises:
        KVLinkerError: the family is this one, and the cache is not laid out here; the text says why.
    """
    if description.family != FAMILY:
        return None
    check_tiles(description)
    return StrategyMatch(buffers=frozenset(description.buffers))


@hookimpl
def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
    """Lay the cache out as one pool whose rows are pages.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    return lay_out_tiles(description)
