"""The cache that a model with multi-head latent attention would have, from its configuration."""

from __future__ import annotations

from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.hookspecs import ModelConfig, ModelConfigRequest
from kvlinker.model_config import MadeUpPools
from kvlinker.pools import KV
from kvlinker_mla.formats import FAMILY, LATENT_VALUES, PACKED, VALUE_BYTES, row_bytes

__all__ = ["MODEL_TYPES", "PAGE_SIZE", "describe"]

MODEL_TYPES = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"})
"""Models whose every layer keeps one latent vector of each token, and nothing else."""
PAGE_SIZE = 64
"""Usual for engines that serve the family."""


def describe(config: ModelConfig, request: ModelConfigRequest) -> KVCacheDescription:
    """Return the cache of one of MODEL_TYPES.

    Raises:
        ContractError: the configuration lacks a size, or the request has an unknown fact.
        UnsupportedKVCacheError: the value format is not laid out here.
    """
    page_size = request.page_size or PAGE_SIZE
    layers = config.layers()
    values = config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim")
    known = (*VALUE_BYTES, PACKED)
    kv_format = request.format_of("kv_format", config.value_format(), known=known)
    size, made_up = row_bytes(kv_format, values), MadeUpPools()
    buffers = {
        role: made_up.buffers(count, row_bytes=size, rows_per_page=page_size)
        for role, count in (("latent", layers), ("draft_latent", request.draft_layers))
    }
    facts = request.over({"kv_format": kv_format})
    return KVCacheDescription(
        family=FAMILY,
        page_size=page_size,
        buffers={role: spans for role, spans in buffers.items() if spans},
        layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(layers)),
        logical_pools=(LogicalPool(name=KV, page_size=page_size),),
        facts=facts if values == LATENT_VALUES else {**facts, "latent_values": values},
    )
