"""What MiniMax's pools are made of: K and V, and index keys, plain or packed as nvfp4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from kvlinker.description import DescribeRequest, Fact
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker_sglang.describe.buffers import (
    EachTensor,
    HeldTensors,
    page_rows,
    require_same_facts,
    spans_of,
    value_format,
)
from kvlinker_sglang.describe.classes import changed, class_name
from kvlinker_sglang.describe.heads import POOL as HEADS_POOL
from kvlinker_sglang.describe.heads import heads_facts, heads_pool, heads_roles
from kvlinker_sglang.describe.refusals import require_class
from kvlinker_sglang.describe.requests import require_page_size

if TYPE_CHECKING:
    import torch

__all__ = ["IndexPool", "Part", "packed_heads", "packed_index", "plain_heads", "plain_index"]

_KEYS_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKOnlyPool"
_PACKED_HEADS = "sglang.srt.mem_cache.minimax_m3_nvfp4_pool.MiniMaxM3Nvfp4MainKVPool"
_PACKED_KEYS = "sglang.srt.mem_cache.minimax_m3_nvfp4_pool.MiniMaxM3Nvfp4IndexKPool"
_NVFP4, _NVFP4_BLOCK = "fp4_e2m1_block16_e4m3", 16
"""Two values a byte; 16 of them share an e4m3 scale (`NVFP4KVQuantizeUtil`)."""
_HEADS, _INDEX = "the K and V of a MiniMaxSparseKVPool", "the index of a MiniMaxSparseKVPool"
_NVFP4_HEADS, _NVFP4_INDEX = (
    f"{part} of a MiniMaxM3Nvfp4KVPool" for part in ("the K and V", "the index")
)

IndexPool: TypeAlias = tuple[object, Mapping[int, int]]
"""A pool of index keys, and where in it each layer of the stage has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Buffers and facts of a description."""

    roles: Mapping[str, tuple[BufferSpan, ...]] = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)


@runtime_checkable
class _Keys(Protocol):
    """What is read of a pool of index keys; all of them have one head."""

    dtype: torch.dtype
    store_dtype: torch.dtype
    page_size: int
    head_num: int
    head_dim: int
    k_buffer: list[torch.Tensor]


@runtime_checkable
class _KeysAndValues(_Keys, Protocol):
    v_buffer: list[torch.Tensor]


@runtime_checkable
class _PackedKeys(_Keys, Protocol):
    """A row of each buffer is a page; rows lie apart, for a page's parts lie side by side."""

    SCALE_GROUP_SIZE: int
    """Values that share a scale."""
    global_scale: torch.Tensor
    """What all scales are relative to."""
    k_scale_buffer: list[torch.Tensor]


@runtime_checkable
class _PackedHeads(_PackedKeys, Protocol):
    v_buffer: list[torch.Tensor]
    v_scale_buffer: list[torch.Tensor]


# ---- K and V ----------------------------------------------------------------------------------


def plain_heads(pool: object, request: DescribeRequest) -> Part:
    """Return K and V of all layers.

    Raises:
        UnsupportedKVCacheError: they are kept otherwise; with HiSparse in host memory, too.
    """
    heads = heads_pool(pool, _HEADS, request)
    facts = heads_facts(heads, _HEADS)
    _require_slot_rows(facts, _HEADS)
    return Part(roles=heads_roles("", [heads]), facts=facts)


def packed_heads(pool: object, request: DescribeRequest) -> Part:
    """Return K and V of all layers, and their scales; values of a head are together in a page.

    Raises:
        UnsupportedKVCacheError: they are kept otherwise.
        ContractError: their pages are not the tree's.
    """
    require_class(pool, _PACKED_HEADS, _NVFP4_HEADS)
    if not isinstance(pool, _PackedHeads):
        raise changed(pool, _PackedHeads)
    _require_blocks(pool, _NVFP4_HEADS, request)
    roles = {
        "k": spans_of("k", lambda: pool.k_buffer),
        "v": spans_of("v", lambda: pool.v_buffer),
        "k_scale": spans_of("k_scale", lambda: pool.k_scale_buffer),
        "v_scale": spans_of("v_scale", lambda: pool.v_scale_buffer),
    }
    return Part(roles=roles, facts={"kv_layout": "head_major", "kv_format": _NVFP4, "kv_scaled": 1})


def _require_slot_rows(facts: Mapping[str, Fact], where: str) -> None:
    """Refuse pages of heads before slots: SGLang's kernels for the model read them as slots before heads.

    Raises:
        UnsupportedKVCacheError: they are such.
    """
    if facts["kv_layout"] != "token_major":
        msg = (
            f"{where} has pages laid out as {facts['kv_layout']}, which SGLang's kernels for the model read as slots "
            f"before heads; run SGLang without SGLANG_USE_HND_KVCACHE"
        )
        raise UnsupportedKVCacheError(msg)


# ---- index keys -------------------------------------------------------------------------------


def plain_index(
    alone: IndexPool, with_values: IndexPool, layers: int, request: DescribeRequest
) -> Part:
    """Return the index keys of a stage's layers, and the values of some.

    Args:
        alone: keys of layers whose index attends to no values.
        with_values: those of the others, with their values.
        layers: of the stage.
        request: has the size of the tree's pages.

    Raises:
        UnsupportedKVCacheError: they are kept otherwise, or differ between the layers.
    """
    keys: dict[int, _Read] = {}
    values: dict[int, _Read] = {}
    facts: dict[str, Fact] = {}
    if with_values[1]:
        both = _keys_and_values(with_values[0], request)
        keys |= _readers(with_values[1], lambda: both.k_buffer, both.page_size)
        values |= _readers(with_values[1], lambda: both.v_buffer, both.page_size)
        facts = _index_facts(both)
    if alone[1]:
        pool = _keys_alone(alone[0], request)
        keys |= _readers(alone[1], lambda: pool.k_buffer, pool.page_size)
        require_same_facts(_index_facts(pool), facts or _index_facts(pool), _INDEX)
        facts = _index_facts(pool)
    roles = {"index_k": _layer_spans("index_k", keys, layers)}
    if values:
        roles["index_v"] = _layer_spans("index_v", values, layers)
    return Part(roles=roles, facts={**facts, "index_has_values": int(bool(values))})


def packed_index(
    pool: object, places: Mapping[int, int], layers: int, request: DescribeRequest
) -> Part:
    """Return the index keys of a stage's layers, and their scales.

    Raises:
        UnsupportedKVCacheError: they are kept otherwise.
        ContractError: their pages are not the tree's.
    """
    require_class(pool, _PACKED_KEYS, _NVFP4_INDEX)
    if not isinstance(pool, _PackedKeys):
        raise changed(pool, _PackedKeys)
    _require_blocks(pool, _NVFP4_INDEX, request)
    keys = _readers(places, lambda: pool.k_buffer, 1)
    scales = _readers(places, lambda: pool.k_scale_buffer, 1)
    return Part(
        roles={
            "index_k": _layer_spans("index_k", keys, layers),
            "index_k_scale": _layer_spans("index_k_scale", scales, layers),
        },
        facts={
            "index_format": _NVFP4,
            "index_values": pool.head_num * pool.head_dim,
            "index_has_values": 0,
        },
    )


_Read: TypeAlias = "Callable[[], torch.Tensor]"
"""Reads a layer's buffer, a row for each page."""


def _readers(places: Mapping[int, int], tensors: HeldTensors, in_a_page: int) -> dict[int, _Read]:
    """Return what reads each layer's buffer; a page has so many rows of the pool's."""

    def read(place: int) -> torch.Tensor:
        return page_rows(tensors()[place], in_a_page)

    return {layer: partial(read, place) for layer, place in places.items()}


def _layer_spans(role: str, held: Mapping[int, _Read], layers: int) -> tuple[BufferSpan, ...]:
    """Return a span for each layer of the stage, without rows where it keeps nothing."""
    some = next(iter(held.values()))

    def read(layer: int) -> torch.Tensor:
        return held[layer]() if layer in held else some()[:0]

    return spans_of(role, lambda: EachTensor(layers, read))


def _keys_alone(pool: object, request: DescribeRequest) -> _Keys:
    require_class(pool, _KEYS_POOL, _INDEX)
    if not isinstance(pool, _Keys):
        raise changed(pool, _Keys)
    require_page_size(pool, pool.page_size, request)
    return pool


def _keys_and_values(pool: object, request: DescribeRequest) -> _KeysAndValues:
    require_class(pool, HEADS_POOL, _INDEX)
    _require_slot_rows(heads_facts(heads_pool(pool, _INDEX, request), _INDEX), _INDEX)
    if not isinstance(pool, _KeysAndValues):
        raise changed(pool, _KeysAndValues)
    return pool


def _index_facts(pool: _Keys) -> dict[str, Fact]:
    return {
        "index_format": value_format(pool.dtype, pool.store_dtype, _INDEX),
        "index_values": pool.head_num * pool.head_dim,
    }


def _require_blocks(pool: _PackedKeys, where: str, request: DescribeRequest) -> None:
    """Refuse values that share scales otherwise than nvfp4's with no scale but those of their blocks.

    Raises:
        UnsupportedKVCacheError: so it is.
        ContractError: the pages are not the tree's: a row, which is a page, would hold another number of slots.
    """
    require_page_size(pool, pool.page_size, request)
    if pool.SCALE_GROUP_SIZE != _NVFP4_BLOCK or not bool((pool.global_scale == 1).all()):
        msg = (
            f"{where}, a {class_name(pool)}, has a scale for each {pool.SCALE_GROUP_SIZE} values, relative to "
            f"{pool.global_scale.tolist()}, and described is one for {_NVFP4_BLOCK}, relative to 1; "
            f"use a version of SGLang that kvlinker-sglang was tested with"
        )
        raise UnsupportedKVCacheError(msg)
