"""The adapter's half: what lies in the engine's pool, as spans over the engine's own tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeGuard, runtime_checkable

from kvlinker.description import DescribeRequest, KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker_example_engine.layout import FAMILY

if TYPE_CHECKING:
    import torch

__all__ = ["TilePool", "describe_tiles", "is_tile_pool"]


@runtime_checkable
class TilePool(Protocol):
    """What is read from the engine's pool. The engine is not imported: this module loads where it is not."""

    @property
    def tiles(self) -> torch.Tensor:
        """[layers, pages, ...] a page of one layer in each tile."""
        ...

    @property
    def scales(self) -> torch.Tensor:
        """[layers, pages, ...] what makes numbers of a tile's bytes."""
        ...

    @property
    def page_size(self) -> int:
        """Slots in a tile."""
        ...

    @property
    def tile_format(self) -> str:
        """What a value is."""
        ...

    @property
    def host_pages(self) -> int:
        """Pages that the engine keeps in host memory, where no tile is."""
        ...


def is_tile_pool(kv_cache: object) -> TypeGuard[TilePool]:
    """Return whether an object is a pool of this engine."""
    return isinstance(kv_cache, TilePool)


def describe_tiles(pool: TilePool, request: DescribeRequest) -> KVCacheDescription:
    """Return everything in the pool that a page needs; the engine's own bookkeeping is not part of it.

    Raises:
        UnsupportedKVCacheError: some pages are elsewhere.
    """
    if pool.host_pages:
        msg = (
            f"a {type(pool).__name__} keeps {pool.host_pages} pages in host memory, and a page that is not where its "
            f"slots say would come back as another one; run the engine without mirrors"
        )
        raise UnsupportedKVCacheError(msg)
    return KVCacheDescription(
        family=FAMILY,
        # The tree's page size and the pool's are two facts. If they differ, the strategy says so.
        page_size=request.page_size,
        buffers={"tiles": _spans("tiles", pool.tiles), "scales": _spans("scales", pool.scales)},
        layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(len(pool.tiles))),
        logical_pools=(LogicalPool(name="kv", page_size=pool.page_size),),
        # Bytes do not tell which fp8 they are. A fact goes into the key, if the strategy passes it on.
        facts={"tile_format": pool.tile_format},
    )


def _spans(role: str, tensor: torch.Tensor) -> tuple[BufferSpan, ...]:
    # A span for each layer, over the engine's memory: a copy would be restored, and never be read.
    # The owner is the tensor that the engine may replace; `verify` asks it where its memory is.
    return tuple(
        BufferSpan.from_tensor(layer, label=f"{role}[{i}]", owner=tensor)
        for i, layer in enumerate(tensor)
    )
