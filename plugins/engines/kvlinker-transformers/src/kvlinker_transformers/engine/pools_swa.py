"""Hybrid pools: K and V of every token in some layers, and of the last ones in those that look through a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from kvlinker.description import Fact, LayerFacts, LogicalPool
from kvlinker_transformers.engine.geometry import HybridGeometry
from kvlinker_transformers.engine.heads import HeadBuffer, HeadBuffers, rows_of
from kvlinker_transformers.pools import KV, SWA, PagedPools

__all__ = ["HybridPools"]


class HybridPools(PagedPools):
    """K and V rows of [kv_heads, head_dim] values: index space `kv` for full layers, `swa` for windows."""

    family = "swa"
    is_replicated = False

    def __init__(
        self,
        geometry: HybridGeometry,
        *,
        pages: int,
        swa_pages: int,
        page_size: int,
        kv_format: str,
        device: torch.device,
        head_major: bool = False,
    ) -> None:
        """Allocate the buffers.

        Args:
            geometry: shape of the model's KV cache.
            pages: pages of the index space `kv`, the reserved one included.
            swa_pages: pages of the index space `swa`, the reserved one included.
            page_size: slots in a page; the window need not be a multiple of it.
            kv_format: `bf16`, `fp16`, `fp32` or `fp8_e4m3fn`.
            device: where the memory is.
            head_major: a page is [kv_heads, slots, head_dim] instead of [slots, kv_heads, head_dim].

        Raises:
            ContractError: the format is unknown.
        """
        super().__init__(page_size=page_size, pages={KV: pages, SWA: swa_pages}, device=device)
        self.geometry = geometry
        self._heads = HeadBuffers(
            heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            kv_format=kv_format,
            page_size=page_size,
            device=device,
            head_major=head_major,
        )
        self.k = tuple(map(self._buffer, geometry.slides))
        """One for each layer, in order, of both kinds."""
        self.v = tuple(map(self._buffer, geometry.slides))

    def _buffer(self, slides: bool) -> HeadBuffer:  # noqa: FBT001  # of one layer, by map
        return self._heads.allocate(self.pages[SWA if slides else KV])

    @property
    @override
    def layers(self) -> tuple[LayerFacts, ...]:
        return tuple(
            LayerFacts(layer=i, global_layer=i, kind="sliding" if slides else "attention")
            for i, slides in enumerate(self.geometry.slides)
        )

    @property
    @override
    def logical_pools(self) -> tuple[LogicalPool, ...]:
        return (
            LogicalPool(name=KV, page_size=self.page_size),
            LogicalPool(name=SWA, page_size=self.page_size, window=self.geometry.window),
        )

    @property
    @override
    def facts(self) -> Mapping[str, Fact]:
        return self._heads.facts

    @override
    def tensors(self) -> Mapping[str, tuple[torch.Tensor, ...]]:
        return {
            "k": self._of_kind(self.k, slides=False),
            "v": self._of_kind(self.v, slides=False),
            "swa_k": self._of_kind(self.k, slides=True),
            "swa_v": self._of_kind(self.v, slides=True),
        }

    def _of_kind(self, buffers: Sequence[HeadBuffer], *, slides: bool) -> tuple[torch.Tensor, ...]:
        pairs = zip(buffers, self.geometry.slides, strict=True)
        return rows_of(buffer for buffer, kind in pairs if kind is slides)
