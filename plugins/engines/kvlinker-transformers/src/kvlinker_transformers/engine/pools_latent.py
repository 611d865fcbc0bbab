"""Latent pools: one compressed row for each token and layer (MLA), with index keys beside it (DSA)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from typing_extensions import override

from kvlinker.description import Fact, IndexerKind, LayerFacts, LogicalPool
from kvlinker_transformers.engine.buffers import PageBuffer
from kvlinker_transformers.engine.codecs import (
    IndexKeyRows,
    PackedLatentRows,
    PlainRows,
    RowCodec,
    plain_dtype,
)
from kvlinker_transformers.engine.geometry import LatentGeometry
from kvlinker_transformers.pools import KV, PagedPools

__all__ = ["DSAPools", "LatentPools", "MLAPools", "latent_codec"]


def latent_codec(kv_format: str, geometry: LatentGeometry) -> RowCodec:
    """Return the row layout of latents in `bf16`, `fp16`, `fp32`, `fp8_e4m3fn` or `fp8_packed_656`.

    Raises:
        ContractError: the format is unknown, or does not hold rows of this geometry.
    """
    if kv_format == "fp8_packed_656":
        return PackedLatentRows(geometry.latent, geometry.rope)
    return PlainRows(geometry.latent + geometry.rope, plain_dtype(kv_format))


class LatentPools(PagedPools):
    """Rows of latent and roped values, one for each slot and layer."""

    is_replicated = True
    latent_role: ClassVar[str]

    def __init__(
        self,
        geometry: LatentGeometry,
        *,
        pages: int,
        page_size: int,
        kv_format: str,
        device: torch.device,
    ) -> None:
        """Allocate the buffers.

        Args:
            geometry: shape of the model's KV cache.
            pages: pages of the index space `kv`, the reserved one included.
            page_size: slots in a page.
            kv_format: see `latent_codec`.
            device: where the memory is.

        Raises:
            ContractError: the format is unknown, or does not hold rows of this geometry.
        """
        super().__init__(page_size=page_size, pages={KV: pages}, device=device)
        self.geometry = geometry
        codec = latent_codec(kv_format, geometry)
        self._kv_format = codec.value_format
        self.latent = tuple(
            PageBuffer(codec, pages=pages, rows_per_page=page_size, device=device)
            for _ in range(geometry.layers)
        )

    @property
    @override
    def logical_pools(self) -> tuple[LogicalPool, ...]:
        return (LogicalPool(name=KV, page_size=self.page_size),)

    @property
    @override
    def layers(self) -> tuple[LayerFacts, ...]:
        return tuple(
            LayerFacts(layer=i, global_layer=i, indexer=self._indexer(i))
            for i in range(self.geometry.layers)
        )

    def _indexer(self, layer: int) -> IndexerKind:
        if not self.geometry.index_dim:
            return IndexerKind.NONE
        return IndexerKind.OWN if self.geometry.owns_index[layer] else IndexerKind.SHARED

    @property
    @override
    def facts(self) -> Mapping[str, Fact]:
        return {"kv_format": self._kv_format}

    @override
    def tensors(self) -> Mapping[str, tuple[torch.Tensor, ...]]:
        return {self.latent_role: tuple(buffer.rows for buffer in self.latent)}


class MLAPools(LatentPools):
    """Multi-head latent attention: DeepSeek V3."""

    family = "mla"
    latent_role = "latent"


class DSAPools(LatentPools):
    """DeepSeek sparse attention (V3.2, GLM): latents, and fp8 index keys in the layers that own an index."""

    family = "dsa"
    latent_role = "kv"

    def __init__(
        self,
        geometry: LatentGeometry,
        *,
        pages: int,
        page_size: int,
        kv_format: str,
        device: torch.device,
        index_codec: RowCodec | None = None,
    ) -> None:
        """Allocate the buffers; `index_codec` is fp8 with one fp32 scale by default."""
        super().__init__(
            geometry, pages=pages, page_size=page_size, kv_format=kv_format, device=device
        )
        codec = index_codec or IndexKeyRows(geometry.index_dim)
        self._index_format = codec.value_format
        # A layer that uses another one's index keeps a buffer without rows: its role has a place for every layer.
        self.index_k = tuple(
            PageBuffer(codec, pages=pages if owned else 0, rows_per_page=page_size, device=device)
            for owned in geometry.owns_index
        )

    @property
    @override
    def facts(self) -> Mapping[str, Fact]:
        return {**super().facts, "index_format": self._index_format}

    @override
    def tensors(self) -> Mapping[str, tuple[torch.Tensor, ...]]:
        return {**super().tensors(), "index_k": tuple(b.page_rows for b in self.index_k)}
