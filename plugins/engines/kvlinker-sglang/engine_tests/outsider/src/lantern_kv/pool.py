"""The pool: a page of all layers in one row, and three numbers beside each slot."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import KVCache

__all__ = ["SLOT_BYTES", "DimLanternPool", "LanternPool"]

SLOT_BYTES = 40
"""Of a slot in a layer's part of a lamp."""


class LanternPool(KVCache):  # type: ignore[misc, no-any-unimported]  # SGLang is untyped where it is not installed
    """KV of lantern attention."""

    def __init__(self, *, layers: int, pages: int, page_size: int) -> None:
        """Allocate the pages that requests may use, and one for padding."""
        super().__init__(
            size=pages * page_size,
            page_size=page_size,
            dtype=torch.uint8,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
            start_layer=0,
            end_layer=layers,
        )
        self.lamps = torch.zeros((pages + 1, layers, page_size * SLOT_BYTES), dtype=torch.uint8)
        """[pages, layers, bytes]"""
        self.wicks = [torch.zeros((pages + 1) * page_size, 3) for _ in range(layers)]
        """For each layer [slots, 3]."""
        self.glow = torch.zeros(layers)
        """Scratch of the running forward."""

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's lamps, once they are there."""
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id)
        return self.lamps[:, layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's wicks, once they are there."""
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id)
        return self.wicks[layer_id]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(
        self, layer: object, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        """Store what a forward computed; the model has kernels of its own for it."""
        raise NotImplementedError


class DimLanternPool(LanternPool):
    """Wicks are kept in host memory."""
