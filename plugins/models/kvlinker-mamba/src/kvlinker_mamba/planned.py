"""The cache that a hybrid of attention and states would have, from its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvlinker.description import Fact, KVCacheDescription, LayerFacts, LogicalPool, PoolKind
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.hookspecs import ModelConfig, ModelConfigRequest
from kvlinker.integers import as_integer
from kvlinker.model_config import MadeUpPools
from kvlinker.pools import KV
from kvlinker.spans import BufferSpan
from kvlinker_mamba.geometry import MODELS, StateSizes
from kvlinker_mamba.heads import HEAD_BYTES, ROWS_ARE_PAGES
from kvlinker_mamba.hybrids import KV_FAMILY
from kvlinker_mamba.latent import LATENT_BYTES, LATENT_VALUES, latent_bytes
from kvlinker_mamba.layers import FAMILY, KEPT_IN, MAMBA
from kvlinker_mamba.states import CONV_LAYOUTS, NO_SSM, SSM_LAYOUTS, STATE_BYTES, conv_roles

__all__ = ["MODELS", "PAGE_SIZE", "describe"]

PAGE_SIZE = 64
"""Larger pages are moved faster, smaller ones are shared more often; a state has the same size under any."""
_SSM_DTYPES = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
"""Where a configuration states what its recurrence is computed in; float32 where it states none."""


def describe(config: ModelConfig, request: ModelConfigRequest) -> KVCacheDescription:
    """Return the cache of one of MODELS.

    Raises:
        ContractError: the configuration lacks a size, or the request has an unknown fact.
        UnsupportedKVCacheError: layers are all of one kind, or of another one; a format is not laid out here.
    """
    model, page_size = MODELS[config.model_type], request.page_size or PAGE_SIZE
    kinds, sizes = _checked_kinds(config, model.kinds(config)), model.sizes(config)
    usual = {KV_FAMILY: model.kv_family, **_page_facts(config, request)}
    request.format_of(KV_FAMILY, model.kv_family, known=(model.kv_family,))
    facts = request.over({**usual, **_state_facts(config, request, sizes)})
    made_up = MadeUpPools()
    buffers: dict[str, tuple[BufferSpan, ...]] = {}
    for prefix, count in (("", _count(kinds, KV)), ("draft_", request.draft_layers)):
        for role, slot_bytes in _slots(config, facts):
            in_a_row = page_size if facts.get("kv_layout") == "head_major" else 1
            buffers[f"{prefix}{role}"] = made_up.buffers(
                count, row_bytes=in_a_row * slot_bytes, rows_per_page=page_size // in_a_row
            )
    for role, row_bytes in _states(sizes, facts):
        buffers[role] = made_up.buffers(_count(kinds, MAMBA), row_bytes=row_bytes)
    return KVCacheDescription(
        family=FAMILY,
        page_size=page_size,
        buffers={role: spans for role, spans in buffers.items() if spans},
        layers=tuple(
            LayerFacts(layer=i, global_layer=i, kind=kind) for i, kind in enumerate(kinds)
        ),
        logical_pools=(
            LogicalPool(name=KV, page_size=page_size),
            LogicalPool(name=MAMBA, page_size=1, kind=PoolKind.SLOT),
        ),
        facts=facts,
    )


def _checked_kinds(config: ModelConfig, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kinds of a model's layers; some keep pages, and some keep states."""
    where = f"model type {config.model_type!r}"
    if config.has("sliding_window"):
        msg = (
            f"{where}: it states a window (sliding_window {config.integer('sliding_window')}), and no layer of such a "
            f"model is known to look through one"
        )
        raise UnsupportedKVCacheError(msg)
    if not _count(kinds, MAMBA):
        msg = f"{where}: no layer keeps a state, so its cache is no hybrid; an engine describes it as family 'mha'"
        raise UnsupportedKVCacheError(msg)
    if not _count(kinds, KV):
        msg = f"{where}: no layer keeps pages of {KV!r}, which a prefix is known by; such a model is not laid out here"
        raise UnsupportedKVCacheError(msg)
    return kinds


def _count(kinds: Sequence[str], pool: str) -> int:
    return sum(pool in KEPT_IN[kind] for kind in kinds)


# ---- pages ------------------------------------------------------------------------------------


def _page_facts(config: ModelConfig, request: ModelConfigRequest) -> dict[str, Fact]:
    usual = config.value_format()
    if MODELS[config.model_type].kv_family == "mla":
        values = _latent_values(config)
        kv_format = request.format_of("kv_format", usual, known=LATENT_BYTES)
        return {
            "kv_format": kv_format,
            **({} if values == LATENT_VALUES else {"latent_values": values}),
        }
    return {
        "kv_layout": request.format_of("kv_layout", "token_major", known=ROWS_ARE_PAGES),
        "kv_format": request.format_of("kv_format", usual, known=HEAD_BYTES),
        "kv_scaled": 0,
    }


def _slots(config: ModelConfig, facts: dict[str, Fact]) -> Iterator[tuple[str, int]]:
    """Yield the roles of pages, and the bytes of a slot in one layer."""
    kv_format = str(facts["kv_format"])
    if facts[KV_FAMILY] == "mla":
        yield "latent", latent_bytes(kv_format, _latent_values(config))
        return
    heads = config.integer("num_key_value_heads", default=config.integer("num_attention_heads"))
    for role in ("k", "v"):
        yield role, heads * _head_dim(config) * HEAD_BYTES[kv_format]


def _latent_values(config: ModelConfig) -> int:
    return config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim")


def _head_dim(config: ModelConfig) -> int:
    """Return the values of a head: stated, or the hidden size divided among the heads."""
    if config.has("head_dim"):
        return config.integer("head_dim")
    return config.integer("hidden_size") // config.integer("num_attention_heads")


# ---- states -----------------------------------------------------------------------------------


def _state_facts(
    config: ModelConfig, request: ModelConfigRequest, sizes: StateSizes
) -> dict[str, Fact]:
    conv: dict[str, Fact] = {
        "conv_states": _conv_states(request, sizes),
        "conv_format": request.format_of("conv_format", config.value_format(), known=STATE_BYTES),
        "conv_layout": request.format_of("conv_layout", sizes.conv_layout, known=CONV_LAYOUTS),
        "conv_window": _conv_window(request, sizes),
    }
    if not sizes.ssm_values:
        return {"ssm_format": NO_SSM, **conv}
    dtype = next(filter(config.has, _SSM_DTYPES), _SSM_DTYPES[0])
    usual = config.format_of_dtype(dtype, default="float32")
    return {
        "ssm_format": request.format_of("ssm_format", usual, known=STATE_BYTES),
        "ssm_layout": request.format_of("ssm_layout", sizes.ssm_layout, known=SSM_LAYOUTS),
        **conv,
    }


def _conv_states(request: ModelConfigRequest, sizes: StateSizes) -> int:
    count = request.number_of("conv_states", 1)
    if count not in (1, sizes.conv_parts):
        msg = f"conv_states {count} is not laid out here; the channels are kept in 1 or {sizes.conv_parts}"
        raise UnsupportedKVCacheError(msg)
    return count


def _conv_window(request: ModelConfigRequest, sizes: StateSizes) -> int:
    """Return the tokens in a convolution's window: those before the newest, unless an engine keeps that one too."""
    known = (sizes.conv_kernel - 1, sizes.conv_kernel)
    window = request.number_of("conv_window", known[0])
    if window not in known:
        msg = f"conv_window {window} is not laid out here; a kernel of {sizes.conv_kernel} reads {known[0]} before it"
        raise UnsupportedKVCacheError(msg)
    return window


def _states(sizes: StateSizes, facts: dict[str, Fact]) -> Iterator[tuple[str, int]]:
    """Yield the roles of states, and the bytes of one in one layer."""
    if sizes.ssm_values:
        yield "ssm_state", sizes.ssm_values * STATE_BYTES[str(facts["ssm_format"])]
    count, window = _number(facts, "conv_states"), _number(facts, "conv_window")
    values = sizes.conv_channels // count * window
    for role in conv_roles(count):
        yield role, values * STATE_BYTES[str(facts["conv_format"])]


def _number(facts: dict[str, Fact], name: str) -> int:
    return as_integer(facts[name], f"fact {name!r}")
