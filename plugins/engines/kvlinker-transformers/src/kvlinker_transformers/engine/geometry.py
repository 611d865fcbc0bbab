"""Geometry: what a transformers configuration says about the shape of a model's KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from transformers import PreTrainedConfig

from kvlinker.errors import UnsupportedKVCacheError
from kvlinker_transformers.engine.config_facts import ConfigFacts

__all__ = [
    "Geometry",
    "HybridGeometry",
    "LatentGeometry",
    "MHAGeometry",
    "Recurrence",
    "StateGeometry",
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
_STATE_KINDS = {"full_attention": False, "linear_attention": True, "conv": True}
"""Layer kind to whether it keeps a state instead of pages."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """What a layer of linear attention or of a state space carries from token to token, in fp32."""

    shape: tuple[int, ...]
    layout: str
    """`key_major`: [heads, keys, values]; `value_major`: [values, keys], Mamba's keys being its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGeometry:
    """Layers that keep a state of the whole prefix, beside others that keep pages."""

    keeps_state: tuple[bool, ...]
    """Layer by layer; both kinds are there."""
    pages: MHAGeometry | LatentGeometry
    """Of the layers that keep pages, which are counted alone."""
    recurrence: Recurrence | None
    """None where a layer keeps a convolution's window and nothing else."""
    conv_channels: int
    conv_window: int
    """Tokens in the window of a convolution: as many as it reads, the newest included."""
    is_fed_by_token: bool = False
    """Behind other tokens, the model computes one token in a pass and no more: a longer pass forgets the state."""


Geometry: TypeAlias = MHAGeometry | HybridGeometry | LatentGeometry | V4Geometry | StateGeometry


def read_geometry(config: PreTrainedConfig) -> Geometry:
    """Return the KV geometry of a model's configuration.

    Raises:
        UnsupportedKVCacheError: the engine has no pools for this model type or for a layer kind in it.
    """
    facts = ConfigFacts(config.model_type, config.to_dict())
    if facts.model_type in _MHA_TYPES:
        return _mha(facts)
    if facts.model_type in _HYBRID_TYPES:
        return _hybrid(facts)
    if facts.model_type in _MLA_TYPES | _DSA_TYPES:
        return _latent(facts, sparse=facts.model_type in _DSA_TYPES)
    if facts.model_type in _V4_TYPES:
        return _v4(facts)
    if facts.model_type in _STATE_READERS:
        return _STATE_READERS[facts.model_type](facts)
    paged = _MHA_TYPES | _HYBRID_TYPES | _MLA_TYPES | _DSA_TYPES | _V4_TYPES
    known = ", ".join(sorted(paged | _STATE_READERS.keys()))
    msg = f"model type {facts.model_type!r} has no paged pools in this engine; it serves {known}"
    raise UnsupportedKVCacheError(msg)


def _mha(facts: ConfigFacts) -> MHAGeometry:
    layers = facts.integer("num_hidden_layers")
    kinds = facts.names("layer_types", layers) or ()
    if set(kinds) - {"full_attention"}:
        raise facts.refuse("layer_types", "full_attention everywhere")
    return MHAGeometry(
        layers=layers,
        kv_heads=facts.integer("num_key_value_heads"),
        head_dim=facts.integer("head_dim"),
    )


def _hybrid(facts: ConfigFacts) -> HybridGeometry:
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


def _latent(facts: ConfigFacts, *, sparse: bool) -> LatentGeometry:
    layers = facts.integer("num_hidden_layers")
    kinds = facts.names("indexer_types", layers) or ("full",) * layers
    return LatentGeometry(
        layers=layers,
        latent=facts.integer("kv_lora_rank"),
        rope=facts.integer("qk_rope_head_dim"),
        index_dim=facts.integer("index_head_dim") if sparse else 0,
        owns_index=tuple(sparse and kind == "full" for kind in kinds),
    )


def _v4(facts: ConfigFacts) -> V4Geometry:
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


# ---- states -----------------------------------------------------------------------------------


def _qwen3_next(facts: ConfigFacts) -> StateGeometry:
    keeps_state = _states_of_named_layers(facts)
    key_heads, value_heads = (facts.integer(f"linear_num_{of}_heads") for of in ("key", "value"))
    key, value = (facts.integer(f"linear_{of}_head_dim") for of in ("key", "value"))
    return StateGeometry(
        keeps_state=keeps_state,
        pages=MHAGeometry(
            layers=keeps_state.count(False),
            kv_heads=facts.integer("num_key_value_heads"),
            head_dim=facts.integer("head_dim"),
        ),
        recurrence=Recurrence(shape=(value_heads, key, value), layout="key_major"),
        conv_channels=2 * key_heads * key + value_heads * value,
        conv_window=facts.integer("linear_conv_kernel_dim"),
    )


def _kimi_linear(facts: ConfigFacts) -> StateGeometry:
    keeps_state = _states_of_named_layers(facts)
    heads, width = facts.integer("linear_num_heads"), facts.integer("linear_head_dim")
    pages = keeps_state.count(False)
    return StateGeometry(
        keeps_state=keeps_state,
        pages=LatentGeometry(
            layers=pages,
            latent=facts.integer("kv_lora_rank"),
            rope=facts.integer("qk_rope_head_dim"),
            index_dim=0,
            owns_index=(False,) * pages,
        ),
        recurrence=Recurrence(shape=(heads, width, width), layout="key_major"),
        # Those of q, k and v.
        conv_channels=3 * heads * width,
        conv_window=facts.integer("linear_conv_kernel_dim"),
    )


def _jamba(facts: ConfigFacts) -> StateGeometry:
    period = facts.integer("attn_layer_period")
    offset = facts.integer("attn_layer_offset", at_least=0)
    layers = range(facts.integer("num_hidden_layers"))
    keeps_state = tuple(layer % period != offset for layer in layers)
    if len(set(keeps_state)) == 1:
        raise facts.refuse("attn_layer_period", "such that some layers keep pages and some do not")
    inner = facts.integer("mamba_expand") * facts.integer("hidden_size")
    return StateGeometry(
        keeps_state=keeps_state,
        pages=_divided_heads(facts, keeps_state.count(False)),
        recurrence=Recurrence(shape=(inner, facts.integer("mamba_d_state")), layout="value_major"),
        conv_channels=inner,
        conv_window=facts.integer("mamba_d_conv"),
        is_fed_by_token=True,
    )


def _lfm2(facts: ConfigFacts) -> StateGeometry:
    keeps_state = _states_of_named_layers(facts)
    return StateGeometry(
        keeps_state=keeps_state,
        pages=_divided_heads(facts, keeps_state.count(False)),
        recurrence=None,
        conv_channels=facts.integer("hidden_size"),
        conv_window=facts.integer("conv_L_cache"),
    )


def _states_of_named_layers(facts: ConfigFacts) -> tuple[bool, ...]:
    """Return which layers keep a state."""
    kinds = facts.names("layer_types", facts.integer("num_hidden_layers")) or ()
    keeps_state = tuple(_STATE_KINDS.get(kind) for kind in kinds)
    if set(keeps_state) != {False, True}:
        raise facts.refuse("layer_types", "full_attention in some layers and states in the others")
    return tuple(bool(keeps) for keeps in keeps_state)


def _divided_heads(facts: ConfigFacts, layers: int) -> MHAGeometry:
    """Return heads that share the hidden size."""
    if facts.is_set("head_dim"):
        raise facts.refuse("head_dim", "unset")
    return MHAGeometry(
        layers=layers,
        kv_heads=facts.integer("num_key_value_heads"),
        head_dim=facts.integer("hidden_size") // facts.integer("num_attention_heads"),
    )


_STATE_READERS: Mapping[str, Callable[[ConfigFacts], StateGeometry]] = {
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "qwen3_next": _qwen3_next,
}
