"""DeepSeek V4 (Flash, Pro): windows, compressed KV, indexer and state rings, each layer with the parts it has."""

from __future__ import annotations

from kvlinker.description import KVCacheDescription
from kvlinker.hookspecs import ModelConfig, ModelConfigRequest, PluginInfo, StrategyMatch, hookimpl
from kvlinker.layouts import draft_count
from kvlinker.pools import DevicePoolGroup
from kvlinker_deepseek_v4 import planned
from kvlinker_deepseek_v4.formats import FAMILY, V4Formats, read_formats
from kvlinker_deepseek_v4.mappings import (
    V4LayerMappings,
    resolve_layer_mappings,
    stage_layers,
)
from kvlinker_deepseek_v4.pools import (
    DRAFT_SWA,
    V4Pool,
    build_pool_group,
    check_buffers,
    v4_pools,
)

__all__ = [
    "V4Formats",
    "V4LayerMappings",
    "V4Pool",
    "build_direct_linker_pool_group",
    "build_pool_group",
    "describe_model_config",
    "describe_plugin",
    "match_kv_cache",
    "read_formats",
    "resolve_layer_mappings",
    "stage_layers",
    "v4_pools",
]


@hookimpl
def describe_plugin() -> PluginInfo:
    """See `kvlinker.hookspecs`."""
    return PluginInfo(api_version=1, summary="DeepSeek V4: window, compressed KV, indexer, states")


@hookimpl
def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
    """Claim a DeepSeek V4 cache, drafts included; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the family is this one, and the cache is not laid out here; the text says why.
    """
    if description.family != FAMILY:
        return None
    check_buffers(description, _mappings(description))
    return StrategyMatch(buffers=frozenset(description.buffers))


@hookimpl
def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
    """Lay a DeepSeek V4 cache out; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    return build_pool_group(description, _mappings(description))


@hookimpl
def describe_model_config(
    config: ModelConfig, request: ModelConfigRequest
) -> KVCacheDescription | None:
    """Describe the cache that a model would have; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the model has such a cache, and it is not laid out here; the text says why.
    """
    return planned.describe(config, request) if config.model_type in planned.MODEL_TYPES else None


def _mappings(description: KVCacheDescription) -> V4LayerMappings:
    drafts = draft_count(description, DRAFT_SWA)
    return resolve_layer_mappings(description.layers, draft_layers=drafts)
