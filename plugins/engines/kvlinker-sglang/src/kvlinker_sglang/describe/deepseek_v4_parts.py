"""The parts of a `DeepSeekV4TokenToKVPool`, each refused unless it is kept in the one way that is described."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvlinker.description import DescribeRequest
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker_sglang.describe.buffers import EachTensor, HeldTensors
from kvlinker_sglang.describe.classes import changed, class_name
from kvlinker_sglang.describe.refusals import require_class
from kvlinker_sglang.describe.requests import require_page_size

if TYPE_CHECKING:
    import torch

__all__ = [
    "POOL",
    "IndexerPool",
    "StatePool",
    "StateRings",
    "V4Layer",
    "V4Pool",
    "indexer_of",
    "indexer_pool_of",
    "indexes_of",
    "kv_pool_of",
    "latents_of",
    "state_pool_of",
    "states_of",
    "v4_pool",
]

_MODULE = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
POOL = f"{_MODULE}.DeepSeekV4TokenToKVPool"
_KV = f"{_MODULE}.DeepSeekV4SingleKVPool"
_INDEXER = f"{_MODULE}.DeepSeekV4IndexerPool"
_STATES = "sglang.srt.mem_cache.deepseek_v4_compress_state.CompressStatePool"
_ROWS = "sglang.srt.mem_cache.deepseek_v4_compress_state.KVAndScore"
_OTHER_KV: Mapping[str, str] = MappingProxyType(
    {
        f"{_MODULE}.HiSparseC4DevicePool": (
            "HiSparse keeps a page in host memory when it likes, so run SGLang without --enable-hisparse"
        ),
        f"{_MODULE}.DeepSeekV4UniformFP8KVPool": (
            "the trtllm backend keeps uniform fp8 rows, so run SGLang with another --dsv4-attn-backend"
        ),
    }
)
_LAYOUT = "v4"
"""Block-split pages of 448 e4m3 and 64 bf16 values with 7 ue8m0 scales (KVLayout.V4)."""


class V4Layer(Protocol):
    """What is read of a layer's item in the mapping of layers."""

    @property
    def compress_ratio(self) -> int:
        """Tokens in a KV entry; 0 for windows alone."""

    @property
    def compress_layer_id(self) -> int:
        """Position of the layer's buffer in the pool of its ratio, or of the buffer that it reads."""


@runtime_checkable
class V4Pool(Protocol):
    """What is read of a `DeepSeekV4TokenToKVPool`."""

    page_size: int
    swa_page_size: int
    sliding_window: int
    start_layer: int
    kv_layout: object
    layer_mapping: Sequence[V4Layer | None]
    """Of all layers of the model; None outside of the pipeline stage."""
    swa_kv_pool: object
    kv_pools: Mapping[int, object]
    """By compress ratio."""
    index_pools: Mapping[int, object]
    sources_by_ratio: Mapping[int, Sequence[int]]
    """Compress ratio to the global layers that keep KV of it, in the order of their buffers."""
    compress_state_pools: Sequence[object]
    """By global layer."""
    indexer_compress_state_pools: Sequence[object]
    unified_kv_pool: object
    request_window: object
    swa_req_ring_size: int | None


@runtime_checkable
class _KVPool(Protocol):
    page_size: int
    dtype: torch.dtype
    kv_layout: object
    kv_buffer: list[torch.Tensor]


@runtime_checkable
class IndexerPool(Protocol):
    """What is read of a `DeepSeekV4IndexerPool`."""

    page_size: int
    index_k_with_scale_buffer: list[torch.Tensor] | None
    use_fp4_indexer: bool
    uses_aiter_fp4_layout: bool
    index_k_rne: bool
    index_k_page8: bool


@runtime_checkable
class StatePool(Protocol):
    """What is read of a `CompressStatePool`."""

    ratio: int
    ring_size: int
    swa_page_size: int
    request_scoped: bool
    online: bool
    kv_score_buffer: object


@runtime_checkable
class _StateRows(Protocol):
    kv_score: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRings:
    """The compressor states of some layers, one ring of rows for each page of the windows."""

    attention: HeldTensors
    index: HeldTensors
    rows: int
    """Rows of a ring."""
    value_format: str


def v4_pool(pool: object, where: str, request: DescribeRequest) -> V4Pool:
    """Return a pool after checking that it keeps pages of windows, in pages of the tree's.

    Raises:
        UnsupportedKVCacheError: it is of another class, or keeps its windows in another way.
        ContractError: its pages are not the tree's.
    """
    require_class(pool, POOL, where)
    if not isinstance(pool, V4Pool):
        raise changed(pool, V4Pool)
    require_page_size(pool, pool.page_size, request)
    for part, kept, remedy in (
        (
            pool.unified_kv_pool,
            "unified KV, whose fp8 rows are 512 B of values and 128 B of rope in two buffers",
            "another SGLANG_HACK_FLASHMLA_BACKEND than unified_kv_triton",
        ),
        (
            pool.request_window,
            "the windows of running requests alone",
            "no --enable-encoder-swa-bounded-replay",
        ),
        (
            pool.swa_req_ring_size,
            "a ring of windows for each running request",
            "no --enable-encoder-swa-bounded-replay",
        ),
    ):
        if part is not None:
            msg = (
                f"{where}, a {class_name(pool)}, keeps {kept}, and described are pages of windows; "
                f"run SGLang with {remedy}"
            )
            raise UnsupportedKVCacheError(msg)
    return pool


def kv_pool_of(pool: V4Pool, ratio: int) -> _KVPool:
    """Return the pool of KV entries of a compress ratio, 0 being the windows.

    Raises:
        UnsupportedKVCacheError: it is of another class or layout, such as HiSparse's.
    """
    part = pool.kv_pools[ratio] if ratio else pool.swa_kv_pool
    where = f"the KV pool of compress ratio {ratio}" if ratio else "the pool of windows"
    require_class(part, _KV, where, reasons=_OTHER_KV)
    if not isinstance(part, _KVPool):
        raise changed(part, _KVPool)
    import torch

    if part.kv_layout != _LAYOUT or part.dtype != torch.float8_e4m3fn:
        msg = (
            f"{where} of a {class_name(pool)} is of {part.dtype} in layout {part.kv_layout}, and described is layout "
            f"{_LAYOUT!r} of float8_e4m3fn; run SGLang with SGLANG_DSV4_KV_LAYOUT=v4 and --kv-cache-dtype fp8_e4m3"
        )
        raise UnsupportedKVCacheError(msg)
    return part


def latents_of(part: _KVPool) -> HeldTensors:
    """Return what reads the KV entries of a part."""
    return lambda: part.kv_buffer


def indexer_pool_of(pool: V4Pool, ratio: int) -> IndexerPool:
    """Return the pool of index keys of a compress ratio, however they are kept.

    Raises:
        UnsupportedKVCacheError: it is of another class.
    """
    part = pool.index_pools[ratio]
    require_class(part, _INDEXER, f"the indexer of compress ratio {ratio}")
    if not isinstance(part, IndexerPool):
        raise changed(part, IndexerPool)
    return part


def indexer_of(pool: V4Pool) -> IndexerPool:
    """Return the index keys of ratio 4, keys and scales of a page in one row.

    Raises:
        UnsupportedKVCacheError: they are of another class, or kept in another way.
    """
    part = indexer_pool_of(pool, 4)
    if (
        part.index_k_with_scale_buffer is None
        or part.uses_aiter_fp4_layout
        or part.index_k_rne
        or part.index_k_page8
    ):
        msg = (
            f"the indexer of a {class_name(pool)} is kept as ROCm or V4.1 keep it, and described is CUDA's of V4; "
            f"run SGLang without --enable-deepseek-v4-fp4-indexer"
        )
        raise UnsupportedKVCacheError(msg)
    return part


def indexes_of(part: IndexerPool) -> HeldTensors:
    """Return what reads the index keys with their scales."""
    return lambda: part.index_k_with_scale_buffer or ()


def states_of(pool: V4Pool, numbers: Sequence[int]) -> StateRings:
    """Return the compressor states of the global layers of ratio 4, in their order.

    Raises:
        UnsupportedKVCacheError: a state is of another class, or does not follow the pages of windows.
    """
    attention, index = (
        [_state_pool(pool, held[number], number) for number in numbers]
        for held in (pool.compress_state_pools, pool.indexer_compress_state_pools)
    )
    rings = {(part.ring_size, _state_format(part)) for part in (*attention, *index)}
    if len(rings) > 1:
        msg = (
            f"{class_name(pool)} has state rings of several sizes and types: {sorted(rings)}; "
            f"use a version of SGLang that kvlinker-sglang was tested with"
        )
        raise UnsupportedKVCacheError(msg)
    rows, value_format = rings.pop()
    return StateRings(
        attention=_all_rows_of(attention),
        index=_all_rows_of(index),
        rows=rows,
        value_format=value_format,
    )


def state_pool_of(part: object, number: int) -> StatePool:
    """Return the compressor state of a global layer, however it is kept.

    Raises:
        UnsupportedKVCacheError: it is of another class.
    """
    require_class(part, _STATES, f"the state of layer {number}")
    if not isinstance(part, StatePool):
        raise changed(part, StatePool)
    return part


def _state_pool(pool: V4Pool, held: object, number: int) -> StatePool:
    part = state_pool_of(held, number)
    if part.request_scoped or part.online or part.swa_page_size != pool.swa_page_size:
        msg = (
            f"the state of layer {number} of a {class_name(pool)} belongs to a request, or follows pages of "
            f"{part.swa_page_size} slots; described are states that follow the windows' pages of {pool.swa_page_size}"
        )
        raise UnsupportedKVCacheError(msg)
    return part


def _all_rows_of(parts: Sequence[StatePool]) -> HeldTensors:
    return lambda: EachTensor(len(parts), lambda place: _rows_of(parts[place]))


def _rows_of(part: StatePool) -> torch.Tensor:
    """Return the tensor of [rows, kv and score]: the engine keeps spare rows behind the last ring."""
    require_class(part.kv_score_buffer, _ROWS, "a state buffer")
    if not isinstance(part.kv_score_buffer, _StateRows):
        raise changed(part.kv_score_buffer, _StateRows)
    return part.kv_score_buffer.kv_score


def _state_format(part: StatePool) -> str:
    import torch

    dtype = _rows_of(part).dtype
    names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    if dtype not in names:
        msg = f"a compressor state of {dtype} is not described; run SGLang with SGLANG_DSV4_COMPRESS_STATE_DTYPE=fp32"
        raise UnsupportedKVCacheError(msg)
    return names[dtype]
