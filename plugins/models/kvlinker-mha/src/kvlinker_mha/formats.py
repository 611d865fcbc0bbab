"""What the buffers of an MHA cache are called, and how they are kept."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["FACTS", "FAMILY", "ROWS_ARE_PAGES", "SCALED_FORMATS", "SCALES", "VALUES", "VALUE_BYTES"]

FAMILY = "mha"
FACTS = ("kv_layout", "kv_format", "kv_scaled")
"""What a description states; another fact may change what the bytes mean."""
VALUES = ("k", "v")
SCALES = ("k_scale", "v_scale")
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
SCALED_FORMATS = (
    # Two values a byte; 16 share an exponent (NVFP4 has e4m3 scales).
    "fp4_e2m1_block16_e8m0",
    # 32 values share an exponent; the exponents of a page of 128 slots are interleaved.
    "mxfp8_e4m3fn_block32_interleaved",
)
"""Formats of values that have scales in buffers; what scales are, and in which order, is in the name."""
