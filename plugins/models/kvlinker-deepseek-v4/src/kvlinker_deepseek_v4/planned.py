"""The cache that a DeepSeek V4 model would have, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from kvlinker.description import Fact, KVCacheDescription, LogicalPool
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.hookspecs import ModelConfig, ModelConfigRequest
from kvlinker.model_config import MadeUpPools
from kvlinker.pools import KV
from kvlinker_deepseek_v4.formats import (
    FAMILY,
    HEAD_VALUES,
    INDEX_VALUES,
    INDEXER_BYTES,
    KV_ROW_BYTES,
    STATE_VALUE_BYTES,
    V4Formats,
)
from kvlinker_deepseek_v4.mappings import (
    C1_RATIO,
    C2_RATIO,
    C4_RATIO,
    C128_RATIO,
    resolve_layer_mappings,
    stage_layers,
)
from kvlinker_deepseek_v4.pools import DRAFT_SWA, SWA, v4_pools

__all__ = ["MODEL_TYPES", "PAGE_SIZE", "compress_ratios", "describe"]

MODEL_TYPES = frozenset({"deepseek_v4"})
PAGE_SIZE = 256
"""The one that the kernels of engines take."""
_RATIOS: Mapping[str, int] = MappingProxyType(
    {
        "sliding_attention": 0,
        "compressed_sparse_attention": C4_RATIO,
        "heavily_compressed_attention": C128_RATIO,
    }
)
"""Layer types, as transformers writes config.json, to the compress ratios of the published one."""


def describe(config: ModelConfig, request: ModelConfigRequest) -> KVCacheDescription:
    """Return the cache of one of MODEL_TYPES.

    Raises:
        ContractError: the configuration lacks a size, or the request has an unknown fact.
        UnsupportedKVCacheError: a size, a compress ratio or a value format is not laid out here.
    """
    config.require("head_dim", HEAD_VALUES)
    config.require("index_head_dim", INDEX_VALUES)
    page_size = request.page_size or PAGE_SIZE
    ratios = compress_ratios(config)
    _refuse_shared(config, ratios)
    layers = stage_layers(ratios)
    formats = V4Formats(
        page_size=page_size,
        kv_format=request.format_of("kv_format", "fp8_e4m3fn_ue8m0", known=KV_ROW_BYTES),
        indexer_format=request.format_of("indexer_format", "fp8_fused", known=INDEXER_BYTES),
        state_format=request.format_of("state_format", "fp32", known=STATE_VALUE_BYTES),
        state_ring_rows=request.number_of("state_ring_rows", 8),
    )
    made_up = MadeUpPools()
    buffers = {
        pool.role: made_up.buffers(
            len(pool.layer_mapping), row_bytes=pool.row_bytes, rows_per_page=pool.rows_per_page
        )
        for pool in v4_pools(formats, resolve_layer_mappings(layers))
    }
    if request.draft_layers:
        size = formats.kv_page_bytes()
        buffers[DRAFT_SWA] = made_up.buffers(request.draft_layers, row_bytes=size)
    window = config.integer("sliding_window")
    return KVCacheDescription(
        family=FAMILY,
        page_size=page_size,
        buffers=buffers,
        layers=layers,
        logical_pools=(
            LogicalPool(name=KV, page_size=page_size),
            LogicalPool(name=SWA, page_size=page_size, window=window),
        ),
        facts=request.over(_facts(formats)),
    )


def _refuse_shared(config: ModelConfig, ratios: Sequence[int]) -> None:
    """Refuse ratios of V4.1: a configuration of V4 does not say which layers keep what the others read."""
    if shared := sorted({C1_RATIO, C2_RATIO} & set(ratios)):
        msg = (
            f"model type {config.model_type!r}: layers of compress ratio {shared[0]} share KV, and which of them "
            f"keep it is not read from a configuration; describe the cache of a running engine"
        )
        raise UnsupportedKVCacheError(msg)


def _facts(formats: V4Formats) -> dict[str, Fact]:
    """Return what an engine would state that keeps the cache in the one way that is laid out here."""
    return {
        "kv_format": formats.kv_format,
        "indexer_format": formats.indexer_format,
        "state_format": formats.state_format,
        "state_ring_rows": formats.state_ring_rows,
        "swa_page_size": formats.page_size,
        "swa_physical_page_size": formats.page_size,
        "unified_kv": 0,
        "hisparse": 0,
        "c128_state_persistent": 0,
    }


def compress_ratios(config: ModelConfig) -> tuple[int, ...]:
    """Return the compress ratio of each layer, without those of draft layers that stand behind them.

    Raises:
        ContractError: the configuration does not say it for each layer.
    """
    layers = config.layers()
    ratios = config.integers("compress_ratios")
    if ratios is None:
        kinds = config.names("layer_types", count=layers) or ()
        ratios = tuple(_RATIOS[kind] for kind in kinds if kind in _RATIOS)
    if len(ratios) < layers:
        msg = (
            f"model type {config.model_type!r}: {len(ratios)} compress ratios are known for {layers} layers; "
            f"compress_ratios or layer_types must say one for each"
        )
        raise ContractError(msg)
    return ratios[:layers]
