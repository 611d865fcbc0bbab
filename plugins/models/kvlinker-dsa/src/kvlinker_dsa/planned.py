"""The cache that a model with DeepSeek sparse attention would have, from its configuration."""

from __future__ import annotations

from kvlinker.description import IndexerKind, KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.errors import ContractError
from kvlinker.hookspecs import ModelConfig, ModelConfigRequest
from kvlinker.model_config import MadeUpPools
from kvlinker.pools import KV
from kvlinker_dsa.formats import (
    FAMILY,
    INDEX_BYTES,
    INDEX_VALUES,
    LATENT_VALUES,
    ROPE_VALUES,
    ROW_BYTES,
)

__all__ = ["MODEL_TYPES", "PAGE_SIZE", "describe", "index_owners"]

MODEL_TYPES = frozenset({"deepseek_v32", "glm_moe_dsa"})
PAGE_SIZE = 64
"""The one that the index kernels of engines take."""
_OWNS = {"full": True, "shared": False, "F": True, "S": False}
"""Kinds of indexers in config.json: in a list, or as letters of a pattern."""


def describe(config: ModelConfig, request: ModelConfigRequest) -> KVCacheDescription:
    """Return the cache of one of MODEL_TYPES.

    Raises:
        ContractError: the configuration lacks a size, or the request has an unknown fact.
        UnsupportedKVCacheError: a size or a value format is not laid out here.
    """
    _check_sizes(config)
    page_size = request.page_size or PAGE_SIZE
    formats = {
        "kv_format": request.format_of("kv_format", config.value_format(), known=ROW_BYTES),
        "index_format": request.format_of(
            "index_format", next(iter(INDEX_BYTES)), known=INDEX_BYTES
        ),
    }
    row = ROW_BYTES[formats["kv_format"]]
    index_row = INDEX_BYTES[formats["index_format"]] * page_size
    owners, drafts, made_up = index_owners(config), request.draft_layers, MadeUpPools()
    buffers = {
        "kv": made_up.buffers(len(owners), row_bytes=row, rows_per_page=page_size),
        "index_k": tuple(
            made_up.buffers(1, row_bytes=index_row)[0]
            if owns
            else made_up.absent(row_bytes=index_row)
            for owns in owners
        ),
        "draft_kv": made_up.buffers(drafts, row_bytes=row, rows_per_page=page_size),
        "draft_index_k": made_up.buffers(drafts, row_bytes=index_row),
    }
    return KVCacheDescription(
        family=FAMILY,
        page_size=page_size,
        buffers={role: spans for role, spans in buffers.items() if spans},
        layers=tuple(_layer(i, owns=owns) for i, owns in enumerate(owners)),
        logical_pools=(LogicalPool(name=KV, page_size=page_size),),
        facts=request.over(formats),
    )


def _check_sizes(config: ModelConfig) -> None:
    config.require("kv_lora_rank", LATENT_VALUES)
    config.require("qk_rope_head_dim", ROPE_VALUES)
    config.require("index_head_dim", INDEX_VALUES)


def _layer(number: int, *, owns: bool) -> LayerFacts:
    indexer = IndexerKind.OWN if owns else IndexerKind.SHARED
    return LayerFacts(layer=number, global_layer=number, indexer=indexer)


def index_owners(config: ModelConfig) -> tuple[bool, ...]:
    """Return for each layer whether it keeps index keys of its own.

    GLM-5 says it in one of three ways: a kind for each layer (indexer_types), a letter for each layer
    (index_topk_pattern), or every index_topk_freq-th layer from index_skip_topk_offset - 1 on, and all before it.

    Raises:
        ContractError: there is not one kind for each layer.
    """
    layers = config.layers()
    kinds = config.names("indexer_types", count=layers) or config.letters("index_topk_pattern")
    if kinds is None:
        every = config.integer("index_topk_freq", default=1)
        first = config.integer("index_skip_topk_offset", default=2) - 1
        return tuple(max(layer - first, 0) % every == 0 for layer in range(layers))
    if len(kinds) != layers or not set(kinds) <= _OWNS.keys():
        msg = f"model type {config.model_type!r}: expected full or shared for each of {layers} layers, got {kinds}"
        raise ContractError(msg)
    return tuple(_OWNS[kind] for kind in kinds)
