"""Multi-head latent attention: `MLATokenToKVPool`, one latent for each slot and layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvlinker.description import DescribeRequest, Fact, KVCacheDescription, LogicalPool
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker_sglang.describe.buffers import (
    HeldTensors,
    attention_layers,
    paged,
    require_same_facts,
    spans_of,
    value_format,
)
from kvlinker_sglang.describe.classes import changed, class_name
from kvlinker_sglang.describe.engine import (
    ranks_of_a_page,
    replicated_on_all_ranks,
    slots_dealt_over_ranks,
)
from kvlinker_sglang.describe.refusals import require_class
from kvlinker_sglang.describe.requests import draft_pools, require_page_size

if TYPE_CHECKING:
    import torch

__all__ = ["POOL", "LatentPool", "describe", "latent_facts", "latent_pool", "latents_of"]

POOL = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool"


@runtime_checkable
class LatentPool(Protocol):
    """What is read of an `MLATokenToKVPool`."""

    page_size: int
    layer_num: int
    start_layer: int
    dtype: torch.dtype
    store_dtype: torch.dtype
    kv_buffer: list[torch.Tensor]
    kv_scale_buffer: object
    kv_lora_rank: int
    qk_rope_head_dim: int
    use_dsa: bool
    dcp_replicated: bool


def describe(pool: object, request: DescribeRequest) -> KVCacheDescription:
    """Return the description of a worker's pool and its drafts; see `describe_pool`."""
    if (ranks := ranks_of_a_page()) > 1:
        return _share(pool, request, ranks)
    target = latent_pool(pool, "the pool", request)
    facts = latent_facts(target, "the pool")
    drafts = []
    for i, draft in enumerate(draft_pools(request)):
        drafts.append(latent_pool(draft, f"draft pool {i}", request))
        require_same_facts(latent_facts(drafts[i], f"draft pool {i}"), facts, f"draft pool {i}")
    buffers = {"latent": spans_of("latent", latents_of(target))}
    if drafts:
        buffers["draft_latent"] = spans_of("draft_latent", *map(latents_of, drafts))
    return KVCacheDescription(
        family="mla",
        page_size=request.page_size,
        buffers=buffers,
        layers=attention_layers(target.start_layer, target.layer_num),
        logical_pools=(LogicalPool(name="kv", page_size=target.page_size),),
        facts=facts,
        replication=replicated_on_all_ranks(buffers),
    )


def _share(pool: object, request: DescribeRequest, ranks: int) -> KVCacheDescription:
    """Return the description of a rank's share of pages whose slots ranks take in turn.

    SGLang keeps slot s in row s // ranks of rank s % ranks (`maybe_dcp_kernel_indices`): a page of the tree is a page
    of the pool on each rank, at the same number, and so one row here. No slot needs a translation of its own.

    Raises:
        UnsupportedKVCacheError: there are drafts, whose slots are not taken in turn.
    """
    target = latent_pool(pool, "the pool", request, ranks=ranks)
    if drafts := draft_pools(request):
        msg = (
            f"{len(drafts)} draft pools beside latents whose slots {ranks} ranks take in turn are not described; "
            f"run SGLang without --dcp-size, or without speculative decoding"
        )
        raise UnsupportedKVCacheError(msg)
    count = target.page_size
    latents = spans_of("latent", paged(latents_of(target), count))
    return KVCacheDescription(
        family="mla",
        page_size=request.page_size,
        buffers={"latent": latents},
        layers=attention_layers(target.start_layer, target.layer_num),
        logical_pools=(LogicalPool(name="kv", page_size=request.page_size),),
        facts={**latent_facts(target, "the pool"), "latents_in_row": count},
        replication=slots_dealt_over_ranks(["latent"]),
    )


def latents_of(pool: LatentPool) -> HeldTensors:
    """Return what reads a pool's latents."""
    return lambda: pool.kv_buffer


def latent_pool(
    pool: object, where: str, request: DescribeRequest, *, ranks: int = 1
) -> LatentPool:
    """Return a pool after checking that it is one of latents in pages of the tree's.

    Args:
        pool: checked.
        where: its place, in the message.
        request: says how long the tree's pages are.
        ranks: that take the slots of such a page in turn.

    Raises:
        UnsupportedKVCacheError: it is of another class, or keeps its values in another way.
        ContractError: its pages are not the tree's.
    """
    require_class(pool, POOL, where)
    if not isinstance(pool, LatentPool):
        raise changed(pool, LatentPool)
    require_page_size(pool, pool.page_size * ranks, request)
    if pool.use_dsa or pool.kv_scale_buffer is not None or pool.dcp_replicated:
        msg = (
            f"{where}, a {class_name(pool)}, keeps a sparse-attention latent, scales or virtual slots, which are not "
            f"described; run SGLang without decode context parallelism, and with --kv-cache-dtype bf16 or fp8_e4m3"
        )
        raise UnsupportedKVCacheError(msg)
    return pool


def latent_facts(pool: LatentPool, where: str) -> dict[str, Fact]:
    """Return how a pool keeps its values.

    Raises:
        UnsupportedKVCacheError: the type of values is not described.
    """
    return {
        "kv_format": value_format(pool.dtype, pool.store_dtype, where),
        "latent_values": pool.kv_lora_rank + pool.qk_rope_head_dim,
    }
