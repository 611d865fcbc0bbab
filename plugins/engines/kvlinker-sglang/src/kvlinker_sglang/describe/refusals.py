"""Why a class of SGLang's is not described, and what to do about it.

The tables name the classes of SGLang 0.5.23; every other class is refused too, for nobody here knows its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvlinker.errors import UnsupportedKVCacheError
from kvlinker_sglang.describe.classes import class_name

__all__ = ["refusal_of"]

_POOLS = "sglang.srt.mem_cache.memory_pool"
_V4_POOLS = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
_ALONE = "it is a part of a pool; describe the pool that the model runner holds as token_to_kv_pool"

_BY_CLASS: Mapping[str, str] = MappingProxyType(
    {
        f"{_POOLS}.NoOpMHATokenToKVPool": (
            "it keeps no KV at all; run SGLang without --prefill-only-disable-kv-cache, or without a linker"
        ),
        f"{_POOLS}.MHATokenToKVPoolFP4": (
            "its fp4 values and block scales lie in buffers of different rows; "
            "run SGLang with --kv-cache-dtype fp8_e4m3"
        ),
        f"{_POOLS}.MHATokenToKVPoolMXFP8": (
            "its block scales are interleaved over the slots of a page; run SGLang with --kv-cache-dtype fp8_e4m3"
        ),
        f"{_POOLS}.MLATokenToKVPoolFP4": (
            "its fp4 values and block scales are two parts of one latent; run SGLang with --kv-cache-dtype fp8_e4m3"
        ),
        f"{_POOLS}.PageMajorMHATokenToKVPool": (
            "a row holds a page of all layers; run SGLang without --enable-page-major-kv-layout"
        ),
        f"{_POOLS}.HybridLinearKVPool": (
            "the model's linear-attention layers keep states beside it, and a prefix without its states is wrong; "
            "run SGLang without a linker for this model"
        ),
        f"{_POOLS}.MHATokenToKOnlyPool": f"it keeps index keys alone: {_ALONE}",
        f"{_POOLS}.MiniMaxSparseKVPool": (
            "it keeps index keys beside K and V, which no model plugin lays out; "
            "run SGLang without a linker for this model"
        ),
        f"{_V4_POOLS}.DeepSeekV4SingleKVPool": _ALONE,
        f"{_V4_POOLS}.DeepSeekV4UniformFP8KVPool": _ALONE,
        f"{_V4_POOLS}.HiSparseC4DevicePool": _ALONE,
        f"{_V4_POOLS}.DeepSeekV4IndexerPool": _ALONE,
        f"{_V4_POOLS}.DeepSeekV4UnifiedKVPool": _ALONE,
    }
)
_BY_MODULE: Mapping[str, str] = MappingProxyType(
    {
        "sglang.srt.mem_cache.unified_memory_pool": (
            "unified memory keeps all layers of a page in one row and moves pages at will; "
            "run SGLang without --enable-unified-memory"
        ),
        "sglang.srt.mem_cache.unified_draft_pool": (
            "a fused draft lies inside the target's unified memory; run SGLang without --enable-unified-memory"
        ),
        "sglang.srt.mem_cache.page_interleave_pool": (
            "its pages are interleaved over the ranks; run SGLang without --enable-kv-cache-sharding"
        ),
        "sglang.srt.mem_cache.hisparse_memory_pool": (
            "HiSparse keeps a page in host memory when it likes, so that a device row may hold no page; "
            "run SGLang without --enable-hisparse"
        ),
        "sglang.srt.mem_cache.dsa_cache_layer_split": (
            "each rank keeps some layers alone and borrows the others; run SGLang without "
            "--enable-dsa-cache-layer-split"
        ),
        "sglang.srt.mem_cache.qsa_kv_pool": (
            "it keeps a compressed index and states beside K and V; run SGLang without a linker for this model"
        ),
        "sglang.srt.mem_cache.minimax_m3_nvfp4_pool": (
            "its rows pack nvfp4 values, scales and index keys; run SGLang without a linker for this model"
        ),
        "sglang.srt.mem_cache.pool_host": "it is a host mirror; describe the device pool behind it",
        "sglang.srt.mem_cache.memory_pool_host": "it is a host mirror; describe the device pool behind it",
        "sglang.srt.hardware_backend.npu": "pools of Ascend NPUs are not described; run on CUDA or CPU",
        "sglang.srt.hardware_backend": "pools of this accelerator are not described; run on CUDA or CPU",
    }
)


def refusal_of(found: object) -> UnsupportedKVCacheError:
    """Return the error that says why an object of SGLang's is not described, and what to do."""
    name = class_name(found)
    if name in _BY_CLASS:
        return UnsupportedKVCacheError(f"{name} is not described: {_BY_CLASS[name]}")
    module = type(found).__module__
    for prefix, reason in _BY_MODULE.items():
        if module == prefix or module.startswith(f"{prefix}."):
            return UnsupportedKVCacheError(f"{name} is not described: {reason}")
    return UnsupportedKVCacheError(_unknown(found))


def _unknown(found: object) -> str:
    bases = [
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in type(found).__mro__[1:]
        if kind.__module__.startswith("sglang.")
    ]
    kin = f", which derives from {bases[0]}," if bases else ""
    return (
        f"{class_name(found)}{kin} is a class that kvlinker-sglang does not know, and its bytes may mean something "
        f"else; use a version of SGLang that it was tested with, or install a plugin that describes this class"
    )
