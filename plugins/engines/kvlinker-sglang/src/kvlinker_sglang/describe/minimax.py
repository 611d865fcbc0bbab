"""MiniMax M3: `MiniMaxSparseKVPool` and `MiniMaxM3Nvfp4KVPool`, K and V and the index keys that select among them.

Nothing of a request is kept beside its slots: a token's index key is at the token's own slot, so that a page is whole
when its last token is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from kvlinker.description import (
    DescribeRequest,
    IndexerKind,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
)
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker_sglang.describe.classes import changed, class_name
from kvlinker_sglang.describe.engine import sharded_over_all_ranks
from kvlinker_sglang.describe.heads import draft_heads, heads_facts, heads_pool
from kvlinker_sglang.describe.minimax_parts import (
    Part,
    packed_heads,
    packed_index,
    plain_heads,
    plain_index,
)
from kvlinker_sglang.describe.requests import draft_pools, require_page_size

__all__ = ["NVFP4_POOL", "POOL", "describe"]

POOL = "sglang.srt.mem_cache.memory_pool.MiniMaxSparseKVPool"
NVFP4_POOL = "sglang.srt.mem_cache.minimax_m3_nvfp4_pool.MiniMaxM3Nvfp4KVPool"


@runtime_checkable
class _MiniMaxPool(Protocol):
    """What is read of both pools: they are made of a pool of K and V, and of up to two of index keys."""

    page_size: int
    layer_num: int
    start_layer: int
    end_layer: int
    main_pool: object
    dense_pool: object
    """K and V of layers without an index, where HiSparse keeps the others; None where it does not."""
    index_k_pool: object
    """Index keys alone; None where no layer of the stage has such."""
    index_kv_pool: object
    """Index keys and the values that the index attends to; None where no layer of the stage has such."""
    sparse_layer_id_mapping: dict[int, int]
    """Global layers that have an index."""
    index_k_layer_id_mapping: dict[int, int]
    """Global layer to the place of its keys in `index_k_pool`."""
    index_kv_layer_id_mapping: dict[int, int]
    """Global layer to the place of its keys and values in `index_kv_pool`."""


def describe(pool: object, request: DescribeRequest) -> KVCacheDescription:
    """Return the description of a worker's pool and its drafts; see `describe_pool`."""
    target = _minimax_pool(pool, request)
    is_packed = class_name(pool) == NVFP4_POOL
    heads = (packed_heads if is_packed else plain_heads)(target.main_pool, request)
    _refuse_unread(target)
    parts = [heads, _index(target, request, is_packed=is_packed)]
    parts.append(_drafts(heads, request, apart=is_packed))
    return KVCacheDescription(
        family="mha",
        page_size=request.page_size,
        buffers={role: spans for part in parts for role, spans in part.roles.items()},
        layers=_layers(target),
        logical_pools=(LogicalPool(name="kv", page_size=target.page_size),),
        facts={name: fact for part in parts for name, fact in part.facts.items()},
        replication=sharded_over_all_ranks(),
    )


def _minimax_pool(pool: object, request: DescribeRequest) -> _MiniMaxPool:
    """Return a pool after checking that index keys are those of the stage's layers that have an index.

    Raises:
        UnsupportedKVCacheError: they are others.
        ContractError: its pages are not the tree's.
    """
    if not isinstance(pool, _MiniMaxPool):
        raise changed(pool, _MiniMaxPool)
    require_page_size(pool, pool.page_size, request)
    stage = range(pool.start_layer, pool.end_layer)
    keys = sorted([*pool.index_k_layer_id_mapping, *pool.index_kv_layer_id_mapping])
    indexed = sorted(pool.sparse_layer_id_mapping)
    if pool.layer_num != len(stage) or keys != indexed or set(keys) - set(stage):
        msg = (
            f"{class_name(pool)} has {pool.layer_num} layers in [{stage.start}, {stage.stop}), of which {indexed} "
            f"have an index, and keeps index keys of {keys}; described is one each, so use a version of SGLang that "
            f"kvlinker-sglang was tested with"
        )
        raise UnsupportedKVCacheError(msg)
    return pool


def _refuse_unread(pool: _MiniMaxPool) -> None:
    """Refuse parts of which no layer's place is read: they would be left out of every page.

    Raises:
        UnsupportedKVCacheError: there are some.
    """
    places = {
        "dense_pool": (pool.dense_pool, {}),
        "index_k_pool": (pool.index_k_pool, pool.index_k_layer_id_mapping),
        "index_kv_pool": (pool.index_kv_pool, pool.index_kv_layer_id_mapping),
    }
    if unread := [name for name, (part, of) in places.items() if part is not None and not of]:
        msg = (
            f"{class_name(pool)} has {', '.join(unread)}, and says of no layer that it is kept there; use a version of "
            f"SGLang that kvlinker-sglang was tested with"
        )
        raise UnsupportedKVCacheError(msg)


def _layers(pool: _MiniMaxPool) -> tuple[LayerFacts, ...]:
    def indexer(number: int) -> IndexerKind:
        return IndexerKind.OWN if number in pool.sparse_layer_id_mapping else IndexerKind.NONE

    stage = range(pool.start_layer, pool.end_layer)
    return tuple(
        LayerFacts(layer=layer, global_layer=number, indexer=indexer(number))
        for layer, number in enumerate(stage)
    )


def _index(pool: _MiniMaxPool, request: DescribeRequest, *, is_packed: bool) -> Part:
    """Return the index keys of a stage; nothing where none of its layers has an index."""

    def in_stage(places: Mapping[int, int]) -> dict[int, int]:
        return {number - pool.start_layer: place for number, place in places.items()}

    alone = in_stage(pool.index_k_layer_id_mapping)
    with_values = in_stage(pool.index_kv_layer_id_mapping)
    if not alone and not with_values:
        return Part()
    if is_packed:
        return packed_index(pool.index_k_pool, alone, pool.layer_num, request)
    return plain_index(
        (pool.index_k_pool, alone), (pool.index_kv_pool, with_values), pool.layer_num, request
    )


def _drafts(target: Part, request: DescribeRequest, *, apart: bool) -> Part:
    """Return the K and V of drafts, and how they keep values where the target does otherwise.

    Raises:
        UnsupportedKVCacheError: a draft is of another class, or keeps values otherwise than all others.
    """
    drafts = [
        heads_pool(draft, f"draft pool {i}", request)
        for i, draft in enumerate(draft_pools(request))
    ]
    if not drafts or not apart:
        return Part(roles=draft_heads(drafts, target.facts))
    own = heads_facts(drafts[0], "draft pool 0")
    stated = {f"draft_{name}": own[name] for name in ("kv_layout", "kv_format")}
    return Part(roles=draft_heads(drafts, own), facts=stated)
