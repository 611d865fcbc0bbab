"""Caches: the layers that let a transformers model read and write one family's pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvlinker.errors import UnsupportedKVCacheError
from kvlinker_transformers.engine.layers import (
    IndexedLayer,
    LatentLayer,
    MHALayer,
    MHAWindowLayer,
    PagedCache,
    PagedLayer,
)
from kvlinker_transformers.engine.layers_v4 import C4Layer, C128Layer, V4Attention, WindowLayer
from kvlinker_transformers.engine.pools_latent import DSAPools, MLAPools
from kvlinker_transformers.engine.pools_mha import MHAPools
from kvlinker_transformers.engine.pools_swa import HybridPools
from kvlinker_transformers.engine.pools_v4 import V4Pools
from kvlinker_transformers.engine.sequence import PagedSequence
from kvlinker_transformers.pools import PagedPools

__all__ = ["AttentionBlock", "paged_cache"]


class AttentionBlock(Protocol):
    """A decoder layer of a model."""

    @property
    def self_attn(self) -> V4Attention:
        """Its attention module."""
        ...


def paged_cache(
    pools: PagedPools, sequence: PagedSequence, blocks: Sequence[AttentionBlock]
) -> PagedCache:
    """Return an empty cache of one sequence over the pools.

    Args:
        pools: where its pages are.
        sequence: its page tables.
        blocks: the model's decoder layers; only DeepSeek V4 looks at them.

    Raises:
        UnsupportedKVCacheError: no cache layers are known for such pools.
    """
    return PagedCache(_layers(pools, sequence, blocks))


def _layers(
    pools: PagedPools, sequence: PagedSequence, blocks: Sequence[AttentionBlock]
) -> list[PagedLayer]:
    if isinstance(pools, MHAPools):
        pairs = zip(pools.k, pools.v, strict=True)
        return [MHALayer(i, sequence, keys, values) for i, (keys, values) in enumerate(pairs)]
    if isinstance(pools, HybridPools):
        return [_hybrid_layer(i, pools, sequence) for i in range(len(pools.layers))]
    if isinstance(pools, DSAPools):
        return [_dsa_layer(i, pools, sequence) for i in range(pools.geometry.layers)]
    if isinstance(pools, MLAPools):
        return [LatentLayer(i, sequence, latent) for i, latent in enumerate(pools.latent)]
    if isinstance(pools, V4Pools):
        return [_v4_layer(i, pools, sequence, block) for i, block in enumerate(blocks)]
    msg = f"no cache layers for pools of family {pools.family!r} ({type(pools).__name__})"
    raise UnsupportedKVCacheError(msg)


def _hybrid_layer(layer: int, pools: HybridPools, sequence: PagedSequence) -> PagedLayer:
    keys, values = pools.k[layer], pools.v[layer]
    if pools.geometry.slides[layer]:
        return MHAWindowLayer(layer, sequence, pools.geometry.window, keys, values)
    return MHALayer(layer, sequence, keys, values)


def _dsa_layer(layer: int, pools: DSAPools, sequence: PagedSequence) -> PagedLayer:
    if pools.geometry.owns_index[layer]:
        return IndexedLayer(layer, sequence, pools.latent[layer], pools.index_k[layer])
    return LatentLayer(layer, sequence, pools.latent[layer])


def _v4_layer(
    layer: int, pools: V4Pools, sequence: PagedSequence, block: AttentionBlock
) -> PagedLayer:
    if layer in pools.c4:
        return C4Layer(layer, sequence, pools, pools.c4[layer], block.self_attn)
    if layer in pools.c128:
        return C128Layer(layer, sequence, pools, pools.c128[layer])
    return WindowLayer(layer, sequence, pools)
