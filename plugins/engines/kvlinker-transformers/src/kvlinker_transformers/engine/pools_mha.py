"""MHA pools: a K and a V buffer in every layer, token-major or head-major."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from typing_extensions import override

from kvlinker.description import Fact, LayerFacts, LogicalPool
from kvlinker_transformers.engine.geometry import MHAGeometry
from kvlinker_transformers.engine.heads import HeadBuffers, rows_of
from kvlinker_transformers.pools import KV, PagedPools

__all__ = ["MHAPools"]


class MHAPools(PagedPools):
    """K and V rows of [kv_heads, head_dim] values, fp8 ones without scales."""

    family = "mha"
    is_replicated = False

    def __init__(
        self,
        geometry: MHAGeometry,
        *,
        pages: int,
        page_size: int,
        kv_format: str,
        device: torch.device,
        head_major: bool = False,
    ) -> None:
        """Allocate the buffers.

        Args:
            geometry: shape of the model's KV cache.
            pages: pages of the index space `kv`, the reserved one included.
            page_size: slots in a page.
            kv_format: `bf16`, `fp16`, `fp32` or `fp8_e4m3fn`.
            device: where the memory is.
            head_major: a page is [kv_heads, slots, head_dim] instead of [slots, kv_heads, head_dim].

        Raises:
            ContractError: the format is unknown.
        """
        super().__init__(page_size=page_size, pages={KV: pages}, device=device)
        self.geometry = geometry
        self._heads = HeadBuffers(
            heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            kv_format=kv_format,
            page_size=page_size,
            device=device,
            head_major=head_major,
        )
        self.k = tuple(self._heads.allocate(pages) for _ in range(geometry.layers))
        self.v = tuple(self._heads.allocate(pages) for _ in range(geometry.layers))

    @property
    @override
    def layers(self) -> tuple[LayerFacts, ...]:
        return tuple(LayerFacts(layer=i, global_layer=i) for i in range(self.geometry.layers))

    @property
    @override
    def logical_pools(self) -> tuple[LogicalPool, ...]:
        return (LogicalPool(name=KV, page_size=self.page_size),)

    @property
    @override
    def facts(self) -> Mapping[str, Fact]:
        return self._heads.facts

    @override
    def tensors(self) -> Mapping[str, tuple[torch.Tensor, ...]]:
        return {"k": rows_of(self.k), "v": rows_of(self.v)}
