"""Caches: the layers that let a transformers model read and write one family's pools."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from transformers.cache_utils import Cache
from typing_extensions import override

from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker_transformers.engine.layers import (
    IndexedLayer,
    LatentLayer,
    MHALayer,
    MHAWindowLayer,
    PagedLayer,
)
from kvlinker_transformers.engine.layers_state import StateLayer
from kvlinker_transformers.engine.layers_v4 import C4Layer, C128Layer, V4Attention, WindowLayer
from kvlinker_transformers.engine.pools_latent import DSAPools, MLAPools
from kvlinker_transformers.engine.pools_mha import MHAPools
from kvlinker_transformers.engine.pools_state import StatePools
from kvlinker_transformers.engine.pools_swa import HybridPools
from kvlinker_transformers.engine.pools_v4 import V4Pools
from kvlinker_transformers.engine.sequence import PagedSequence
from kvlinker_transformers.pools import PagedPools

__all__ = ["AttentionBlock", "PagedCache", "paged_cache"]

_Layer: TypeAlias = PagedLayer | StateLayer


class AttentionBlock(Protocol):
    """A decoder layer of a model."""

    @property
    def self_attn(self) -> V4Attention:
        """Its attention module."""
        ...


class PagedCache(Cache):
    """A transformers cache of one sequence whose layers keep everything in paged pools."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        super().__init__(layers=list(layers))
        self._paged = [layer for layer in layers if isinstance(layer, PagedLayer)]
        self._states = {layer.layer: layer for layer in layers if isinstance(layer, StateLayer)}

    @property
    def tokens(self) -> int:
        """Tokens that every layer has seen."""
        return self._paged[0].tokens

    @property
    def is_fed_by_token(self) -> bool:
        """Whether the model computes one token in a pass, once there are others before it."""
        return any(layer.is_fed_by_token for layer in self._states.values())

    def resume(self, tokens: int) -> None:
        """Take the first `tokens` tokens as seen, in every layer."""
        for layer in self._paged:
            layer.resume(tokens)
        for state in self._states.values():
            state.resume()

    @override
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._state(layer_idx).conv_state(state_idx)

    @override
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._state(layer_idx).recurrence(state_idx)

    def _state(self, layer: int) -> StateLayer:
        if layer not in self._states:
            msg = (
                f"layer {layer} keeps pages and no state; layers {sorted(self._states)} keep states"
            )
            raise ContractError(msg)
        return self._states[layer]


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
) -> Sequence[_Layer]:
    if isinstance(pools, StatePools):
        return _state_layers(pools, sequence)
    if isinstance(pools, MHAPools | MLAPools):
        return [_page_layer(i, i, pools, sequence) for i in range(pools.geometry.layers)]
    if isinstance(pools, HybridPools):
        return [_hybrid_layer(i, pools, sequence) for i in range(len(pools.layers))]
    if isinstance(pools, DSAPools):
        return [_dsa_layer(i, pools, sequence) for i in range(pools.geometry.layers)]
    if isinstance(pools, V4Pools):
        return [_v4_layer(i, pools, sequence, block) for i, block in enumerate(blocks)]
    msg = f"no cache layers for pools of family {pools.family!r} ({type(pools).__name__})"
    raise UnsupportedKVCacheError(msg)


def _page_layer(
    layer: int, number: int, pools: MHAPools | MLAPools, sequence: PagedSequence
) -> PagedLayer:
    """Return a layer of full attention: the so-manyth of those that keep pages."""
    if isinstance(pools, MHAPools):
        return MHALayer(layer, sequence, pools.k[number], pools.v[number])
    return LatentLayer(layer, sequence, pools.latent[number])


def _state_layers(pools: StatePools, sequence: PagedSequence) -> list[_Layer]:
    layers: list[_Layer] = []
    states, pages = iter(pools.states), itertools.count()
    by_token = pools.geometry.is_fed_by_token
    for layer, keeps_state in enumerate(pools.geometry.keeps_state):
        if keeps_state:
            layers.append(StateLayer(layer, sequence, next(states), is_fed_by_token=by_token))
        else:
            layers.append(_page_layer(layer, next(pages), pools.paged, sequence))
    return layers


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
