"""The cache that a model with multi-head or grouped-query attention would have, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from kvlinker.description import Fact, IndexerKind, KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.hookspecs import ModelConfig, ModelConfigRequest
from kvlinker.model_config import MadeUpPools
from kvlinker.pools import KV
from kvlinker.spans import BufferSpan
from kvlinker_mha.formats import (
    FAMILY,
    INDEX_KEYS,
    INDEX_VALUES,
    ROWS_ARE_PAGES,
    VALUE_BYTES,
    VALUES,
)

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
_SPARSE = "sparse_attention_config"
"""Where a configuration says which layers select what they attend to (MiniMax M3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """The index keys of a model."""

    key_values: int
    """Values of a key."""
    has_keys: tuple[bool, ...]
    """For each layer."""
    has_values: tuple[bool, ...]
    """For each layer, whether its index attends to values beside the keys."""

    def facts(self, index_format: str) -> dict[str, Fact]:
        """Return what is stated of them."""
        return {
            "index_format": index_format,
            "index_values": self.key_values,
            "index_has_values": int(any(self.has_values)),
        }

    def buffers(self, made_up: MadeUpPools, row_bytes: int) -> dict[str, tuple[BufferSpan, ...]]:
        """Return a buffer for each layer, without rows where it keeps nothing."""
        kept = {INDEX_KEYS: self.has_keys, INDEX_VALUES: self.has_values}
        return {
            role: tuple(
                made_up.buffers(1, row_bytes=row_bytes)[0]
                if keeps
                else made_up.absent(row_bytes=row_bytes)
                for keeps in layers
            )
            for role, layers in kept.items()
            if any(layers)
        }


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
    made_up, index = MadeUpPools(), _index(config)
    facts: dict[str, Fact] = {"kv_layout": kv_layout, "kv_format": kv_format, "kv_scaled": 0}
    buffers = {
        role: made_up.buffers(
            count, row_bytes=in_a_row * slot_bytes, rows_per_page=page_size // in_a_row
        )
        for count, prefix in ((layers, ""), (request.draft_layers, "draft_"))
        for role in (f"{prefix}{value}" for value in VALUES)
    }
    if index is not None:
        index_format = request.format_of("index_format", config.value_format(), known=VALUE_BYTES)
        row_bytes = page_size * index.key_values * VALUE_BYTES[index_format]
        buffers |= index.buffers(made_up, row_bytes)
        facts |= index.facts(index_format)
    return KVCacheDescription(
        family=FAMILY,
        page_size=page_size,
        buffers={role: spans for role, spans in buffers.items() if spans},
        layers=tuple(_layer(i, index) for i in range(layers)),
        logical_pools=(LogicalPool(name=KV, page_size=page_size),),
        facts=request.over(facts),
    )


def _layer(number: int, index: _Index | None) -> LayerFacts:
    owns = index is not None and index.has_keys[number]
    indexer = IndexerKind.OWN if owns else IndexerKind.NONE
    return LayerFacts(layer=number, global_layer=number, indexer=indexer)


def _index(config: ModelConfig) -> _Index | None:
    """Return the index keys that a configuration tells of; None where it tells of none.

    Raises:
        ContractError: it does not say of each layer whether it has some.
    """
    sparse = config.section(_SPARSE)
    if sparse is None:
        return None
    layers = config.layers()
    keys = sparse.integers("sparse_attention_freq") or ()
    without_values = sparse.integers("sparse_disable_index_value") or (0,) * layers
    if len(keys) != layers or len(without_values) != layers:
        msg = (
            f"model type {config.model_type!r}: {_SPARSE} says of {len(keys)} layers whether they have an index and "
            f"of {len(without_values)} whether it attends to values, expected {layers} each"
        )
        raise ContractError(msg)
    pairs = tuple(zip(keys, without_values, strict=True))
    return _Index(
        key_values=sparse.integer("sparse_index_dim"),
        has_keys=tuple(key != 0 for key in keys),
        has_values=tuple(key != 0 and without == 0 for key, without in pairs),
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
