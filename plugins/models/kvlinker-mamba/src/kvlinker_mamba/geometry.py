"""What the layers of a model keep, and how large their states are, from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.hookspecs import ModelConfig
from kvlinker_mamba.layers import ATTENTION, ATTENTION_AND_MAMBA, MAMBA, MLP
from kvlinker_mamba.states import CONV_LAYOUTS, SSM_LAYOUTS

__all__ = ["MODELS", "HybridModel", "StateSizes"]

_CHANNEL_MAJOR, _WINDOW_MAJOR = CONV_LAYOUTS
_VALUE_MAJOR, _ = SSM_LAYOUTS
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "full_attention": ATTENTION,
        "attention": ATTENTION,
        "*": ATTENTION,
        "linear_attention": MAMBA,
        "mamba": MAMBA,
        "conv": MAMBA,
        "M": MAMBA,
        "mlp": MLP,
        "moe": MLP,
        "-": MLP,
        "E": MLP,
    }
)
"""Layers in config.json: by name, or as letters of a pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """The states of one layer on a rank that holds the whole model."""

    ssm_values: int
    """0 where a layer keeps a convolution's window alone."""
    conv_channels: int
    conv_kernel: int
    """Tokens that a convolution reads, the newest among them."""
    conv_parts: int = 1
    """Equal parts of the channels, which engines keep in one state or in one each."""
    ssm_layout: str = _VALUE_MAJOR
    conv_layout: str = _CHANNEL_MAJOR


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridModel:
    """How a model type's configuration says what its layers keep."""

    kinds: Callable[[ModelConfig], tuple[str, ...]]
    """`LayerFacts.kind` of each layer."""
    sizes: Callable[[ModelConfig], StateSizes]
    kv_family: str = "mha"
    """What its layers of attention keep."""


# ---- layers -----------------------------------------------------------------------------------


def _named(config: ModelConfig) -> tuple[str, ...]:
    names = config.names("layer_types", count=config.layers())
    if names is None:
        msg = f"model type {config.model_type!r}: layer_types must say which layers keep states"
        raise ContractError(msg)
    return _kinds_of(config, names)


def _named_or_every_fourth(config: ModelConfig) -> tuple[str, ...]:
    """Layers of linear attention, and after so many a layer of full attention."""
    if config.has("layer_types"):
        return _named(config)
    every = config.integer("full_attention_interval", default=4)
    return tuple(MAMBA if layer % every else ATTENTION for layer in range(1, config.layers() + 1))


def _kimi(config: ModelConfig) -> tuple[str, ...]:
    linear, count = config.section("linear_attn_config"), config.layers()
    if config.has("layer_types") or linear is None:
        return _named(config)
    # Layers are counted from 1 there.
    states, pages = (
        {number - 1 for number in linear.integers(name) or ()}
        for name in ("kda_layers", "full_attn_layers")
    )
    if states & pages or states | pages != set(range(count)):
        msg = f"model type {config.model_type!r}: kda_layers and full_attn_layers must name each of {count} layers once"
        raise ContractError(msg)
    return _marked(states, MAMBA, ATTENTION, count)


def _periodic(config: ModelConfig) -> tuple[str, ...]:
    period, offset = (
        config.integer("attn_layer_period"),
        config.integer("attn_layer_offset", at_least=0),
    )
    pages = {layer for layer in range(config.layers()) if layer % period == offset}
    return _marked(pages, ATTENTION, MAMBA, config.layers())


def _listed(config: ModelConfig) -> tuple[str, ...]:
    pages = set(config.integers("attn_layer_indices") or ())
    return _marked(pages, ATTENTION, MAMBA, config.layers())


def _parallel(config: ModelConfig) -> tuple[str, ...]:
    return (ATTENTION_AND_MAMBA,) * config.layers()


def _patterned(config: ModelConfig) -> tuple[str, ...]:
    pattern = config.letters("hybrid_override_pattern") or config.letters("layers_block_type")
    if pattern is None:
        return _named(config)
    return _kinds_of(config, pattern)


def _short_convs(config: ModelConfig) -> tuple[str, ...]:
    pages = config.integers("full_attn_idxs")
    if config.has("layer_types") or pages is None:
        return _named(config)
    return _marked(pages, ATTENTION, MAMBA, config.layers())


def _marked(marked: Collection[int], kind: str, other: str, count: int) -> tuple[str, ...]:
    return tuple(kind if layer in marked else other for layer in range(count))


def _kinds_of(config: ModelConfig, names: Collection[str]) -> tuple[str, ...]:
    if unknown := sorted(set(names) - _KINDS.keys()):
        msg = f"model type {config.model_type!r}: layers of {unknown} are not laid out here; known are {list(_KINDS)}"
        raise UnsupportedKVCacheError(msg)
    return tuple(_KINDS[name] for name in names)


# ---- states -----------------------------------------------------------------------------------


def _gated_delta_net(config: ModelConfig) -> StateSizes:
    key_heads, value_heads = (
        config.integer(f"linear_num_{what}_heads") for what in ("key", "value")
    )
    key, value = (config.integer(f"linear_{what}_head_dim") for what in ("key", "value"))
    return StateSizes(
        ssm_values=value_heads * value * key,
        conv_channels=2 * key_heads * key + value_heads * value,
        conv_kernel=config.integer("linear_conv_kernel_dim"),
    )


def _kimi_delta_attention(config: ModelConfig) -> StateSizes:
    """Return the sizes of a layer whose convolution has the channels of q, k and v, as many of each."""
    linear = config.section("linear_attn_config")
    where, prefix, kernel = (
        (config, "linear_", "linear_conv_kernel_dim")
        if linear is None
        else (linear, "", "short_conv_kernel_size")
    )
    heads, width = where.integer(f"{prefix}num_heads"), where.integer(f"{prefix}head_dim")
    return StateSizes(
        ssm_values=heads * width * width,
        conv_channels=3 * heads * width,
        conv_kernel=where.integer(kernel),
        conv_parts=3,
        conv_layout=_WINDOW_MAJOR,
    )


def _mamba(config: ModelConfig) -> StateSizes:
    inner = config.integer("mamba_expand") * config.integer("hidden_size")
    return StateSizes(
        ssm_values=inner * config.integer("mamba_d_state"),
        conv_channels=inner,
        conv_kernel=config.integer("mamba_d_conv"),
    )


def _mamba2(config: ModelConfig) -> StateSizes:
    inner = config.integer("mamba_expand") * config.integer("hidden_size")
    return _mamba2_sizes(config, inner, "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


def _falcon_mamba2(config: ModelConfig) -> StateSizes:
    if not config.has("mamba_d_ssm"):
        return _mamba2(config)
    inner = config.integer("mamba_d_ssm")
    return _mamba2_sizes(config, inner, "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


def _nemotron_mamba2(config: ModelConfig) -> StateSizes:
    inner = config.integer("mamba_num_heads") * config.integer("mamba_head_dim")
    return _mamba2_sizes(config, inner, "n_groups", "ssm_state_size", "conv_kernel")


def _mamba2_sizes(
    config: ModelConfig, inner: int, groups: str, state: str, kernel: str
) -> StateSizes:
    """Return the sizes of an inner width, in which the convolution also has B and C of each group."""
    width = config.integer(state)
    return StateSizes(
        ssm_values=inner * width,
        conv_channels=inner + 2 * config.integer(groups) * width,
        conv_kernel=config.integer(kernel),
    )


def _short_conv(config: ModelConfig) -> StateSizes:
    return StateSizes(
        ssm_values=0,
        conv_channels=config.integer("hidden_size"),
        conv_kernel=config.integer("conv_L_cache"),
    )


_GATED_DELTA_NET = HybridModel(kinds=_named_or_every_fourth, sizes=_gated_delta_net)
_SHORT_CONVS = HybridModel(kinds=_short_convs, sizes=_short_conv)
MODELS: Mapping[str, HybridModel] = MappingProxyType(
    {
        "bamba": HybridModel(kinds=_listed, sizes=_mamba2),
        "falcon_h1": HybridModel(kinds=_parallel, sizes=_falcon_mamba2),
        "granitemoehybrid": HybridModel(kinds=_named, sizes=_mamba2),
        "jamba": HybridModel(kinds=_periodic, sizes=_mamba),
        "kimi_linear": HybridModel(kinds=_kimi, sizes=_kimi_delta_attention, kv_family="mla"),
        "lfm2": _SHORT_CONVS,
        "lfm2_moe": _SHORT_CONVS,
        "nemotron_h": HybridModel(kinds=_patterned, sizes=_nemotron_mamba2),
        "qwen3_5_moe_text": _GATED_DELTA_NET,
        "qwen3_5_text": _GATED_DELTA_NET,
        "qwen3_next": _GATED_DELTA_NET,
    }
)
"""Models whose states have sizes that their configuration tells with certainty."""
