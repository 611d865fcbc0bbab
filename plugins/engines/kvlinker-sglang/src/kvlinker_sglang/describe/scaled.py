"""K and V in blocks with scales of their own, in pools of their own classes or quantized by a method.

A row of scales is a page: MXFP8's scales of a page's slots are interleaved, and those of fp4 are viewed so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvlinker.description import DescribeRequest, KVCacheDescription, LogicalPool
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker_sglang.describe.buffers import HeldTensors, attention_layers, paged, spans_of
from kvlinker_sglang.describe.classes import changed, class_name
from kvlinker_sglang.describe.engine import sharded_over_all_ranks
from kvlinker_sglang.describe.heads import POOL as HEADS_POOL
from kvlinker_sglang.describe.refusals import require_class
from kvlinker_sglang.describe.requests import draft_pools, require_page_size

if TYPE_CHECKING:
    import torch

__all__ = ["FP4_POOL", "MXFP8_POOL", "describe", "is_in_blocks"]

FP4_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPoolFP4"
MXFP8_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPoolMXFP8"
_BLOCK_METHOD = "sglang.srt.layers.quantization.fp4_kv_cache_quant_method.FP4MXBlock16KVCacheMethod"
"""By which an `MHATokenToKVPool` keeps what an `MHATokenToKVPoolFP4` does (--kv-cache-dtype fp4_mx_block16)."""
# Two values a byte, an exponent for each 16 of them (`FP4MXBlock16KVQuantizeUtil`); NVFP4's scales are e4m3.
_FP4 = ("fp4_e2m1_block16_e8m0", "torch.uint8")
_FORMATS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        FP4_POOL: _FP4,
        HEADS_POOL: _FP4,
        # An exponent for each 32 values, interleaved as FA4 reads them.
        MXFP8_POOL: ("mxfp8_e4m3fn_block32_interleaved", "torch.float8_e4m3fn"),
    }
)
"""Class to the name of its values, and the type that they are kept as."""


@runtime_checkable
class _ScaledPool(Protocol):
    page_size: int
    layer_num: int
    start_layer: int
    store_dtype: torch.dtype
    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]
    k_scale_buffer: list[torch.Tensor]
    v_scale_buffer: list[torch.Tensor]
    kv_cache_layout: str
    post_capture_active: bool


@runtime_checkable
class _InterleavingPool(Protocol):
    """What is read of a `MHATokenToKVPoolMXFP8` beside what scaled pools have."""

    mxfp8_sf_interleaved: bool
    """A row of scales is a page, and not a slot."""


@runtime_checkable
class _MethodPool(Protocol):
    """What is read of an `MHATokenToKVPool` that quantizes by a method, beside what scaled pools have."""

    quant_method: object
    native_k_scale_buffer: object
    native_v_scale_buffer: object
    dq_k_buffer: object
    dq_v_buffer: object


def is_in_blocks(pool: object) -> bool:
    """Return whether an `MHATokenToKVPool` keeps its values in the blocks that are described here."""
    return isinstance(pool, _MethodPool) and class_name(pool.quant_method) == _BLOCK_METHOD


def describe(pool: object, request: DescribeRequest) -> KVCacheDescription:
    """Return the description of a worker's pool and its drafts; see `describe_pool`."""
    kind = class_name(pool)
    target = _scaled_pool(pool, kind, "the pool", request)
    drafts = [
        _scaled_pool(draft, kind, f"draft pool {i}", request)
        for i, draft in enumerate(draft_pools(request))
    ]
    return KVCacheDescription(
        family="mha",
        page_size=request.page_size,
        buffers={**_roles("", [target]), **(_roles("draft_", drafts) if drafts else {})},
        layers=attention_layers(target.start_layer, target.layer_num),
        logical_pools=(LogicalPool(name="kv", page_size=target.page_size),),
        facts={"kv_layout": "token_major", "kv_format": _FORMATS[kind][0], "kv_scaled": 1},
        replication=sharded_over_all_ranks(),
    )


def _scaled_pool(pool: object, kind: str, where: str, request: DescribeRequest) -> _ScaledPool:
    require_class(pool, kind, where)
    if not isinstance(pool, _ScaledPool):
        raise changed(pool, _ScaledPool)
    require_page_size(pool, pool.page_size, request)
    stored = f"{pool.store_dtype}"
    if pool.kv_cache_layout != "nhd" or stored != _FORMATS[kind][1] or pool.post_capture_active:
        msg = (
            f"{where}, a {class_name(pool)}, keeps {stored} values laid out as {pool.kv_cache_layout!r} "
            f"(post-capture sizing {pool.post_capture_active}), and described are {_FORMATS[kind][1]} as 'nhd'; "
            f"run SGLang without SGLANG_USE_HND_KVCACHE and SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
        )
        raise UnsupportedKVCacheError(msg)
    if kind == MXFP8_POOL:
        _require_interleaved(pool, where)
    if kind == HEADS_POOL:
        _require_blocks(pool, where)
    return pool


def _require_interleaved(pool: object, where: str) -> None:
    """Refuse scales in the order of slots: SGLang writes none so, and one name of a format says one order.

    Raises:
        UnsupportedKVCacheError: they lie so.
    """
    if not isinstance(pool, _InterleavingPool):
        raise changed(pool, _InterleavingPool)
    if not pool.mxfp8_sf_interleaved:
        msg = (
            f"{where}, a {class_name(pool)}, keeps scales in the order of slots, and described are interleaved ones; "
            f"run SGLang with --page-size 128"
        )
        raise UnsupportedKVCacheError(msg)


def _require_blocks(pool: object, where: str) -> None:
    """Refuse what a method may keep beside values and scales, which is described for none.

    Raises:
        UnsupportedKVCacheError: the values are not in these blocks, or something is kept beside them.
    """
    if not isinstance(pool, _MethodPool):
        raise changed(pool, _MethodPool)
    beside = (
        pool.native_k_scale_buffer,
        pool.native_v_scale_buffer,
        pool.dq_k_buffer,
        pool.dq_v_buffer,
    )
    if not is_in_blocks(pool) or any(part is not None for part in beside):
        msg = (
            f"{where}, a {class_name(pool)}, quantizes by {class_name(pool.quant_method)}, or keeps more than "
            f"blocks of {_FP4[0]} and their scales, slot by slot; run SGLang with one --kv-cache-dtype for target and "
            f"draft, and with --attention-backend triton"
        )
        raise UnsupportedKVCacheError(msg)


def _roles(prefix: str, pools: Sequence[_ScaledPool]) -> dict[str, tuple[BufferSpan, ...]]:
    return {
        f"{prefix}k": spans_of(f"{prefix}k", *[_values(pool, keys=True) for pool in pools]),
        f"{prefix}v": spans_of(f"{prefix}v", *[_values(pool, keys=False) for pool in pools]),
        f"{prefix}k_scale": spans_of(
            f"{prefix}k_scale", *[_scales(pool, keys=True) for pool in pools]
        ),
        f"{prefix}v_scale": spans_of(
            f"{prefix}v_scale", *[_scales(pool, keys=False) for pool in pools]
        ),
    }


def _values(pool: _ScaledPool, *, keys: bool) -> HeldTensors:
    return lambda: pool.k_buffer if keys else pool.v_buffer


def _scales(pool: _ScaledPool, *, keys: bool) -> HeldTensors:
    """Return what reads scales, a row for each page."""
    in_a_page = 1 if isinstance(pool, _InterleavingPool) else pool.page_size
    return paged(lambda: pool.k_scale_buffer if keys else pool.v_scale_buffer, in_a_page)
