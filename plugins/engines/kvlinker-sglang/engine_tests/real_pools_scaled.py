"""The real SGLang's pools in scaled blocks: small, and on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from real_pools import publish_configuration
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolMXFP8,
    MLATokenToKVPoolFP4,
)

__all__ = ["fp4_heads_pool", "fp4_latent_pool", "mxfp8_heads_pool"]


def fp4_heads_pool(
    *, layers: int = 3, page_size: int = 16, pages: int = 16, more_slots: int = 0
) -> object:
    """Return an `MHATokenToKVPoolFP4`, with slots behind its pages that may fill none."""
    return _pool(MHATokenToKVPoolFP4, torch.float4_e2m1fn_x2, layers, page_size, pages, more_slots)


def mxfp8_heads_pool(*, layers: int = 3, page_size: int = 128, pages: int = 16) -> object:
    """Return an `MHATokenToKVPoolMXFP8`; in pages of 128 slots scales are interleaved."""
    return _pool(MHATokenToKVPoolMXFP8, torch.float8_e4m3fn, layers, page_size, pages)


def fp4_latent_pool(
    *,
    layers: int = 3,
    page_size: int = 16,
    pages: int = 16,
    more_slots: int = 0,
    start_layer: int = 0,
) -> object:
    """Return an `MLATokenToKVPoolFP4` of DeepSeek V3's latents, with slots behind its pages that may fill none."""
    publish_configuration()

    return MLATokenToKVPoolFP4(
        size=pages * page_size + more_slots,
        page_size=page_size,
        dtype=torch.float4_e2m1fn_x2,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
        start_layer=start_layer,
        end_layer=start_layer + layers,
    )


def _pool(
    kind: Callable[..., object],
    dtype: torch.dtype,
    layers: int,
    page_size: int,
    pages: int,
    more_slots: int = 0,
) -> object:
    publish_configuration()

    return kind(
        size=pages * page_size + more_slots,
        page_size=page_size,
        dtype=dtype,
        head_num=2,
        head_dim=64,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
        start_layer=0,
        end_layer=layers,
    )
