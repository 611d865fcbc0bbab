"""Stands in for an engine that somebody else ships; a real adapter has nothing like it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["MirroredTilePool", "TilePool"]

_HEADS, _HEAD_DIM = 2, 32


class TilePool:
    """KV of all layers in one tensor, a page of a layer in each tile, fp8 values with a scale for each head."""

    def __init__(
        self, *, layers: int, pages: int, page_size: int, tile_format: str = "fp8_e4m3fn"
    ) -> None:
        """Allocate the tiles."""
        import torch

        self.page_size = page_size
        self.tile_format = tile_format
        self.host_pages = 0
        tile = (2, _HEADS, page_size, _HEAD_DIM)
        self.tiles = torch.zeros((layers, pages, *tile), dtype=torch.uint8)
        """[layers, pages, K and V, heads, slots, head_dim]"""
        self.scales = torch.zeros((layers, pages, 2, _HEADS), dtype=torch.float32)
        """[layers, pages, K and V, heads]"""
        self.slot_of_request: dict[str, torch.Tensor] = {
            "running": torch.zeros(64, dtype=torch.int32)
        }


class MirroredTilePool(TilePool):
    """The same, with half of the pages in host memory."""

    def __init__(self, *, layers: int, pages: int, page_size: int) -> None:
        """Allocate the tiles."""
        super().__init__(layers=layers, pages=pages, page_size=page_size)
        self.host_pages = pages // 2
