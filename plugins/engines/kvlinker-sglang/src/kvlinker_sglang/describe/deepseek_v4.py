"""DeepSeek V4: `DeepSeekV4TokenToKVPool`, of windows, compressed KV, index keys and state rings."""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.description import (
    DescribeRequest,
    Fact,
    IndexerKind,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
)
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker_sglang.describe.buffers import spans_of
from kvlinker_sglang.describe.classes import class_name
from kvlinker_sglang.describe.deepseek_v4_parts import (
    POOL,
    V4Pool,
    indexer_of,
    indexes_of,
    kv_pool_of,
    latents_of,
    states_of,
    v4_pool,
)
from kvlinker_sglang.describe.deepseek_v4_shared import (
    SHARED_INDEXER_FORMAT,
    SHARED_RATIOS,
    check_shared,
    shared_indexes_of,
    sources_of,
)
from kvlinker_sglang.describe.engine import replicated_on_all_ranks
from kvlinker_sglang.describe.requests import draft_pools, sliding_window_of

__all__ = ["POOL", "describe"]

_C4, _C128 = 4, 128
_RATIOS = (0, *SHARED_RATIOS, _C4, _C128)
"""config.json of DeepSeek V4, compress_ratios: window alone, V4.1's, sparse attention, heavily compressed attention."""


def describe(pool: object, request: DescribeRequest) -> KVCacheDescription:
    """Return the description of a worker's pool and its drafts; see `describe_pool`."""
    target = v4_pool(pool, "the pool", request)
    layers, window = _layers(target), sliding_window_of(request, pool, usual=target.sliding_window)
    buffers = {**_buffers(target, layers), **_drafts(request)}
    return KVCacheDescription(
        family="deepseek_v4",
        page_size=request.page_size,
        buffers=buffers,
        layers=layers,
        logical_pools=(
            LogicalPool(name="kv", page_size=target.page_size),
            LogicalPool(name="swa", page_size=target.swa_page_size, window=window),
        ),
        facts=_facts(target, layers),
        replication=replicated_on_all_ranks(buffers),
    )


def _layers(pool: V4Pool) -> tuple[LayerFacts, ...]:
    """Return the stage's layers: SGLang maps those of all stages, and the others to nothing."""
    stage = [(i, item) for i, item in enumerate(pool.layer_mapping) if item is not None]
    for i, item in stage:
        if item.compress_ratio not in _RATIOS:
            msg = (
                f"{class_name(pool)} has compress ratio {item.compress_ratio} at layer {i}, and described are "
                f"{_RATIOS}; run SGLang without a linker for this model"
            )
            raise UnsupportedKVCacheError(msg)
    if not stage or stage[0][0] != pool.start_layer:
        msg = (
            f"{class_name(pool)} says that its stage starts at layer {pool.start_layer}, and keeps layers "
            f"{[i for i, _ in stage]}; use a version of SGLang that kvlinker-sglang was tested with"
        )
        raise UnsupportedKVCacheError(msg)
    check_shared(pool, stage)
    return tuple(
        LayerFacts(
            layer=layer,
            global_layer=number,
            compress_ratio=item.compress_ratio,
            indexer=_indexer(pool, number, item.compress_ratio),
        )
        for layer, (number, item) in enumerate(stage)
    )


def _indexer(pool: V4Pool, number: int, ratio: int) -> IndexerKind:
    if ratio in SHARED_RATIOS:
        return IndexerKind.OWN if number in sources_of(pool, ratio) else IndexerKind.SHARED
    return IndexerKind.OWN if ratio == _C4 else IndexerKind.NONE


def _buffers(pool: V4Pool, layers: Sequence[LayerFacts]) -> dict[str, tuple[BufferSpan, ...]]:
    buffers = {"swa_kv": spans_of("swa_kv", latents_of(kv_pool_of(pool, 0)))}
    if sparse := _numbers(layers, _C4):
        buffers["c4_kv"] = spans_of("c4_kv", latents_of(kv_pool_of(pool, _C4)))
        buffers["c4_indexer"] = spans_of("c4_indexer", indexes_of(indexer_of(pool)))
        rings = states_of(pool, sparse)
        buffers["c4_state"] = spans_of("c4_state", rings.attention)
        buffers["c4_indexer_state"] = spans_of("c4_indexer_state", rings.index)
    if _numbers(layers, _C128):
        buffers["c128_kv"] = spans_of("c128_kv", latents_of(kv_pool_of(pool, _C128)))
    for ratio in SHARED_RATIOS:
        if sources_of(pool, ratio):
            kv, indexer = f"c{ratio}_kv", f"c{ratio}_indexer"
            buffers[kv] = spans_of(kv, latents_of(kv_pool_of(pool, ratio)))
            buffers[indexer] = spans_of(indexer, shared_indexes_of(pool, ratio))
    return buffers


def _numbers(layers: Sequence[LayerFacts], ratio: int) -> list[int]:
    return [facts.global_layer for facts in layers if facts.compress_ratio == ratio]


def _facts(pool: V4Pool, layers: Sequence[LayerFacts]) -> dict[str, Fact]:
    """Return how the parts keep their values; a stage without C4 layers states what V4 keeps by default."""
    indexer_format, state_format, ring_rows = "fp8_fused", "fp32", 8
    if sparse := _numbers(layers, _C4):
        indexer_format = "fp4_fused" if indexer_of(pool).use_fp4_indexer else "fp8_fused"
        rings = states_of(pool, sparse)
        state_format, ring_rows = rings.value_format, rings.rows
    return {
        "kv_format": "fp8_e4m3fn_ue8m0",
        "indexer_format": indexer_format,
        "state_format": state_format,
        "state_ring_rows": ring_rows,
        "swa_page_size": pool.swa_page_size,
        "swa_physical_page_size": kv_pool_of(pool, 0).page_size,
        "unified_kv": 0,
        "hisparse": 0,
        # The state of a C128 layer is a request's own: nothing is open at the end of a page of whole 128 tokens.
        "c128_state_persistent": 0,
        **_shared_facts(layers),
    }


def _shared_facts(layers: Sequence[LayerFacts]) -> dict[str, Fact]:
    """Return how V4.1 keeps the index keys that layers share; nothing for V4."""
    if any(facts.compress_ratio in SHARED_RATIOS for facts in layers):
        return {"shared_indexer_format": SHARED_INDEXER_FORMAT}
    return {}


def _drafts(request: DescribeRequest) -> dict[str, tuple[BufferSpan, ...]]:
    """Return the windows of drafts under the target's window slots; an MTP layer keeps nothing else."""
    drafts = [
        v4_pool(draft, f"draft pool {i}", request) for i, draft in enumerate(draft_pools(request))
    ]
    for i, draft in enumerate(drafts):
        if ratios := sorted({facts.compress_ratio for facts in _layers(draft)} - {0}):
            msg = (
                f"draft pool {i}, a {class_name(draft)}, has layers of compress ratio {ratios}, and described are "
                f"drafts with windows alone; run SGLang with the model's own MTP layers"
            )
            raise UnsupportedKVCacheError(msg)
    if not drafts:
        return {}
    held = [latents_of(kv_pool_of(draft, 0)) for draft in drafts]
    return {"draft_swa_kv": spans_of("draft_swa_kv", *held)}
