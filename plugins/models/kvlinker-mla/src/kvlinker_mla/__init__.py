"""Multi-head latent attention (DeepSeek V2 and V3, Kimi K2): one compressed KV buffer per layer."""

from __future__ import annotations

from kvlinker.description import KVCacheDescription
from kvlinker.hookspecs import ModelConfig, ModelConfigRequest, PluginInfo, StrategyMatch, hookimpl
from kvlinker.layouts import (
    draft_count,
    integer_fact,
    pool_entry,
    pool_group,
    require_facts,
    require_paged_pools,
    require_roles,
    ride_along,
    role_spans,
    text_fact,
)
from kvlinker.pools import KV, DevicePoolGroup
from kvlinker_mla import planned
from kvlinker_mla.formats import FACTS, FAMILY, LATENT_VALUES, PACKED, VALUE_BYTES, row_bytes

__all__ = [
    "build_direct_linker_pool_group",
    "describe_model_config",
    "describe_plugin",
    "match_kv_cache",
]

LAYOUT = "mla/1"
"""Goes into every key: raise it when the bytes of a page object change."""


@hookimpl
def describe_plugin() -> PluginInfo:
    """See `kvlinker.hookspecs`."""
    return PluginInfo(api_version=1, summary="multi-head latent attention: one buffer per layer")


@hookimpl
def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
    """Claim an MLA cache, drafts included; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the family is this one, and the cache is not laid out here; the text says why.
    """
    if description.family != FAMILY:
        return None
    _check(description)
    return StrategyMatch(buffers=frozenset(description.buffers))


@hookimpl
def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
    """Lay an MLA cache out as `kv`; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    _check(description)
    target, drafts = (description.buffers.get(role, ()) for role in ("latent", "draft_latent"))
    entry = pool_entry(
        description,
        name="kv",
        indices_from_pool=KV,
        roles=("latent", "draft_latent") if drafts else ("latent",),
        components=[[*target, *drafts]],
        layer_mapping=ride_along({i: i for i in range(len(target))}, range(len(drafts))),
        rows_are_pages=False,
        value_format=text_fact(description, "kv_format"),
    )
    return pool_group(description, [entry], layout=LAYOUT)


@hookimpl
def describe_model_config(
    config: ModelConfig, request: ModelConfigRequest
) -> KVCacheDescription | None:
    """Describe the cache that a model would have; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the model has such a cache, and it is not laid out here; the text says why.
    """
    return planned.describe(config, request) if config.model_type in planned.MODEL_TYPES else None


def _check(description: KVCacheDescription) -> None:
    require_facts(description, known=FACTS)
    require_roles(description, required=("latent",), optional=("draft_latent",))
    require_paged_pools(description, KV)
    drafts = draft_count(description, "draft_latent")
    size = _row_bytes(description)
    role_spans(description, "latent", count=len(description.layers), row_bytes=size)
    role_spans(description, "draft_latent", count=drafts, per="draft layer", row_bytes=size)


def _row_bytes(description: KVCacheDescription) -> int:
    """Return the bytes of a slot in the stated format."""
    kv_format = text_fact(description, "kv_format", known=(*VALUE_BYTES, PACKED))
    return row_bytes(kv_format, _latent_values(description))


def _latent_values(description: KVCacheDescription) -> int:
    """Return the values of a slot: DeepSeek's, unless the description states another number."""
    if "latent_values" not in description.facts:
        return LATENT_VALUES
    return integer_fact(description, "latent_values")
