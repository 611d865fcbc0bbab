"""Hybrids of attention with Mamba, linear attention or short convolutions: `HybridLinearKVPool` and its states.

The pages of the layers of attention lie in a pool of K and V, of latents, or of latents and index keys; the states of
the others in one slot per prefix.
A layer that keeps nothing behind the last one that keeps something is not described: no pool knows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from kvlinker.description import (
    DescribeRequest,
    IndexerKind,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
    PoolKind,
)
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker_sglang.describe.classes import changed, class_name
from kvlinker_sglang.describe.engine import replicated_on_all_ranks
from kvlinker_sglang.describe.hybrid_pages import pages_of
from kvlinker_sglang.describe.refusals import require_class
from kvlinker_sglang.describe.requests import draft_pools, require_page_size
from kvlinker_sglang.describe.side_states import side_buffers, side_facts
from kvlinker_sglang.describe.states import (
    request_pool,
    state_buffers,
    state_facts,
    state_pool,
)

__all__ = ["POOL", "HybridPool", "describe", "describe_kind"]

POOL = "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool"
_KINDS: Mapping[tuple[bool, bool], str] = MappingProxyType(
    {
        (True, False): "attention",
        (False, True): "mamba",
        (True, True): "attention_and_mamba",
        (False, False): "mlp",
    }
)
"""Whether a layer keeps pages, and whether it keeps states, to its kind."""


@runtime_checkable
class HybridPool(Protocol):
    """What is read of a `HybridLinearKVPool`."""

    page_size: int
    start_layer: int
    mamba_pool: object
    full_kv_pool: object
    full_attention_layer_id_mapping: dict[int, int]


def describe(pool: object, request: DescribeRequest) -> KVCacheDescription:
    """Return the description of a worker's pool, its states and its drafts; see `describe_pool`."""
    return describe_kind(POOL, pool, request)


def describe_kind(kind: str, pool: object, request: DescribeRequest) -> KVCacheDescription:
    """Return the description of a pool of exactly one class that keeps pages and states as hybrids do.

    Args:
        kind: full dotted name of the class; a draft of it shares the target's states.
        pool: the worker's.
        request: what is asked for.

    Raises:
        UnsupportedKVCacheError: it is of another class, or keeps its values in another way.
        ContractError: page sizes differ, or the request lacks what the pool needs.
    """
    target = _hybrid_pool(pool, "the pool", request, kind)
    requests = request_pool(pool, request)
    _require_same_states(target, requests.mamba_pool, "the pool")
    states = state_pool(requests)
    attention = _attention_layers(target)
    drafts = _drafts(request, requests.mamba_pool, kind)
    pages = pages_of(target.full_kv_pool, drafts, attention, request)
    numbers = _stage(target, (*attention, *states.mamba_layer_ids))
    facts = {**pages.facts, **state_facts(states), **side_facts(requests)}
    sides = side_buffers(requests, states, numbers)
    return KVCacheDescription(
        family="mamba",
        page_size=request.page_size,
        buffers={**pages.buffers, **state_buffers(states), **sides},
        layers=_layers(numbers, attention, states.mamba_layer_ids, pages.indexers),
        logical_pools=(
            LogicalPool(name="kv", page_size=target.page_size),
            LogicalPool(name="mamba", page_size=1, kind=PoolKind.SLOT),
        ),
        facts={"kv_family": pages.family, **facts},
        replication=replicated_on_all_ranks((*pages.replicated, *sides)),
    )


def _hybrid_pool(pool: object, where: str, request: DescribeRequest, kind: str) -> HybridPool:
    require_class(pool, kind, where)
    if not isinstance(pool, HybridPool):
        raise changed(pool, HybridPool)
    require_page_size(pool, pool.page_size, request)
    return pool


def _require_same_states(pool: HybridPool, states: object, where: str) -> None:
    if pool.mamba_pool is not states:
        msg = (
            f"{where}, a {class_name(pool)}, has states of its own beside those of the target's requests, which are "
            f"not described; run SGLang without speculative decoding for this model"
        )
        raise UnsupportedKVCacheError(msg)


def _drafts(request: DescribeRequest, states: object, kind: str) -> list[object]:
    """Return what keeps the drafts' pages; a draft of the target's own kind shares its states."""
    drafts = []
    for i, draft in enumerate(draft_pools(request)):
        if class_name(draft) != kind:
            drafts.append(draft)
            continue
        hybrid = _hybrid_pool(draft, f"draft pool {i}", request, kind)
        _require_same_states(hybrid, states, f"draft pool {i}")
        drafts.append(hybrid.full_kv_pool)
    return drafts


def _attention_layers(pool: HybridPool) -> tuple[int, ...]:
    """Return the global layers that keep pages, in the order of the buffers.

    Raises:
        UnsupportedKVCacheError: that is not the order of the layers.
    """
    layers = pool.full_attention_layer_id_mapping
    if [layers[number] for number in sorted(layers)] != list(range(len(layers))):
        msg = (
            f"{class_name(pool)} keeps its layers of attention at {layers}, and described are pages in the order of "
            f"their layers; use a version of SGLang that kvlinker-sglang was tested with"
        )
        raise UnsupportedKVCacheError(msg)
    return tuple(sorted(layers))


def _stage(pool: HybridPool, keeping: Iterable[int]) -> range:
    """Return the global layers of the stage, up to the last one that keeps something.

    Raises:
        UnsupportedKVCacheError: none does, or one is of an earlier stage.
    """
    numbers = sorted(keeping)
    if not numbers or numbers[0] < pool.start_layer:
        msg = (
            f"{class_name(pool)} says that its stage starts at layer {pool.start_layer}, and keeps layers {numbers}; "
            f"run SGLang without pipeline parallelism"
        )
        raise UnsupportedKVCacheError(msg)
    return range(pool.start_layer, numbers[-1] + 1)


def _layers(
    numbers: Sequence[int],
    attention: Sequence[int],
    states: Sequence[int],
    indexers: Mapping[int, IndexerKind],
) -> tuple[LayerFacts, ...]:
    return tuple(
        LayerFacts(
            layer=layer,
            global_layer=number,
            kind=_KINDS[number in attention, number in states],
            indexer=indexers.get(number, IndexerKind.NONE),
        )
        for layer, number in enumerate(numbers)
    )
