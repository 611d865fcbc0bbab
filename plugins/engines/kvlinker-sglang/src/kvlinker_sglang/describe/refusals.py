"""Why a class of SGLang's is not described, or not in that place, and what to do about it.

The tables name the classes of SGLang 0.5.23; every other class is refused too, for nobody here knows its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvlinker.errors import UnsupportedKVCacheError
from kvlinker_sglang.describe.classes import class_name

__all__ = ["refusal_of", "require_class"]

_POOLS = "sglang.srt.mem_cache.memory_pool"
_MINIMAX_POOLS = "sglang.srt.mem_cache.minimax_m3_nvfp4_pool"
_V4_POOLS = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
_ALONE = "it is a part of a pool; describe the pool that the model runner holds as token_to_kv_pool"

_ELSEWHERE = "its bytes may mean something else; run SGLang without a linker for this model"
_IN_BLOCKS = (
    "values in scaled blocks are described where target and drafts are alike, and not beside windows or states; "
    "run SGLang with --kv-cache-dtype bf16 or fp8_e4m3"
)
_BY_CLASS: Mapping[str, str] = MappingProxyType(
    {
        f"{_POOLS}.NoOpMHATokenToKVPool": (
            "it keeps no KV at all; run SGLang without --prefill-only-disable-kv-cache, or without a linker"
        ),
        f"{_POOLS}.MHATokenToKVPoolFP4": _IN_BLOCKS,
        f"{_POOLS}.MHATokenToKVPoolMXFP8": _IN_BLOCKS,
        f"{_POOLS}.MLATokenToKVPoolFP4": _IN_BLOCKS,
        f"{_POOLS}.PageMajorMHATokenToKVPool": (
            "a row holds a page of all layers; run SGLang without --enable-page-major-kv-layout"
        ),
        f"{_POOLS}.MHATokenToKOnlyPool": f"it keeps index keys alone: {_ALONE}",
        f"{_MINIMAX_POOLS}.MiniMaxM3Nvfp4MainKVPool": _ALONE,
        f"{_MINIMAX_POOLS}.MiniMaxM3Nvfp4IndexKPool": _ALONE,
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
            "unified memory keeps all layers of a slot side by side, so that a layer's page is not one range, and its "
            "pages move while a transfer waits; run SGLang without --enable-unified-memory"
        ),
        "sglang.srt.mem_cache.unified_draft_pool": (
            "a fused draft lies inside the target's unified memory; run SGLang without --enable-unified-memory"
        ),
        "sglang.srt.disaggregation.decode": (
            "requests of a decode server of disaggregated serving get their KV from a prefill server; "
            "run SGLang without a linker on decode servers"
        ),
        "sglang.srt.mem_cache.page_interleave_pool": (
            "each rank keeps every so many-th page alone, which no translation of a page's slots can say; "
            "run SGLang without --enable-kv-cache-sharding"
        ),
        "sglang.srt.mem_cache.hisparse_memory_pool": (
            "HiSparse keeps a page in host memory when it likes, so that a device row may hold no page; "
            "run SGLang without --enable-hisparse"
        ),
        "sglang.srt.mem_cache.dsa_cache_layer_split": (
            "each rank keeps some layers alone and borrows the others; run SGLang without "
            "--enable-dsa-cache-layer-split"
        ),
        "sglang.srt.mem_cache.pool_host": "it is a host mirror; describe the device pool behind it",
        "sglang.srt.mem_cache.memory_pool_host": "it is a host mirror; describe the device pool behind it",
        "sglang.srt.hardware_backend.npu": "pools of Ascend NPUs are not described; run on CUDA or CPU",
        "sglang.srt.hardware_backend": "pools of this accelerator are not described; run on CUDA or CPU",
    }
)


def refusal_of(found: object) -> UnsupportedKVCacheError:
    """Return the error that says why an object of SGLang's is not described, and what to do."""
    reason = _reason(found)
    return UnsupportedKVCacheError(
        _unknown(found) if reason is None else f"{class_name(found)} is not described: {reason}"
    )


def require_class(
    found: object, expected: str, what: str, *, reasons: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse a pool, or a part of one, whose class is not exactly the expected one.

    Args:
        found: the pool or the part.
        expected: full dotted name of the class.
        what: its place, in the message.
        reasons: full dotted name of a class to why it is not described in that place, and what to do.

    Raises:
        UnsupportedKVCacheError: it is of another class, whose bytes may mean something else.
    """
    if (name := class_name(found)) != expected:
        reason = reasons.get(name) or _reason(found) or _ELSEWHERE
        msg = f"{what} is of class {name}, and only {expected} is described there: {reason}"
        raise UnsupportedKVCacheError(msg)


def _reason(found: object) -> str | None:
    """Return why a class that is known here is not described; None for others, described ones among them."""
    name, module = class_name(found), type(found).__module__
    if name in _BY_CLASS:
        return _BY_CLASS[name]
    modules = (part for part in _BY_MODULE if module == part or module.startswith(f"{part}."))
    return next((_BY_MODULE[part] for part in modules), None)


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
