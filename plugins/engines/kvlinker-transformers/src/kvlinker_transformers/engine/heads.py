"""Heads: buffers of K or V heads, token-major or head-major, and the facts that tell them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvlinker.description import Fact
from kvlinker_transformers.engine.buffers import HeadMajorBuffer, PageBuffer
from kvlinker_transformers.engine.codecs import PlainRows, plain_dtype

__all__ = ["HeadBuffer", "HeadBuffers", "rows_of"]

HeadBuffer: TypeAlias = PageBuffer | HeadMajorBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBuffers:
    """How the K or V heads of a layer are kept: one slot's are [heads, head_dim] values, fp8 ones without scales."""

    heads: int
    head_dim: int
    kv_format: str
    """`bf16`, `fp16`, `fp32` or `fp8_e4m3fn`."""
    page_size: int
    device: torch.device
    head_major: bool
    """A page is [heads, slots, head_dim] instead of [slots, heads, head_dim]."""

    @property
    def facts(self) -> Mapping[str, Fact]:
        """What bytes do not tell of these buffers."""
        return {
            "kv_layout": "head_major" if self.head_major else "token_major",
            "kv_format": self.kv_format,
            "kv_scaled": 0,
        }

    def allocate(self, pages: int) -> HeadBuffer:
        """Return the new buffer of one layer.

        Raises:
            ContractError: the format is unknown.
        """
        dtype = plain_dtype(self.kv_format)
        if self.head_major:
            return HeadMajorBuffer(
                heads=self.heads,
                head_dim=self.head_dim,
                dtype=dtype,
                pages=pages,
                page_size=self.page_size,
                device=self.device,
            )
        codec = PlainRows(self.heads * self.head_dim, dtype)
        return PageBuffer(codec, pages=pages, rows_per_page=self.page_size, device=self.device)


def rows_of(buffers: Iterable[HeadBuffer]) -> tuple[torch.Tensor, ...]:
    """Return the memory of each buffer with a row in each row: a slot, or a head-major page."""
    return tuple(
        buffer.rows if isinstance(buffer, PageBuffer) else buffer.page_rows for buffer in buffers
    )
