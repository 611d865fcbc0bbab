"""Multi-head and grouped-query attention: `MHATokenToKVPool`, token-major or head-major."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvlinker.description import DescribeRequest, Fact, KVCacheDescription, LogicalPool
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker_sglang.describe.buffers import (
    HeldTensors,
    attention_layers,
    require_same_facts,
    spans_of,
    value_format,
)
from kvlinker_sglang.describe.classes import changed, class_name
from kvlinker_sglang.describe.engine import heads_split_over_ranks
from kvlinker_sglang.describe.refusals import require_class
from kvlinker_sglang.describe.requests import draft_pools, require_page_size

if TYPE_CHECKING:
    import torch

__all__ = [
    "POOL",
    "HeadsPool",
    "describe",
    "draft_heads",
    "heads_facts",
    "heads_pool",
    "heads_roles",
]

POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
_QUANTIZATIONS = "sglang.srt.layers.quantization.fp4_kv_cache_quant_method"
_METHODS = (
    # Values as they are, fp8 ones kept as uint8.
    f"{_QUANTIZATIONS}.UnquantizedKVCacheMethod",
    # What the CPU does for fp8: the same values, under their own type.
    f"{_QUANTIZATIONS}.CPUFP8KVCacheMethod",
)
_OTHER_METHOD = (
    "with scales and workspaces beside the values, which are not described here; "
    "run SGLang with --kv-cache-dtype bf16 or fp8_e4m3"
)
_REASONS: Mapping[str, str] = MappingProxyType(
    {
        f"{_QUANTIZATIONS}.NVFP4KVCacheMethod": (
            "whose block scales are relative to a scale of each layer that is the checkpoint's on some GPUs and six "
            "times that on others, and lie as the GPU and the attention backend want them, so that the same bytes "
            "are other values elsewhere; run SGLang with --kv-cache-dtype fp4_mx_block16"
        ),
    }
)
"""Method to why its values are not described."""
_LAYOUTS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        # [slots, heads, head_dim].
        "nhd": ("token_major", 3),
        # [pages, heads, slots, head_dim] (SGLANG_USE_HND_KVCACHE).
        "hnd": ("head_major", 4),
    }
)
"""SGLang's name of a layout to the model plugins' name of it, and the dimensions of its buffers."""


@runtime_checkable
class HeadsPool(Protocol):
    """What is read of an `MHATokenToKVPool`."""

    page_size: int
    layer_num: int
    start_layer: int
    dtype: torch.dtype
    store_dtype: torch.dtype
    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]
    kv_cache_layout: str
    k_scale_buffer: object
    v_scale_buffer: object
    quant_method: object
    post_capture_active: bool


def describe(pool: object, request: DescribeRequest) -> KVCacheDescription:
    """Return the description of a worker's pool and its drafts; see `describe_pool`."""
    target = heads_pool(pool, "the pool", request)
    facts = heads_facts(target, "the pool")
    drafts = [
        heads_pool(draft, f"draft pool {i}", request)
        for i, draft in enumerate(draft_pools(request))
    ]
    buffers = {**heads_roles("", [target]), **draft_heads(drafts, facts)}
    return KVCacheDescription(
        family="mha",
        page_size=request.page_size,
        buffers=buffers,
        layers=attention_layers(target.start_layer, target.layer_num),
        logical_pools=(LogicalPool(name="kv", page_size=target.page_size),),
        facts=facts,
        replication=heads_split_over_ranks(buffers, has_drafts=bool(drafts)),
    )


def heads_pool(pool: object, where: str, request: DescribeRequest) -> HeadsPool:
    """Return a pool after checking that it is one of K and V in pages of the tree's.

    Raises:
        UnsupportedKVCacheError: it is of another class, or keeps its values in another way.
        ContractError: its pages are not the tree's.
    """
    require_class(pool, POOL, where)
    if not isinstance(pool, HeadsPool):
        raise changed(pool, HeadsPool)
    require_page_size(pool, pool.page_size, request)
    if (method := class_name(pool.quant_method)) not in _METHODS:
        reason = _REASONS.get(method, _OTHER_METHOD)
        msg = f"{where}, a {class_name(pool)}, quantizes by {method}, {reason}"
        raise UnsupportedKVCacheError(msg)
    if pool.k_scale_buffer is not None or pool.v_scale_buffer is not None:
        msg = (
            f"{where}, a {class_name(pool)}, has scales beside values that {method} keeps as they are; "
            f"use a version of SGLang that kvlinker-sglang was tested with"
        )
        raise UnsupportedKVCacheError(msg)
    if pool.post_capture_active:
        msg = (
            f"{where}, a {class_name(pool)}, has addresses without memory behind them; run SGLang without "
            f"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
        )
        raise UnsupportedKVCacheError(msg)
    return pool


def heads_facts(pool: HeadsPool, where: str) -> dict[str, Fact]:
    """Return how a pool keeps its values; its fp8 scales are the model's, and not in the pool.

    Raises:
        UnsupportedKVCacheError: the layout or the type of values is not described.
    """
    layout, dimensions = _LAYOUTS.get(pool.kv_cache_layout, ("", 0))
    if found := {tensor.dim() for tensor in (*pool.k_buffer, *pool.v_buffer)} - {dimensions}:
        msg = (
            f"{where}, a {class_name(pool)}, is laid out as {pool.kv_cache_layout!r} in buffers of {sorted(found)} "
            f"dimensions, and described are {', '.join(_LAYOUTS)}; run SGLang with its default layout"
        )
        raise UnsupportedKVCacheError(msg)
    return {
        "kv_layout": layout,
        "kv_format": value_format(pool.dtype, pool.store_dtype, where),
        "kv_scaled": 0,
    }


def heads_roles(prefix: str, pools: Sequence[HeadsPool]) -> dict[str, tuple[BufferSpan, ...]]:
    """Return the roles `k` and `v`, each under a prefix, over the buffers of pools in their order."""
    return {
        f"{prefix}k": spans_of(f"{prefix}k", *map(_keys_of, pools)),
        f"{prefix}v": spans_of(f"{prefix}v", *map(_values_of, pools)),
    }


def draft_heads(
    drafts: Sequence[HeadsPool], facts: Mapping[str, Fact]
) -> dict[str, tuple[BufferSpan, ...]]:
    """Return the roles of drafts, none where there are no drafts.

    Raises:
        UnsupportedKVCacheError: a draft keeps its values otherwise than the target.
    """
    for i, draft in enumerate(drafts):
        require_same_facts(heads_facts(draft, f"draft pool {i}"), facts, f"draft pool {i}")
    return heads_roles("draft_", drafts) if drafts else {}


def _keys_of(pool: HeadsPool) -> HeldTensors:
    return lambda: pool.k_buffer


def _values_of(pool: HeadsPool) -> HeldTensors:
    return lambda: pool.v_buffer
