"""Codecs: how one row of KV values becomes bytes in a pool, and values again.

Encoding may round, but the same bytes always decode to the same values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import torch
from typing_extensions import override

from kvlinker.errors import ContractError

__all__ = [
    "IndexKeyRows",
    "PackedLatentRows",
    "PlainRows",
    "RowCodec",
    "RowParts",
    "V4Rows",
    "plain_dtype",
    "plain_format",
]

RowParts: TypeAlias = tuple[torch.Tensor, ...]
"""The parts of T rows: uint8 [T, part_bytes] each."""

_E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0
"""Largest finite value of e4m3fn; torch turns what lies above into NaN instead of saturating."""

_PLAIN_FORMATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3fn": _E4M3,
}


def plain_dtype(value_format: str) -> torch.dtype:
    """Return the dtype of values that are stored as they are.

    Raises:
        ContractError: the format has scales or a layout of its own, or is unknown.
    """
    if value_format not in _PLAIN_FORMATS:
        msg = f"format {value_format!r} is no plain dtype; the plain ones are {', '.join(_PLAIN_FORMATS)}"
        raise ContractError(msg)
    return _PLAIN_FORMATS[value_format]


def plain_format(dtype: torch.dtype) -> str:
    """Return the format name of values stored in `dtype` as they are.

    Raises:
        ContractError: pools hold no such dtype.
    """
    for value_format, known in _PLAIN_FORMATS.items():
        if known is dtype:
            return value_format
    msg = f"KV pools cannot hold {dtype}; they hold {', '.join(_PLAIN_FORMATS)}"
    raise ContractError(msg)


class RowCodec(ABC):
    """The byte layout of one row of values."""

    def __init__(
        self, *, value_format: str, width: int, part_bytes: tuple[int, ...], page_align: int = 1
    ) -> None:
        self.value_format = value_format
        """Name of the format, as a description states it."""
        self.width = width
        """Values in a row."""
        self.part_bytes = part_bytes
        """Bytes of each part; a page holds all first parts, then all second parts."""
        self.page_align = page_align
        """A page is padded to a multiple of this many bytes."""

    def page_bytes(self, rows: int) -> int:
        """Return the bytes of a page of `rows` rows, padding included."""
        return -(-rows * sum(self.part_bytes) // self.page_align) * self.page_align

    @abstractmethod
    def encode(self, values: torch.Tensor) -> RowParts:
        """Return the bytes of rows: floating point [T, width] in, uint8 [T, part_bytes] per part out."""

    @abstractmethod
    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the values of rows: uint8 [T, part_bytes] per part in, `dtype` [T, width] out."""


class PlainRows(RowCodec):
    """Values side by side in one dtype; fp8 values saturate and have no scale."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__(
            value_format=plain_format(dtype), width=width, part_bytes=(width * dtype.itemsize,)
        )
        self._dtype = dtype

    @override
    def encode(self, values: torch.Tensor) -> RowParts:
        if self._dtype is _E4M3:
            values = values.float().clamp(-_E4M3_MAX, _E4M3_MAX)
        return (_bytes_of(values.to(self._dtype)),)

    @override
    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        (row,) = parts
        return _values_of(row, self._dtype).to(dtype)


class PackedLatentRows(RowCodec):
    """MLA latents as DeepSeek's sparse attention kernels read them: 656 B for 512 latents and 64 roped.

    512 e4m3 values, one fp32 scale for each tile of 128 of them, then the roped key in bf16.
    """

    TILE = 128

    def __init__(self, latent: int = 512, rope: int = 64) -> None:
        if (latent, rope) != (512, 64):
            msg = f"packed fp8 rows hold 512 latents and 64 roped values, got {latent} and {rope}; use bf16"
            raise ContractError(msg)
        self._latent_bytes = latent
        self._scale_bytes = latent // self.TILE * torch.float32.itemsize
        row_bytes = self._latent_bytes + self._scale_bytes + rope * torch.bfloat16.itemsize
        super().__init__(
            value_format="fp8_packed_656", width=latent + rope, part_bytes=(row_bytes,)
        )

    @override
    def encode(self, values: torch.Tensor) -> RowParts:
        tiles = values[:, : self._latent_bytes].float().unflatten(1, (-1, self.TILE))
        quantized, scales = _scaled_e4m3(tiles)
        rope = _bytes_of(values[:, self._latent_bytes :].to(torch.bfloat16))
        return (torch.cat([quantized, _bytes_of(scales), rope], dim=1),)

    @override
    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        (row,) = parts
        sizes = [
            self._latent_bytes,
            self._scale_bytes,
            row.shape[1] - self._latent_bytes - self._scale_bytes,
        ]
        quantized, scales, rope = row.split(sizes, dim=1)
        tiles = _values_of(quantized, _E4M3).float().unflatten(1, (-1, self.TILE))
        latent = (tiles * _values_of(scales, torch.float32).unsqueeze(-1)).flatten(1)
        return torch.cat([latent.to(dtype), _values_of(rope, torch.bfloat16).to(dtype)], dim=1)


class IndexKeyRows(RowCodec):
    """Index keys in pages: all e4m3 keys of the page, then one fp32 scale for each key."""

    def __init__(self, width: int = 128) -> None:
        super().__init__(
            value_format="fp8_e4m3fn_fp32_scale",
            width=width,
            part_bytes=(width, torch.float32.itemsize),
        )

    @override
    def encode(self, values: torch.Tensor) -> RowParts:
        quantized, scales = _scaled_e4m3(values.float().unsqueeze(1))
        return quantized, _bytes_of(scales)

    @override
    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        quantized, scales = parts
        return (_values_of(quantized, _E4M3).float() * _values_of(scales, torch.float32)).to(dtype)


class V4Rows(RowCodec):
    """DeepSeek V4 keys in block-split pages: all 576 B data rows, then all 8 B scale rows, padded to 576.

    A data row is 448 e4m3 values and 64 roped ones in bf16; a scale row is 7 ue8m0 exponents, one for each
    tile of 64, and a pad byte.
    """

    NOPE = 448
    ROPE = 64
    TILE = 64
    EXPONENT_BIAS = 127
    """ue8m0 stores 2**e as the byte e + 127."""
    SMALLEST_EXPONENT = -126

    def __init__(self, head_dim: int = 512) -> None:
        if head_dim != self.NOPE + self.ROPE:
            msg = f"DeepSeek V4 rows hold {self.NOPE + self.ROPE} values, got a head of {head_dim}"
            raise ContractError(msg)
        data_bytes = self.NOPE + self.ROPE * torch.bfloat16.itemsize
        super().__init__(
            value_format="fp8_e4m3fn_ue8m0",
            width=head_dim,
            part_bytes=(data_bytes, self.NOPE // self.TILE + 1),
            page_align=data_bytes,
        )

    @override
    def encode(self, values: torch.Tensor) -> RowParts:
        tiles = values[:, : self.NOPE].float().unflatten(1, (-1, self.TILE))
        exponents = self._exponents(tiles.abs().amax(-1))
        quantized = torch.ldexp(tiles, -exponents.unsqueeze(-1)).to(_E4M3)
        rope = _bytes_of(values[:, self.NOPE :].to(torch.bfloat16))
        scales = torch.zeros_like(rope[:, : self.part_bytes[1]])
        scales[:, :-1] = (exponents + self.EXPONENT_BIAS).to(torch.uint8)
        return torch.cat([_bytes_of(quantized).flatten(1), rope], dim=1), scales

    def _exponents(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the smallest exponents whose power of two brings `largest` into e4m3's range."""
        mantissa, exponent = torch.frexp(largest / _E4M3_MAX)
        lowest = 0.5
        # x = m * 2**e with m in [lowest, 1): 2**(e - 1) is enough only where x is that power itself.
        return torch.where(mantissa > lowest, exponent, exponent - 1).clamp_min(
            self.SMALLEST_EXPONENT
        )

    @override
    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        row, scales = parts
        tiles = _values_of(row[:, : self.NOPE], _E4M3).float().unflatten(1, (-1, self.TILE))
        exponents = scales[:, :-1].to(torch.int32) - self.EXPONENT_BIAS
        nope = torch.ldexp(tiles, exponents.unsqueeze(-1)).flatten(1)
        rope = _values_of(row[:, self.NOPE :], torch.bfloat16)
        return torch.cat([nope.to(dtype), rope.to(dtype)], dim=1)


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _values_of(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return part.contiguous().view(dtype)


def _scaled_e4m3(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 bytes [T, tiles * n] and fp32 scales [T, tiles] of fp32 tiles [T, tiles, n]."""
    # The floor keeps a tile of zeros from a scale of zero, which would decode to NaN.
    scales = (tiles.abs().amax(-1) / _E4M3_MAX).clamp_min(1e-12)
    quantized = (tiles / scales.unsqueeze(-1)).clamp(-_E4M3_MAX, _E4M3_MAX).to(_E4M3)
    return _bytes_of(quantized).flatten(1), scales
