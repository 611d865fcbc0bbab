"""Geometry: what a transformers configuration says about the shape of a model's KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from transformers import PreTrainedConfig

from kvlinker.errors import UnsupportedKVCacheError

__all__ = [
    "Geometry",
    "HybridGeometry",
    "LatentGeometry",
    "MHAGeometry",
    "V4Geometry",
    "read_geometry",
]

_MHA_TYPES = frozenset({"llama", "qwen3"})
_HYBRID_TYPES = frozenset({"gemma3_text", "gpt_oss"})
_MLA_TYPES = frozenset({"deepseek_v3"})
_DSA_TYPES = frozenset({"deepseek_v32", "glm_moe_dsa"})
_V4_TYPES = frozenset({"deepseek_v4"})

_HYBRID_KINDS = {"full_attention": False, "sliding_attention": True}
"""Layer kind to whether it looks through a window."""
_V4_KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class MHAGeometry:
    """Multi-head or grouped-query attention: K and V heads in every layer."""

    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridGeometry:
    """K and V heads in every layer, some of which look through a window that slides."""

    kv_heads: int
    head_dim: int
    slides: tuple[bool, ...]
    """Layer by layer: whether it looks through the window; both kinds are there."""
    window: int
    """Tokens that such a layer sees, the newest included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentGeometry:
    """Multi-head latent attention, with an index for sparse attention in some of the layers or in none."""

    layers: int
    latent: int
    rope: int
    index_dim: int
    """Values of an index key; 0 without sparse attention."""
    owns_index: tuple[bool, ...]
    """Layer by layer: whether it keeps index keys of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Geometry:
    """DeepSeek V4: a sliding window in every layer, compressed entries in some."""

    compress_ratios: tuple[int, ...]
    """Layer by layer: tokens in an entry (4 or 128), 0 for a window alone."""
    head_dim: int
    index_dim: int
    window: int


Geometry: TypeAlias = MHAGeometry | HybridGeometry | LatentGeometry | V4Geometry


def read_geometry(config: PreTrainedConfig) -> Geometry:
    """Return the KV geometry of a model's configuration.

    Raises:
        UnsupportedKVCacheError: the engine has no pools for this model type or for a layer kind in it.
    """
    facts = _Facts(config.model_type, config.to_dict())
    if facts.model_type in _MHA_TYPES:
        return _mha(facts)
    if facts.model_type in _HYBRID_TYPES:
        return _hybrid(facts)
    if facts.model_type in _MLA_TYPES | _DSA_TYPES:
        return _latent(facts, sparse=facts.model_type in _DSA_TYPES)
    if facts.model_type in _V4_TYPES:
        return _v4(facts)
    known = ", ".join(sorted(_MHA_TYPES | _HYBRID_TYPES | _MLA_TYPES | _DSA_TYPES | _V4_TYPES))
    msg = f"model type {facts.model_type!r} has no paged pools in this engine; it serves {known}"
    raise UnsupportedKVCacheError(msg)


class _Facts:
    """A configuration's values, each checked for its type when it is read."""

    def __init__(self, model_type: str, values: Mapping[str, object]) -> None:
        self.model_type = model_type
        self._values = values

    def refuse(self, name: str, wanted: str) -> UnsupportedKVCacheError:
        """Return the error that says what was wanted of a value."""
        found = self._values.get(name)
        return UnsupportedKVCacheError(
            f"model type {self.model_type!r}: {name} must be {wanted}, got {found!r}"
        )

    def integer(self, name: str) -> int:
        """Return a positive integer."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(name, "a positive integer")
        return value

    def is_set(self, name: str) -> bool:
        """Return whether the configuration has a value that is neither false nor empty."""
        return bool(self._values.get(name))

    def names(self, name: str, count: int) -> tuple[str, ...] | None:
        """Return one name for each layer, or None where the configuration has no such list."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, Sequence) or len(value) != count:
            raise self.refuse(name, f"a list of {count} names")
        return tuple(str(item) for item in value)

    def ratio(self, kind: str) -> int:
        """Return the compress rate of a layer kind."""
        rates = self._values.get("compress_rates")
        rate = rates.get(kind) if isinstance(rates, Mapping) else None
        if not isinstance(rate, int):
            raise self.refuse("compress_rates", f"a mapping with {kind!r}")
        return rate


def _mha(facts: _Facts) -> MHAGeometry:
    layers = facts.integer("num_hidden_layers")
    kinds = facts.names("layer_types", layers) or ()
    if set(kinds) - {"full_attention"}:
        raise facts.refuse("layer_types", "full_attention everywhere")
    return MHAGeometry(
        layers=layers,
        kv_heads=facts.integer("num_key_value_heads"),
        head_dim=facts.integer("head_dim"),
    )


def _hybrid(facts: _Facts) -> HybridGeometry:
    if facts.is_set("use_bidirectional_attention"):
        # A token's KV would depend on those behind it, and so would pages on what is behind them.
        raise facts.refuse("use_bidirectional_attention", "false")
    kinds = facts.names("layer_types", facts.integer("num_hidden_layers")) or ()
    if set(kinds) != set(_HYBRID_KINDS):
        raise facts.refuse("layer_types", " and ".join(_HYBRID_KINDS))
    return HybridGeometry(
        kv_heads=facts.integer("num_key_value_heads"),
        head_dim=facts.integer("head_dim"),
        slides=tuple(_HYBRID_KINDS[kind] for kind in kinds),
        window=facts.integer("sliding_window"),
    )


def _latent(facts: _Facts, *, sparse: bool) -> LatentGeometry:
    layers = facts.integer("num_hidden_layers")
    kinds = facts.names("indexer_types", layers) or ("full",) * layers
    return LatentGeometry(
        layers=layers,
        latent=facts.integer("kv_lora_rank"),
        rope=facts.integer("qk_rope_head_dim"),
        index_dim=facts.integer("index_head_dim") if sparse else 0,
        owns_index=tuple(sparse and kind == "full" for kind in kinds),
    )


def _v4(facts: _Facts) -> V4Geometry:
    layers = facts.integer("num_hidden_layers")
    kinds = facts.names("layer_types", layers) or ()
    window_only, sparse, heavy = _V4_KINDS
    ratios = {window_only: 0, sparse: facts.ratio(sparse), heavy: facts.ratio(heavy)}
    if (ratios[sparse], ratios[heavy]) != (4, 128):
        raise facts.refuse("compress_rates", "4 and 128")
    return V4Geometry(
        compress_ratios=tuple(ratios[kind] for kind in kinds),
        head_dim=facts.integer("head_dim"),
        index_dim=facts.integer("index_head_dim"),
        window=facts.integer("sliding_window"),
    )
