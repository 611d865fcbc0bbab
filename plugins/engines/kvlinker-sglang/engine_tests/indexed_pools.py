"""Pools of the real SGLang in which some neighbouring tokens share an index key, built small and on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from real_pools import publish_configuration
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
)
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool

__all__ = ["folded_hybrid_pool", "folded_pool", "qsa_pool"]

RUNNING = 4
"""Requests that may run: each has keys of a group that is not whole yet."""


def qsa_pool(
    requests: object,
    *,
    attention: Sequence[int] = (2, 4),
    dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.bfloat16,
    ratio: int = 4,
    page_size: int = 16,
    pages: int = 16,
) -> object:
    """Return a `QSATokenToKVPool` beside the states of requests.

    Args:
        requests: whose states.
        attention: global layers that keep pages.
        dtype: of K and V.
        index_dtype: of the index keys.
        ratio: tokens that share one.
        page_size: slots in a page.
        pages: that requests may use.
    """
    publish_configuration()

    assert isinstance(requests, HybridReqToTokenPool)
    return QSATokenToKVPool(
        size=pages * page_size,
        dtype=dtype,
        page_size=page_size,
        head_num=2,
        head_dim=64,
        full_attention_layer_ids=list(attention),
        device="cpu",
        mamba_pool=requests.mamba_pool,
        qsa_index_kv_heads=2,
        qsa_index_head_dim=16,
        qsa_compress_ratio=ratio,
        qsa_token_topk=64,
        num_request_slots=RUNNING + 1,
        qsa_indexer_dtype=index_dtype,
    )


def folded_pool(
    *, kpool: int = 4, layers: int = 3, pages: int = 4, without_index: Sequence[int] = ()
) -> object:
    """Return a `DSATokenToKVPool` whose pages have 64 index keys, each of so many tokens.

    Args:
        kpool: tokens that share an index key.
        layers: of the pipeline stage.
        pages: that requests may use.
        without_index: layers, counted in the stage, for which no index buffer is made.
    """
    publish_configuration()

    page_size = 64 * kpool
    return DSATokenToKVPool(
        size=pages * page_size,
        page_size=page_size,
        kv_lora_rank=512,
        dtype=torch.bfloat16,
        qk_rope_head_dim=64,
        layer_num=layers,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=576,
        start_layer=0,
        end_layer=layers,
        index_kpool=kpool,
        index_kpool_compress=True,
        max_running_requests=RUNNING,
        skip_topk_layers=[layer in without_index for layer in range(layers)],
    )


def folded_hybrid_pool(
    requests: object, *, kpool: int = 2, attention: Sequence[int] = (2, 4), pages: int = 4
) -> object:
    """Return GLM-5's next hybrid: a `HybridLinearKVPool` over a folded `DSATokenToKVPool`."""
    publish_configuration()

    assert isinstance(requests, HybridReqToTokenPool)
    page_size = 64 * kpool
    return HybridLinearKVPool(
        size=pages * page_size,
        dtype=torch.bfloat16,
        page_size=page_size,
        head_num=2,
        head_dim=64,
        full_attention_layer_ids=list(attention),
        device="cpu",
        mamba_pool=requests.mamba_pool,
        use_mla=True,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        use_dsa=True,
        index_head_dim=128,
        kv_cache_dim=576,
        index_kpool=kpool,
        index_kpool_compress=True,
        max_running_requests=RUNNING,
        skip_topk_layers=[False] * len(attention),
    )
