"""How large the rows of a DSA cache are, as their value formats say."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "FACTS",
    "FAMILY",
    "INDEX_BYTES",
    "INDEX_KPOOL",
    "INDEX_VALUES",
    "LATENT_VALUES",
    "ROPE_VALUES",
    "ROW_BYTES",
]

FAMILY = "dsa"
INDEX_KPOOL = "index_kpool"
"""Fact: neighbouring tokens that share an index key; 1 where it is not stated."""
FACTS = ("kv_format", "index_format", INDEX_KPOOL)
"""What a description states; another fact may change what the bytes mean."""
LATENT_VALUES, ROPE_VALUES, INDEX_VALUES = 512, 64, 128
"""config.json of DeepSeek V3.2: kv_lora_rank, qk_rope_head_dim, index_head_dim."""
ROW_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "bf16": (LATENT_VALUES + ROPE_VALUES) * 2,
        # 512 e4m3 values, 4 fp32 scales, 64 rope values in bf16.
        "fp8_packed_656": LATENT_VALUES + 4 * 4 + ROPE_VALUES * 2,
        "fp8_e4m3fn": LATENT_VALUES + ROPE_VALUES,
    }
)
"""Bytes of a slot's latent and rope."""
INDEX_BYTES: Mapping[str, int] = MappingProxyType({"fp8_e4m3fn_fp32_scale": INDEX_VALUES + 4})
"""Bytes of an index key: e4m3 values and one scale; a page has all keys, then all scales."""
