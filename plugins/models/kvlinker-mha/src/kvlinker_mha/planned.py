"""The cache that a model with multi-head or grouped-query attention would have, from its configuration."""

from __future__ import annotations

from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.hookspecs import ModelConfig, ModelConfigRequest
from kvlinker.model_config import MadeUpPools
from kvlinker.pools import KV
from kvlinker_mha.formats import FAMILY, ROWS_ARE_PAGES, VALUE_BYTES, VALUES

__all__ = ["MODEL_TYPES", "PAGE_SIZE", "describe"]

MODEL_TYPES = frozenset(
    {
        "ernie4_5",
        "gemma",
        "glm",
        "glm4",
        "glm4_moe",
        "granite",
        "llama",
        "minimax_m2",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)
"""Models whose every layer keeps K and V of each token, and nothing else, unless they look through a window."""
PAGE_SIZE = 64
"""Most engines take any; larger pages are moved faster, smaller ones are shared more often."""


def describe(config: ModelConfig, request: ModelConfigRequest) -> KVCacheDescription:
    """Return the cache of one of MODEL_TYPES.

    Raises:
        ContractError: the configuration lacks a size, or the request has an unknown fact.
        UnsupportedKVCacheError: layers look through a window, or the request has another format.
    """
    _refuse_windows(config)
    page_size, layers = request.page_size or PAGE_SIZE, config.layers()
    kv_format = request.format_of("kv_format", config.value_format(), known=VALUE_BYTES)
    kv_layout = request.format_of("kv_layout", "token_major", known=ROWS_ARE_PAGES)
    slot_bytes = _kv_heads(config) * _head_dim(config) * VALUE_BYTES[kv_format]
    in_a_row = page_size if ROWS_ARE_PAGES[kv_layout] else 1
    made_up = MadeUpPools()
    buffers = {
        role: made_up.buffers(
            count, row_bytes=in_a_row * slot_bytes, rows_per_page=page_size // in_a_row
        )
        for count, prefix in ((layers, ""), (request.draft_layers, "draft_"))
        for role in (f"{prefix}{value}" for value in VALUES)
    }
    return KVCacheDescription(
        family=FAMILY,
        page_size=page_size,
        buffers={role: spans for role, spans in buffers.items() if spans},
        layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(layers)),
        logical_pools=(LogicalPool(name=KV, page_size=page_size),),
        facts=request.over({"kv_layout": kv_layout, "kv_format": kv_format, "kv_scaled": 0}),
    )


def _kv_heads(config: ModelConfig) -> int:
    return config.integer("num_key_value_heads", default=config.integer("num_attention_heads"))


def _head_dim(config: ModelConfig) -> int:
    """Return the values of a head: stated, or the hidden size divided among the heads."""
    if config.has("head_dim"):
        return config.integer("head_dim")
    return config.integer("hidden_size") // config.integer("num_attention_heads")


def _refuse_windows(config: ModelConfig) -> None:
    """Refuse models of which an engine keeps the last tokens alone in some layers."""
    layers = config.layers()
    kinds = set(config.names("layer_types", count=layers) or ())
    if others := sorted(kinds - {"full_attention"}):
        msg = (
            f"model type {config.model_type!r}: layers of {others} are not laid out here, "
            f"only full attention is"
        )
        raise UnsupportedKVCacheError(msg)
    if (
        kinds
        or not config.has("sliding_window")
        or not config.flag("use_sliding_window", default=True)
    ):
        return
    window = config.integer("sliding_window")
    if window < config.integer("max_position_embeddings", default=window + 1):
        msg = (
            f"model type {config.model_type!r}: its layers look back {window} tokens (sliding_window); "
            f"a cache of windows is not laid out here"
        )
        raise UnsupportedKVCacheError(msg)
