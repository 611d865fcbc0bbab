"""Multi-head latent attention (DeepSeek V2 and V3, Kimi K2): one compressed KV buffer per layer."""

from __future__ import annotations

from collections.abc import Mapping

from kvlinker.description import KVCacheDescription
from kvlinker.errors import ContractError
from kvlinker.hookspecs import PluginInfo, StrategyMatch, hookimpl
from kvlinker.layouts import (
    draft_count,
    integer_fact,
    pool_entry,
    pool_group,
    require_paged_pools,
    require_roles,
    ride_along,
    role_spans,
    text_fact,
)
from kvlinker.pools import KV, DevicePoolGroup

__all__ = ["build_direct_linker_pool_group", "describe_plugin", "match_kv_cache"]

FAMILY = "mla"
LAYOUT = "mla/1"
"""Goes into every key: raise it when the bytes of a page object change."""

LATENT_VALUES = 512 + 64
"""Values of a slot, latent and rope (config.json of DeepSeek V3: kv_lora_rank, qk_rope_head_dim)."""
VALUE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3fn": 1}
PACKED = "fp8_packed_656"
PACKED_ROW_BYTES = 512 + 4 * 4 + 64 * 2
"""512 e4m3 values, 4 fp32 scales, 64 rope values in bf16: the format has one size."""


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


def _check(description: KVCacheDescription) -> None:
    require_roles(description, required=("latent",), optional=("draft_latent",))
    require_paged_pools(description, KV)
    drafts = draft_count(description, "draft_latent")
    row_bytes = _row_bytes(description)
    role_spans(description, "latent", count=len(description.layers), row_bytes=row_bytes)
    role_spans(description, "draft_latent", count=drafts, per="draft layer", row_bytes=row_bytes)


def _row_bytes(description: KVCacheDescription) -> int:
    """Return the bytes of a slot in the stated format."""
    kv_format = text_fact(description, "kv_format", known=(*VALUE_BYTES, PACKED))
    values = _latent_values(description)
    if kv_format != PACKED:
        return values * VALUE_BYTES[kv_format]
    if values != LATENT_VALUES:
        msg = f"family {FAMILY!r}: {PACKED} holds {LATENT_VALUES} values, got latent_values {values}; use bf16"
        raise ContractError(msg)
    return PACKED_ROW_BYTES


def _latent_values(description: KVCacheDescription) -> int:
    """Return the values of a slot: DeepSeek's, unless the description states another number."""
    if "latent_values" not in description.facts:
        return LATENT_VALUES
    return integer_fact(description, "latent_values")
