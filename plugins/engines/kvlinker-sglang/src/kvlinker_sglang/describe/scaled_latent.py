"""Latents in fp4 blocks with scales of their own: `MLATokenToKVPoolFP4`.

A row of latents is a slot. SGLang keeps a row of scales for each slot too; here a page of them is a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvlinker.description import DescribeRequest, Fact, KVCacheDescription, LogicalPool
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker_sglang.describe.buffers import (
    HeldTensors,
    attention_layers,
    paged,
    require_same_facts,
    spans_of,
)
from kvlinker_sglang.describe.classes import changed, class_name
from kvlinker_sglang.describe.engine import replicated_on_all_ranks
from kvlinker_sglang.describe.refusals import require_class
from kvlinker_sglang.describe.requests import draft_pools, require_page_size

if TYPE_CHECKING:
    import torch

__all__ = ["POOL", "describe"]

POOL = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPoolFP4"
_FORMAT = "fp4_e2m1_block16_e8m0"
"""Two values a byte, an exponent for each 16 of them (`FP4MXBlock16KVQuantizeUtil`)."""


@runtime_checkable
class _Pool(Protocol):
    page_size: int
    layer_num: int
    start_layer: int
    dtype: torch.dtype
    store_dtype: torch.dtype
    kv_buffer: list[torch.Tensor]
    kv_scale_buffer: list[torch.Tensor]
    kv_lora_rank: int
    qk_rope_head_dim: int
    use_dsa: bool
    dcp_replicated: bool


def describe(pool: object, request: DescribeRequest) -> KVCacheDescription:
    """Return the description of a worker's pool and its drafts; see `describe_pool`."""
    target = _checked(pool, "the pool", request)
    facts = _facts(target)
    drafts = []
    for i, draft in enumerate(draft_pools(request)):
        drafts.append(_checked(draft, f"draft pool {i}", request))
        require_same_facts(_facts(drafts[i]), facts, f"draft pool {i}")
    buffers = {**_roles("", [target]), **(_roles("draft_", drafts) if drafts else {})}
    return KVCacheDescription(
        family="mla",
        page_size=request.page_size,
        buffers=buffers,
        layers=attention_layers(target.start_layer, target.layer_num),
        logical_pools=(LogicalPool(name="kv", page_size=target.page_size),),
        facts=facts,
        replication=replicated_on_all_ranks(buffers),
    )


def _checked(pool: object, where: str, request: DescribeRequest) -> _Pool:
    require_class(pool, POOL, where)
    if not isinstance(pool, _Pool):
        raise changed(pool, _Pool)
    require_page_size(pool, pool.page_size, request)
    values, stored = f"{pool.dtype}", f"{pool.store_dtype}"
    if (values, stored) != ("torch.float4_e2m1fn_x2", "torch.uint8"):
        msg = (
            f"{where}, a {class_name(pool)}, keeps {values} values as {stored}, and described are fp4 ones as uint8; "
            f"run SGLang with --kv-cache-dtype fp4_mx_block16, or with bf16 or fp8_e4m3"
        )
        raise UnsupportedKVCacheError(msg)
    if pool.use_dsa or pool.dcp_replicated:
        msg = (
            f"{where}, a {class_name(pool)}, keeps a sparse-attention latent or virtual slots, which are not described "
            f"in fp4; run SGLang without decode context parallelism, and with --kv-cache-dtype bf16 or fp8_e4m3"
        )
        raise UnsupportedKVCacheError(msg)
    return pool


def _facts(pool: _Pool) -> dict[str, Fact]:
    return {"kv_format": _FORMAT, "latent_values": pool.kv_lora_rank + pool.qk_rope_head_dim}


def _roles(prefix: str, pools: Sequence[_Pool]) -> dict[str, tuple[BufferSpan, ...]]:
    role = f"{prefix}latent"
    return {
        role: spans_of(role, *map(_latents_of, pools)),
        f"{role}_scale": spans_of(f"{role}_scale", *map(_scales_of, pools)),
    }


def _latents_of(pool: _Pool) -> HeldTensors:
    return lambda: pool.kv_buffer


def _scales_of(pool: _Pool) -> HeldTensors:
    return paged(lambda: pool.kv_scale_buffer, pool.page_size)
