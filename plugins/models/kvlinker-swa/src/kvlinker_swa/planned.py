"""The cache that a hybrid of full and sliding-window attention would have, from its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.hookspecs import ModelConfig, ModelConfigRequest
from kvlinker.model_config import MadeUpPools
from kvlinker.pools import KV
from kvlinker_swa.layers import (
    FAMILY,
    FULL,
    KINDS,
    ROWS_ARE_PAGES,
    SWA,
    VALUE_BYTES,
    VALUES,
    WINDOWS,
    LayerKind,
)

__all__ = ["MODELS", "PAGE_SIZE", "HybridModel", "describe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridModel:
    """What a model type's config.json leaves out, as its configuration class in transformers has it."""

    kv_heads: int | None = None
    """None: as many as there are query heads."""
    head_dim: int | None = None
    """None: the hidden size divided among the query heads."""
    full_every: int | None = None
    """Every so many layers, the last of them is one of full attention; None: layer_types must say."""
    drafts: LayerKind = FULL
    """What draft (MTP) layers are, unless mtp_layer_types says otherwise."""


MODELS: Mapping[str, HybridModel] = MappingProxyType(
    {
        "cohere2": HybridModel(full_every=4),
        "gemma2": HybridModel(kv_heads=4, head_dim=256, full_every=2),
        "gemma3_text": HybridModel(kv_heads=4, head_dim=256, full_every=6),
        "gpt_oss": HybridModel(kv_heads=8, head_dim=64, full_every=2),
        "mellum": HybridModel(kv_heads=4, head_dim=128, drafts=WINDOWS),
        "olmo3": HybridModel(full_every=4),
    }
)
"""Models whose every layer keeps K and V of each token, of the last tokens alone in some layers, and nothing else."""
PAGE_SIZE = 64
"""Most engines take any; larger pages are moved faster, smaller ones are shared more often."""
_KINDS: Mapping[str, LayerKind] = MappingProxyType(
    {"full_attention": FULL, "sliding_attention": WINDOWS}
)


def describe(config: ModelConfig, request: ModelConfigRequest) -> KVCacheDescription:
    """Return the cache of one of MODELS.

    Raises:
        ContractError: the configuration lacks a size, or the request has an unknown fact.
        UnsupportedKVCacheError: layers are all of one kind, or of another one; the format is not laid out here.
    """
    page_size, layers = request.page_size or PAGE_SIZE, _layer_kinds(config)
    kv_format = request.format_of("kv_format", config.value_format(), known=VALUE_BYTES)
    kv_layout = request.format_of("kv_layout", "token_major", known=ROWS_ARE_PAGES)
    slot_bytes = _kv_heads(config) * _head_dim(config) * VALUE_BYTES[kv_format]
    in_a_row = page_size if ROWS_ARE_PAGES[kv_layout] else 1
    made_up = MadeUpPools()
    return KVCacheDescription(
        family=FAMILY,
        page_size=page_size,
        buffers={
            role: made_up.buffers(
                count, row_bytes=in_a_row * slot_bytes, rows_per_page=page_size // in_a_row
            )
            for role, count in _buffer_counts(layers, _draft_kinds(config, request.draft_layers))
            if count
        },
        layers=tuple(
            LayerFacts(layer=i, global_layer=i, kind=kind.kind) for i, kind in enumerate(layers)
        ),
        logical_pools=(
            LogicalPool(name=KV, page_size=page_size),
            LogicalPool(name=SWA, page_size=page_size, window=config.integer("sliding_window")),
        ),
        facts=request.over({"kv_layout": kv_layout, "kv_format": kv_format, "kv_scaled": 0}),
    )


def _buffer_counts(
    layers: Sequence[LayerKind], drafts: Sequence[LayerKind]
) -> Iterator[tuple[str, int]]:
    """Yield each role and how many buffers it has."""
    for kind in KINDS:
        yield from ((role, layers.count(kind)) for role in kind.roles(VALUES))
        yield from ((role, drafts.count(kind)) for role in kind.draft_roles(VALUES))


def _layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Return what each layer is; both kinds are among them."""
    kinds = tuple(_kind(config, name) for name in _layer_types(config))
    if WINDOWS not in kinds or not config.has("sliding_window"):
        msg = (
            f"model type {config.model_type!r}: no layer of it looks through a window (layer_types, sliding_window), "
            f"so its cache is no hybrid; an engine describes it as family 'mha'"
        )
        raise UnsupportedKVCacheError(msg)
    if FULL not in kinds:
        msg = (
            f"model type {config.model_type!r}: every layer of it looks through a window, so that no page of {KV!r} "
            f"is kept; such a model is not laid out here"
        )
        raise UnsupportedKVCacheError(msg)
    return kinds


def _layer_types(config: ModelConfig) -> tuple[str, ...]:
    """Return the stated type of each layer, or that of the model type's pattern."""
    count, usual = config.layers(), MODELS[config.model_type].full_every
    if (names := config.names("layer_types", count=count)) is not None:
        return names
    if usual is None:
        msg = f"model type {config.model_type!r}: layer_types must say which layers look through a window"
        raise ContractError(msg)
    every = config.integer("sliding_window_pattern", default=usual)
    return tuple(
        "sliding_attention" if layer % every else "full_attention" for layer in range(1, count + 1)
    )


def _draft_kinds(config: ModelConfig, count: int) -> tuple[LayerKind, ...]:
    if not count:
        return ()
    names = config.names("mtp_layer_types", count=count)
    if names is None:
        return (MODELS[config.model_type].drafts,) * count
    return tuple(_kind(config, name) for name in names)


def _kind(config: ModelConfig, name: str) -> LayerKind:
    if name not in _KINDS:
        msg = (
            f"model type {config.model_type!r}: layers of {name!r} are not laid out here; "
            f"known are {', '.join(_KINDS)}"
        )
        raise UnsupportedKVCacheError(msg)
    return _KINDS[name]


def _kv_heads(config: ModelConfig) -> int:
    usual = MODELS[config.model_type].kv_heads
    if config.has("num_key_value_heads") or usual is not None:
        return config.integer("num_key_value_heads", default=usual)
    return config.integer("num_attention_heads")


def _head_dim(config: ModelConfig) -> int:
    """Return the values of a head: stated, or the model type's, or the hidden size divided among the heads."""
    usual = MODELS[config.model_type].head_dim
    if config.has("head_dim") or usual is not None:
        return config.integer("head_dim", default=usual)
    return config.integer("hidden_size") // config.integer("num_attention_heads")
