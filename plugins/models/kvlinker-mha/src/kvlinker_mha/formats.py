"""What the buffers of an MHA cache are called, and how they are kept."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "DRAFT_FACTS",
    "FACTS",
    "FAMILY",
    "INDEX_BITS",
    "INDEX_BLOCKS",
    "INDEX_FACTS",
    "INDEX_KEYS",
    "INDEX_SCALES",
    "INDEX_VALUES",
    "ROWS_ARE_PAGES",
    "SCALED_FORMATS",
    "SCALES",
    "VALUES",
    "VALUE_BYTES",
]

FAMILY = "mha"
FACTS = ("kv_layout", "kv_format", "kv_scaled")
"""What a description states; another fact may change what the bytes mean."""
DRAFT_FACTS = ("draft_kv_layout", "draft_kv_format")
"""What is stated where drafts keep K and V otherwise than the target."""
INDEX_FACTS = ("index_format", "index_values", "index_has_values")
"""What is stated where layers have index keys: their type, how many values a key has, and whether some layers keep
values that their index attends to (1) or none does (0)."""
VALUES = ("k", "v")
SCALES = ("k_scale", "v_scale")
INDEX_KEYS, INDEX_SCALES, INDEX_VALUES = "index_k", "index_k_scale", "index_v"
"""Roles of index keys; some layers have values beside them, which their index attends to."""
ROWS_ARE_PAGES: Mapping[str, bool] = MappingProxyType(
    {
        # [slots, heads, head_dim]: a slot's bytes are together.
        "token_major": False,
        # [pages, heads, slots, head_dim]: a slot's bytes are scattered over its page.
        "head_major": True,
    }
)
VALUE_BYTES: Mapping[str, int] = MappingProxyType(
    {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3fn": 1, "fp8_e5m2": 1}
)
"""Formats whose sizes are known, for caches that no engine has described yet."""
SCALED_FORMATS: Mapping[str, int] = MappingProxyType(
    {
        # Two values a byte; 16 share an exponent.
        "fp4_e2m1_block16_e8m0": 8,
        # NVFP4: two values a byte; 16 share an e4m3 scale.
        "fp4_e2m1_block16_e4m3": 8,
        # 32 values share an exponent; the exponents of a page of 128 slots are interleaved.
        "mxfp8_e4m3fn_block32_interleaved": 32,
    }
)
"""Formats of values that have scales in buffers, to the bytes of values that share one of a byte.

What scales are, and in which order, is in the name.
"""
INDEX_BITS: Mapping[str, int] = MappingProxyType(
    {"bf16": 16, "fp16": 16, "fp32": 32, "fp8_e4m3fn": 8, "fp8_e5m2": 8, "fp4_e2m1_block16_e4m3": 4}
)
"""Formats of index keys to the bits of a value."""
INDEX_BLOCKS: Mapping[str, int] = MappingProxyType({"fp4_e2m1_block16_e4m3": 16})
"""Formats of index keys with scales in buffers, to how many values share a scale of one byte."""
