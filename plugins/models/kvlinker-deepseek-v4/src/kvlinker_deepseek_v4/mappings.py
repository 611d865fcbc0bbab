"""Which layer has which part of a DeepSeek V4 cache: resolved once from the compress ratios, then passed around.

Device pools and a host mirror of them must agree on it; two computations of the same thing would not for long.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from kvlinker.description import IndexerKind, LayerFacts
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.layouts import ride_along

__all__ = [
    "C1_RATIO",
    "C2_RATIO",
    "C4_RATIO",
    "C128_RATIO",
    "LayerPositions",
    "V4LayerMappings",
    "resolve_layer_mappings",
    "stage_layers",
]

C4_RATIO = 4
C128_RATIO = 128
C1_RATIO, C2_RATIO = 1, 2
_SHARED = (C1_RATIO, C2_RATIO)
"""Ratios of V4.1, of which some layers keep KV and index keys (kv_source_layer_ids) and later ones read theirs."""
_RATIOS = (0, *_SHARED, C4_RATIO, C128_RATIO)
"""config.json of DeepSeek V4, compress_ratios: window alone, V4.1's, sparse attention, heavily compressed attention."""

LayerPositions: TypeAlias = Mapping[int, tuple[int, ...]]
"""Transfer layer to the positions of its buffers in the part's list; layers without any are not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V4LayerMappings:
    """For each part of a V4 cache, which layers have it, and which buffers are theirs."""

    swa: LayerPositions
    """Every layer's window; those of drafts follow the target's and ride on its first layers."""
    c4: LayerPositions
    """Layers of ratio 4, in order of appearance: compressed KV, indexer and its scales."""
    c4_state: LayerPositions
    """Layers of ratio 4 again: a compressor's state exists where its output does, in another index space."""
    c128: LayerPositions
    """Layers of ratio 128, in order of appearance."""
    c1: LayerPositions
    """Layers of ratio 1 that keep KV and index keys, in order of appearance; those that read theirs are not in it."""
    c2: LayerPositions
    """Layers of ratio 2 that keep KV and index keys, likewise."""
    draft_layers: int
    """Drafts whose windows are in `swa`."""
    c4_global_layers: tuple[int, ...]
    """Numbers in the whole model of the layers of ratio 4, in the order of their buffers."""
    c128_global_layers: tuple[int, ...]
    """Numbers in the whole model of the layers of ratio 128, in the order of their buffers."""


def resolve_layer_mappings(
    layers: Sequence[LayerFacts], *, draft_layers: int = 0
) -> V4LayerMappings:
    """Return the mappings of one pipeline stage.

    Args:
        layers: the stage's layers in order, with their compress ratios.
        draft_layers: MTP layers whose windows ride on the first layers.

    Raises:
        UnsupportedKVCacheError: a compress ratio other than 0, 1, 2, 4 and 128; the message names the layer.
        ContractError: more drafts than layers, or a layer of ratio 1 or 2 that has nothing to read.

    >>> mappings = resolve_layer_mappings(stage_layers([0, 4, 128, 4], start=1, end=4))
    >>> dict(mappings.c4), dict(mappings.c128), mappings.c4_global_layers
    ({0: (0,), 2: (1,)}, {1: (0,)}, (1, 3))
    """
    if not 0 <= draft_layers <= len(layers):
        msg = f"{draft_layers} draft layers cannot ride on {len(layers)} layers"
        raise ContractError(msg)
    for facts in layers:
        _check_ratio(facts)
    c4 = [facts for facts in layers if facts.compress_ratio == C4_RATIO]
    c128 = [facts for facts in layers if facts.compress_ratio == C128_RATIO]
    _check_sources(layers)
    sparse = _positions(c4)
    return V4LayerMappings(
        swa=_positions(layers, riders=draft_layers),
        c4=sparse,
        c4_state=sparse,
        c128=_positions(c128),
        c1=_positions(_sources(layers, C1_RATIO)),
        c2=_positions(_sources(layers, C2_RATIO)),
        draft_layers=draft_layers,
        c4_global_layers=tuple(facts.global_layer for facts in c4),
        c128_global_layers=tuple(facts.global_layer for facts in c128),
    )


def _check_ratio(facts: LayerFacts) -> None:
    if facts.compress_ratio not in _RATIOS:
        msg = (
            f"layer {facts.layer} (global {facts.global_layer}) has compress ratio {facts.compress_ratio}; "
            f"laid out are {_RATIOS}; install a plugin that lays out others"
        )
        raise UnsupportedKVCacheError(msg)


def _sources(layers: Sequence[LayerFacts], ratio: int) -> list[LayerFacts]:
    """Return the layers of a ratio of V4.1 that keep what the others of that ratio read."""
    return [
        facts
        for facts in layers
        if facts.compress_ratio == ratio and facts.indexer is IndexerKind.OWN
    ]


def _check_sources(layers: Sequence[LayerFacts]) -> None:
    """Refuse layers of ratios 1 and 2 that neither keep anything nor come behind one that does.

    Raises:
        ContractError: what such a layer reads is kept by another stage, or not described.
    """
    kept = set()
    for facts in layers:
        if facts.compress_ratio in _SHARED and facts.indexer is IndexerKind.OWN:
            kept.add(facts.compress_ratio)
        nothing = facts.indexer is IndexerKind.NONE or facts.compress_ratio not in kept
        if facts.compress_ratio in _SHARED and nothing:
            msg = (
                f"layer {facts.layer} (global {facts.global_layer}) of compress ratio {facts.compress_ratio} has "
                f"indexer {facts.indexer.name} behind no layer of that ratio that keeps KV; describe layers that keep "
                f"it as OWN and those that read it as SHARED, all in one stage"
            )
            raise ContractError(msg)


def _positions(layers: Sequence[LayerFacts], *, riders: int = 0) -> LayerPositions:
    own = {facts.layer: position for position, facts in enumerate(layers)}
    return MappingProxyType(ride_along(own, range(riders)))


def stage_layers(
    compress_ratios: Sequence[int],
    *,
    start: int = 0,
    end: int | None = None,
    kv_source_layers: Collection[int] = (),
) -> tuple[LayerFacts, ...]:
    """Return the layers [start, end) of a model as a pipeline stage describes them.

    Args:
        compress_ratios: of all layers of the target model, without MTP layers.
        start: first global layer of the stage.
        end: global layer behind its last; all layers by default.
        kv_source_layers: global layers of ratios 1 and 2 that keep KV, which the others of these ratios read.

    Raises:
        ContractError: the stage is empty or leaves the model.
    """
    end = len(compress_ratios) if end is None else end
    if not 0 <= start < end <= len(compress_ratios):
        msg = f"stage [{start}, {end}) is not within the model's {len(compress_ratios)} layers"
        raise ContractError(msg)
    return tuple(
        LayerFacts(
            layer=layer,
            global_layer=start + layer,
            compress_ratio=ratio,
            indexer=_indexer(ratio, is_source=start + layer in kv_source_layers),
        )
        for layer, ratio in enumerate(compress_ratios[start:end])
    )


def _indexer(ratio: int, *, is_source: bool) -> IndexerKind:
    if ratio in _SHARED:
        return IndexerKind.OWN if is_source else IndexerKind.SHARED
    return IndexerKind.OWN if ratio == C4_RATIO else IndexerKind.NONE
