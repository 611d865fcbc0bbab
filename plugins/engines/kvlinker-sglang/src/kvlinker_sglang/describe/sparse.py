"""DeepSeek sparse attention: `DSATokenToKVPool`, latents and the index keys that select among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvlinker.description import (
    DescribeRequest,
    Fact,
    IndexerKind,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
)
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker_sglang.describe.buffers import (
    HeldTensors,
    require_same_facts,
    spans_of,
    value_format,
)
from kvlinker_sglang.describe.classes import changed, class_name
from kvlinker_sglang.describe.engine import replicated_on_all_ranks
from kvlinker_sglang.describe.refusals import require_class
from kvlinker_sglang.describe.requests import (
    SHARED_INDEX_LAYERS,
    draft_pools,
    require_page_size,
    shared_index_layers_of,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "POOL",
    "SparsePool",
    "describe",
    "index_keys_of",
    "indexers_of",
    "shared_index_layers",
    "sparse_facts",
    "sparse_latents_of",
    "sparse_pool",
]

POOL = "sglang.srt.mem_cache.memory_pool.DSATokenToKVPool"
_INDEX = "sglang.srt.mem_cache.index_key_cache.IndexKeyCache"
_PACKED_ROW_BYTES = 512 + 512 // 128 * 4 + 64 * 2
"""512 e4m3 values, an fp32 scale for each 128 of them, 64 rope values in bf16 (DSATokenToKVPool)."""


@runtime_checkable
class _IndexKeys(Protocol):
    buffer: list[torch.Tensor]


@runtime_checkable
class SparsePool(Protocol):
    """What is read of a `DSATokenToKVPool`."""

    page_size: int
    layer_num: int
    start_layer: int
    dtype: torch.dtype
    store_dtype: torch.dtype
    kv_buffer: list[torch.Tensor]
    kv_cache_dim: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dsa_kv_cache_store_fp8: bool
    dcp_replicated: bool
    index_key_cache: object
    index_kpool: int
    """Tokens that share an index key."""
    index_kpool_compress: bool
    index_page_size: int
    """Index keys of a page."""
    skip_topk_layers: list[bool]


def describe(pool: object, request: DescribeRequest) -> KVCacheDescription:
    """Return the description of a worker's pool and its drafts; see `describe_pool`."""
    target = sparse_pool(pool, "the pool", request)
    facts = sparse_facts(target, "the pool")
    drafts = []
    for i, draft in enumerate(draft_pools(request)):
        drafts.append(sparse_pool(draft, f"draft pool {i}", request))
        require_same_facts(sparse_facts(drafts[i], f"draft pool {i}"), facts, f"draft pool {i}")
    buffers = {
        "kv": spans_of("kv", sparse_latents_of(target)),
        "index_k": spans_of("index_k", index_keys_of(target)),
    }
    if drafts:
        buffers["draft_kv"] = spans_of("draft_kv", *map(sparse_latents_of, drafts))
        buffers["draft_index_k"] = spans_of("draft_index_k", *map(index_keys_of, drafts))
    return KVCacheDescription(
        family="dsa",
        page_size=request.page_size,
        buffers=buffers,
        layers=_layers(target, request),
        logical_pools=(LogicalPool(name="kv", page_size=target.page_size),),
        facts=facts,
        replication=replicated_on_all_ranks(buffers),
    )


def shared_index_layers(config: object, *, start: int, end: int) -> tuple[int, ...]:
    """Return which global layers in [start, end) use another layer's index, for the fact of that name.

    SGLang gives such a layer an index buffer all the same where an external linker is on; nothing writes or reads it.

    Args:
        config: the text model's Hugging Face configuration, as SGLang read it.
        start: first global layer of the pipeline stage.
        end: global layer behind its last.
    """
    from sglang.srt.configs.model_config import dsa_layer_skips_topk

    return tuple(layer for layer in range(start, end) if dsa_layer_skips_topk(config, layer))


def _layers(pool: SparsePool, request: DescribeRequest) -> tuple[LayerFacts, ...]:
    numbers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    return tuple(
        LayerFacts(layer=layer, global_layer=number, indexer=indexer)
        for layer, (number, indexer) in enumerate(
            zip(numbers, indexers_of(pool, numbers, request), strict=True)
        )
    )


def indexers_of(
    pool: SparsePool, numbers: Sequence[int], request: DescribeRequest
) -> tuple[IndexerKind, ...]:
    """Return whether each layer of a pool selects by an index of its own.

    Args:
        pool: its own layers are counted from 0.
        numbers: the same layers, counted over the whole model.
        request: may state layers that share another's index.

    Raises:
        ContractError: a layer is stated that the pool does not have.
    """
    shared = shared_index_layers_of(request)
    if outside := sorted(shared - set(numbers)):
        msg = (
            f"fact {SHARED_INDEX_LAYERS!r} names layers {outside}, and the pool has {_named(numbers)}; "
            f"name layers of this pipeline stage alone, counted over the whole model"
        )
        raise ContractError(msg)
    return tuple(
        IndexerKind.SHARED if skips or number in shared else IndexerKind.OWN
        for number, skips in zip(numbers, pool.skip_topk_layers, strict=True)
    )


def _named(numbers: Sequence[int]) -> str:
    if isinstance(numbers, range):
        return f"[{numbers.start}, {numbers.stop})"
    return f"{list(numbers)}"


def sparse_pool(pool: object, where: str, request: DescribeRequest) -> SparsePool:
    """Return a pool after checking that it is one of latents and index keys.

    Raises:
        UnsupportedKVCacheError: it is of another class, or keeps its values in another way.
        ContractError: its pages are not the tree's.
    """
    require_class(pool, POOL, where)
    if not isinstance(pool, SparsePool):
        raise changed(pool, SparsePool)
    require_page_size(pool, pool.page_size, request)
    require_class(pool.index_key_cache, _INDEX, f"the index of {where}")
    _check_index(pool, where)
    return pool


def _check_index(pool: SparsePool, where: str) -> None:
    """Refuse index keys of which a page has no whole number, or that are folded in an unknown way.

    The keys of a group that is not whole yet are a request's own; none is open at the end of a page of whole groups.

    Raises:
        UnsupportedKVCacheError: they are kept otherwise.
    """
    if pool.dcp_replicated or pool.index_page_size * pool.index_kpool != pool.page_size:
        msg = (
            f"{where}, a {class_name(pool)}, folds {pool.index_kpool} tokens into an index key, in pages of "
            f"{pool.index_page_size} of the pool's {pool.page_size} slots; described are whole groups in each page, "
            f"so run SGLang without decode context parallelism"
        )
        raise UnsupportedKVCacheError(msg)
    if pool.index_kpool > 1 and not pool.index_kpool_compress:
        msg = (
            f"{where}, a {class_name(pool)}, folds {pool.index_kpool} tokens into an index key without weighing them, "
            f"which no model of the tested SGLang does; run SGLang without a linker for this model"
        )
        raise UnsupportedKVCacheError(msg)


def sparse_facts(pool: SparsePool, where: str) -> dict[str, Fact]:
    """Return how a pool keeps its values.

    Raises:
        UnsupportedKVCacheError: the type of values is not described.
    """
    facts: dict[str, Fact] = {
        "kv_format": _kv_format(pool, where),
        "index_format": "fp8_e4m3fn_fp32_scale",
    }
    return facts if pool.index_kpool == 1 else {**facts, "index_kpool": pool.index_kpool}


def _kv_format(pool: SparsePool, where: str) -> str:
    plain = value_format(pool.dtype, pool.store_dtype, where)
    if not pool.dsa_kv_cache_store_fp8:
        return plain
    if pool.kv_cache_dim != _PACKED_ROW_BYTES:
        msg = (
            f"{where}, a {class_name(pool)}, packs a slot into {pool.kv_cache_dim} B, and described are "
            f"{_PACKED_ROW_BYTES} B; run SGLang with --kv-cache-dtype bf16"
        )
        raise UnsupportedKVCacheError(msg)
    return "fp8_packed_656"


def sparse_latents_of(pool: SparsePool) -> HeldTensors:
    """Return what reads a pool's latents."""
    return lambda: pool.kv_buffer


def index_keys_of(pool: SparsePool) -> HeldTensors:
    """Return what reads a pool's index keys."""

    def tensors() -> Sequence[torch.Tensor]:
        if not isinstance(pool.index_key_cache, _IndexKeys):
            raise changed(pool.index_key_cache, _IndexKeys)
        return pool.index_key_cache.buffer

    return tensors
