"""Lantern attention in SGLang: the description of its pool, and the layout of its pages."""

from __future__ import annotations

from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.hookspecs import PluginInfo, StrategyMatch, hookimpl
from kvlinker.pools import DevicePoolGroup
from lantern_kv.describe import describe_lanterns, is_lantern_pool
from lantern_kv.layout import FAMILY, check_lanterns, lay_out_lanterns

__all__ = [
    "build_direct_linker_pool_group",
    "describe_kv_cache",
    "describe_plugin",
    "match_kv_cache",
]


@hookimpl
def describe_plugin() -> PluginInfo:
    """See `kvlinker.hookspecs`."""
    return PluginInfo(api_version=1, summary="lantern attention in SGLang")


@hookimpl
def describe_kv_cache(
    engine: str, kv_cache: object, request: DescribeRequest
) -> KVCacheDescription | None:
    """Describe a lantern pool of an SGLang worker.

    Raises:
        KVLinkerError: the pool is one, and cannot be described; the text says why.
    """
    if engine != "sglang" or not is_lantern_pool(kv_cache):
        return None
    return describe_lanterns(kv_cache, request)


@hookimpl
def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
    """Claim lanterns whole.

    Raises:
        KVLinkerError: these are lanterns, and are not laid out here; the text says why.
    """
    if description.family != FAMILY:
        return None
    check_lanterns(description)
    return StrategyMatch(buffers=frozenset(description.buffers))


@hookimpl
def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
    """Lay lanterns out as pages of lamps, and wicks by slot.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    return lay_out_lanterns(description)
