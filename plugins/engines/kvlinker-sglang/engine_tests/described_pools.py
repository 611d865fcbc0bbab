"""Examples of the real SGLang's pools that are described, with what of their memory is no part of a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from described_hybrids import HYBRIDS
from described_indexed import INDEXED
from minimax_pools import MINIMAX
from real_pools import V4_SHARED, heads_pool, latent_pool, sparse_pool, v4_pool, windows_pool
from real_pools_scaled import fp4_heads_pool, fp4_latent_pool, mxfp8_heads_pool
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

from kvlinker.description import Fact
from kvlinker.testing.engines import PoolExample

__all__ = ["DESCRIBED", "WINDOW"]

WINDOW = 40
"""Slots that window layers look back: two pages of 16 and a half."""
_ADDRESSES = {"*data_ptrs": "addresses of the buffers, which every process makes for itself"}
_STRIDES = {"*data_strides": "row sizes of the buffers, which every process makes for itself"}
_HEADS = {**_ADDRESSES, **_STRIDES}
_TRANSLATION = {
    "full_to_swa_index_mapping": "where windows are now; restored pages get other slots, and other entries"
}
_C128_STATE = {
    "compress_state_pools.2.*": "the unfinished 128 tokens of running requests; none are open at a page's end"
}
_HALF_PAIRS = {
    "compress_state_pools.1.*": "half pairs of running requests; none is open at a page's even end",
    "compress_state_pools.5.*": "half pairs of running requests; none is open at a page's even end",
}
_DRAFT_STARTS = {
    "mtp_draft_device_pools.*.swa_valid_from": "where running requests began to draft; paged windows are whole"
}


def _allocated_windows() -> object:
    """Return an `SWAKVPool` with the translation of slots that its allocator gives it."""
    pool = windows_pool()
    SWATokenToKVPoolAllocator(
        size=256,
        size_swa=128,
        page_size=16,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache=pool,
        need_sort=False,
    )
    return pool


def _example(
    name: str,
    make: Callable[[], object],
    *,
    page_size: int = 16,
    excused: Mapping[str, str],
    facts: Mapping[str, Fact] = {},
    drafts: Callable[[], Mapping[str, object]] = dict,
) -> PoolExample:
    return PoolExample(
        name=name, make=make, page_size=page_size, facts=facts, extras=drafts, excused=excused
    )


def _packed(*make: Callable[[], object]) -> Callable[[], Mapping[str, object]]:
    return lambda: {"mtp_draft_device_pools": tuple(one() for one in make)}


def _beside(make: Callable[[], object]) -> Callable[[], Mapping[str, object]]:
    return lambda: {"sidecar_draft_device_pools": (make(),)}


_FP8 = torch.float8_e4m3fn
_window = {"sliding_window": WINDOW}

_MHA = (
    _example("mha", heads_pool, excused=_HEADS),
    _example("mha-fp8", partial(heads_pool, dtype=_FP8), excused=_HEADS),
    _example("mha-fp8_e5m2", partial(heads_pool, dtype=torch.float8_e5m2), excused=_HEADS),
    _example(
        "mha-fp8_on_cpu",
        partial(heads_pool, dtype=_FP8, quantized_as="cpu_fp8_e4m3"),
        excused=_HEADS,
    ),
    _example("mha-head_major", partial(heads_pool, head_major=True), excused=_HEADS),
    _example("mha-unequal", partial(heads_pool, v_head_dim=32), excused=_HEADS),
    _example("mha-second_stage", partial(heads_pool, start_layer=3), excused=_HEADS),
    _example(
        "mha-draft_beside",
        heads_pool,
        excused=_HEADS,
        drafts=_beside(partial(heads_pool, layers=1, heads=4, pages=8)),
    ),
    _example(
        "mha-drafts_packed",
        heads_pool,
        excused=_HEADS,
        drafts=_packed(*[partial(heads_pool, layers=1)] * 2),
    ),
)
_mx_heads = partial(heads_pool, dtype=torch.float4_e2m1fn_x2, quantized_as="fp4_mx_block16")
_SCALED = (
    _example("mha-fp4", fp4_heads_pool, excused={}),
    _example(
        "mha-fp4_draft",
        fp4_heads_pool,
        excused={},
        drafts=_packed(partial(fp4_heads_pool, layers=1)),
    ),
    _example("mha-fp4_by_method", _mx_heads, excused=_HEADS),
    _example(
        "mha-fp4_by_method_draft",
        _mx_heads,
        excused=_HEADS,
        drafts=_packed(partial(_mx_heads, layers=1)),
    ),
    _example("mha-mxfp8", mxfp8_heads_pool, page_size=128, excused=_HEADS),
    _example(
        "mha-mxfp8_draft",
        mxfp8_heads_pool,
        page_size=128,
        excused=_HEADS,
        drafts=_packed(partial(mxfp8_heads_pool, layers=1)),
    ),
)
_SWA = (
    _example("swa", _allocated_windows, excused=_HEADS | _TRANSLATION, facts=_window),
    _example("swa-fp8", partial(windows_pool, dtype=_FP8), excused=_HEADS, facts=_window),
    _example(
        "swa-head_major", partial(windows_pool, head_major=True), excused=_HEADS, facts=_window
    ),
    _example(
        "swa-draft_beside",
        windows_pool,
        excused=_HEADS,
        facts=_window,
        drafts=_beside(partial(heads_pool, layers=1)),
    ),
    _example(
        "swa-drafts_full",
        windows_pool,
        excused=_HEADS,
        facts=_window,
        drafts=_packed(partial(windows_pool, full=(), sliding=(0,), in_full_slots=True)),
    ),
    _example(
        "swa-drafts_packed",
        windows_pool,
        excused=_HEADS,
        facts=_window,
        drafts=_packed(
            partial(windows_pool, full=(), sliding=(0,)),
            partial(windows_pool, full=(0,), sliding=()),
        ),
    ),
)
_MLA = (
    _example("mla", latent_pool, excused=_ADDRESSES),
    _example("mla-fp8", partial(latent_pool, dtype=_FP8), excused=_ADDRESSES),
    _example(
        "mla-drafts_packed",
        latent_pool,
        excused=_ADDRESSES,
        drafts=_packed(partial(latent_pool, layers=1)),
    ),
    _example("mla-fp4", fp4_latent_pool, excused=_ADDRESSES),
    _example(
        "mla-fp4_drafts",
        fp4_latent_pool,
        excused=_ADDRESSES,
        drafts=_packed(*[partial(fp4_latent_pool, layers=1)] * 2),
    ),
    _example(
        "mla-fp4_second_stage",
        partial(fp4_latent_pool, layers=2, start_layer=3),
        excused=_ADDRESSES,
    ),
)
_DSA = (
    _example("dsa", sparse_pool, page_size=64, excused=_ADDRESSES),
    _example(
        "dsa-fp8_packed",
        partial(sparse_pool, dtype=_FP8, row_values=656),
        page_size=64,
        excused=_ADDRESSES,
    ),
    _example("dsa-fp8", partial(sparse_pool, dtype=_FP8), page_size=64, excused=_ADDRESSES),
    _example(
        "dsa-absent_indexer",
        partial(sparse_pool, without_index=(1,)),
        page_size=64,
        excused=_ADDRESSES,
    ),
    _example(
        "dsa-dead_indexer",
        partial(sparse_pool, start_layer=3),
        page_size=64,
        excused=_ADDRESSES,
        facts={"shared_index_layers": (4,)},
    ),
    _example(
        "dsa-drafts_packed",
        sparse_pool,
        page_size=64,
        excused=_ADDRESSES,
        drafts=_packed(*[partial(sparse_pool, layers=1)] * 2),
    ),
)
_V4 = (
    _example("v4", v4_pool, page_size=256, excused=_C128_STATE),
    _example("v4-fp4", partial(v4_pool, fp4_indexer=True), page_size=256, excused=_C128_STATE),
    _example(
        "v4-bf16_states",
        partial(v4_pool, state_dtype=torch.bfloat16),
        page_size=256,
        excused=_C128_STATE,
    ),
    _example(
        "v4-second_stage",
        partial(v4_pool, (0, 4, 0, 0, 4), start=2, end=5),
        page_size=256,
        excused={},
    ),
    _example("v4-windows_alone", partial(v4_pool, (0, 0)), page_size=256, excused={}),
    _example(
        "v4-drafts_packed",
        v4_pool,
        page_size=256,
        excused=_C128_STATE,
        drafts=_packed(*[partial(v4_pool, (0,), draft=True)] * 2),
    ),
    _example(
        "v4-dspark",
        partial(v4_pool, speculative="DSPARK"),
        page_size=256,
        facts={"sliding_window": 130},
        excused=_C128_STATE | _DRAFT_STARTS,
        drafts=_packed(partial(v4_pool, (0,), draft=True, speculative="DSPARK")),
    ),
)
_shared_ratios = partial(v4_pool, V4_SHARED[0], sources=V4_SHARED[1])
_V4_SHARED = (
    _example("v4-shared_ratios", _shared_ratios, page_size=256, excused=_HALF_PAIRS),
    _example(
        "v4-shared_ratios_alone",
        partial(v4_pool, (1, 1, 0), sources=(0,)),
        page_size=256,
        excused={},
    ),
    _example(
        "v4-shared_ratios_dspark",
        partial(_shared_ratios, speculative="DSPARK"),
        page_size=256,
        facts={"sliding_window": 130},
        excused=_HALF_PAIRS | _DRAFT_STARTS,
        drafts=_packed(partial(v4_pool, (0,), draft=True, speculative="DSPARK")),
    ),
)
DESCRIBED = (*_MHA, *_SCALED, *_SWA, *_MLA, *_DSA, *_V4, *_V4_SHARED, *HYBRIDS, *INDEXED, *MINIMAX)
