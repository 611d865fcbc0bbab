"""Hybrids of attention with Mamba, linear attention or short convolutions: pages of tokens, and states of prefixes.

A state is stored where a prefix may end; that one alone is restored, together with all pages before it.
"""

from __future__ import annotations

from kvlinker.description import KVCacheDescription
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError
from kvlinker.hookspecs import ModelConfig, ModelConfigRequest, PluginInfo, StrategyMatch, hookimpl
from kvlinker.layouts import pool_group
from kvlinker.pools import DevicePoolGroup
from kvlinker_mamba import planned
from kvlinker_mamba.hybrids import checked_parts, omitted
from kvlinker_mamba.layers import FAMILY

__all__ = [
    "build_direct_linker_pool_group",
    "describe_model_config",
    "describe_plugin",
    "match_kv_cache",
]

LAYOUT = "mamba/1"
"""Goes into every key: raise it when the bytes of a page object change."""


@hookimpl
def describe_plugin() -> PluginInfo:
    """See `kvlinker.hookspecs`."""
    return PluginInfo(api_version=1, summary="Mamba and linear-attention hybrids: pages and states")


@hookimpl
def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
    """Claim a hybrid's cache, side states and drafts included; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the family is this one, and the cache is not laid out here; the text says why.
    """
    if description.family != FAMILY:
        return None
    _entries(description)
    return StrategyMatch(buffers=frozenset(description.buffers), omitted=omitted(description))


@hookimpl
def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
    """Lay a hybrid's cache out as its pages, `mamba`, and a pool for each side state; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    return pool_group(description, _entries(description), layout=LAYOUT)


@hookimpl
def describe_model_config(
    config: ModelConfig, request: ModelConfigRequest
) -> KVCacheDescription | None:
    """Describe the cache that a model would have; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the model has such a cache, and it is not laid out here; the text says why.
    """
    return planned.describe(config, request) if config.model_type in planned.MODELS else None


def _entries(description: KVCacheDescription) -> list[DevicePoolEntry]:
    """Return the entries of a cache; a pipeline stage has none for what its layers do not keep.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    entries = [part.entry(description) for part in checked_parts(description)]
    found = [entry for entry in entries if entry is not None]
    if not found:
        msg = f"family {FAMILY!r}: no layer keeps anything; run the engine without a linker on such a stage"
        raise ContractError(msg)
    return found
