"""How large a row of a latent cache is, as its value format says."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvlinker.errors import ContractError

__all__ = [
    "FACTS",
    "FAMILY",
    "LATENTS_IN_ROW",
    "LATENT_VALUES",
    "PACKED",
    "PACKED_ROW_BYTES",
    "SCALED",
    "VALUE_BYTES",
    "row_bytes",
    "scale_bytes",
]

FAMILY = "mla"
LATENTS_IN_ROW = "latents_in_row"
"""Fact: latents in a row that is a rank's share of a page, where ranks take the slots of a page in turn."""
FACTS = ("kv_format", "latent_values", LATENTS_IN_ROW)
"""What a description states; another fact may change what the bytes mean."""
LATENT_VALUES = 512 + 64
"""Values of a slot, latent and rope (config.json of DeepSeek V3: kv_lora_rank, qk_rope_head_dim)."""
VALUE_BYTES: Mapping[str, int] = MappingProxyType(
    {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3fn": 1}
)
PACKED = "fp8_packed_656"
PACKED_ROW_BYTES = 512 + 4 * 4 + 64 * 2
"""512 e4m3 values, 4 fp32 scales, 64 rope values in bf16: the format has one size."""
SCALED = "fp4_e2m1_block16_e8m0"
"""Two values a byte; 16 share an exponent, which is kept in a buffer of its own (NVFP4 has e4m3 scales)."""
_BLOCK = 16


def row_bytes(kv_format: str, values: int) -> int:
    """Return the bytes of a slot of so many values in one of the formats above, without scales kept elsewhere.

    Raises:
        ContractError: the format holds another number of values.
    """
    if kv_format == SCALED:
        return scale_bytes(values) * _BLOCK // 2
    if kv_format != PACKED:
        return values * VALUE_BYTES[kv_format]
    if values != LATENT_VALUES:
        msg = f"family {FAMILY!r}: {PACKED} holds {LATENT_VALUES} values, got latent_values {values}; use bf16"
        raise ContractError(msg)
    return PACKED_ROW_BYTES


def scale_bytes(values: int) -> int:
    """Return the bytes of the exponents of a slot of so many values.

    Raises:
        ContractError: the last block of values is not whole.
    """
    if values % _BLOCK:
        msg = f"family {FAMILY!r}: {SCALED} holds blocks of {_BLOCK} values, got latent_values {values}; use bf16"
        raise ContractError(msg)
    return values // _BLOCK
