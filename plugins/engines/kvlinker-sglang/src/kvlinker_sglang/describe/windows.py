"""Sliding-window hybrids: `SWAKVPool`, full layers in one pool of K and V, window layers in another.

SGLang's transfers for `swa` carry slots of the window pool: its tree has translated them, so that no index map is
described. Translating them again would store other slots' bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from kvlinker.description import (
    DescribeRequest,
    Fact,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
)
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker_sglang.describe.buffers import require_same_facts
from kvlinker_sglang.describe.classes import changed, class_name
from kvlinker_sglang.describe.engine import heads_split_over_ranks
from kvlinker_sglang.describe.heads import HeadsPool, heads_facts, heads_pool, heads_roles
from kvlinker_sglang.describe.refusals import require_class
from kvlinker_sglang.describe.requests import (
    ATTENTION_CHUNK_SIZE,
    draft_pools,
    require_page_size,
    sliding_window_of,
)

__all__ = ["POOL", "WindowsPool", "describe"]

POOL = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"


@runtime_checkable
class WindowsPool(Protocol):
    """What is read of an `SWAKVPool`."""

    page_size: int
    full_kv_pool: object
    swa_kv_pool: object
    layers_mapping: dict[int, tuple[int, bool]]
    swa_uses_full_indices: bool
    swa_req_ring_size: int | None


def describe(pool: object, request: DescribeRequest) -> KVCacheDescription:
    """Return the description of a worker's pool and its drafts; see `describe_pool`."""
    target = _windows_pool(pool, "the pool", request)
    full, window = _halves(target, "the pool", request)
    facts = heads_facts(full, "the full pool")
    require_same_facts(heads_facts(window, "the window pool"), facts, "the window pool")
    drafts = _drafts(request, facts)
    buffers = {**heads_roles("", [full]), **heads_roles("swa_", [window]), **drafts}
    return KVCacheDescription(
        family="swa",
        page_size=request.page_size,
        buffers=buffers,
        layers=_layers(target),
        logical_pools=(
            LogicalPool(name="kv", page_size=full.page_size),
            LogicalPool(
                name="swa", page_size=window.page_size, window=sliding_window_of(request, pool)
            ),
        ),
        facts={**facts, **_chunks(request)},
        replication=heads_split_over_ranks(buffers, has_drafts=bool(drafts)),
    )


def _windows_pool(pool: object, where: str, request: DescribeRequest) -> WindowsPool:
    require_class(pool, POOL, where)
    if not isinstance(pool, WindowsPool):
        raise changed(pool, WindowsPool)
    require_page_size(pool, pool.page_size, request)
    if pool.swa_req_ring_size is not None:
        msg = (
            f"{where}, a {class_name(pool)}, keeps a ring of {pool.swa_req_ring_size} slots for each request, and no "
            f"pages of windows; run SGLang without --enable-encoder-swa-bounded-replay"
        )
        raise UnsupportedKVCacheError(msg)
    return pool


def _halves(pool: WindowsPool, where: str, request: DescribeRequest) -> tuple[HeadsPool, HeadsPool]:
    full = heads_pool(pool.full_kv_pool, f"the full half of {where}", request)
    return full, heads_pool(pool.swa_kv_pool, f"the window half of {where}", request)


def _layers(pool: WindowsPool) -> tuple[LayerFacts, ...]:
    """Return the model's layers, `attention` or `sliding`; each half's buffers follow their order."""
    numbers = sorted(pool.layers_mapping)
    if numbers != list(range(len(numbers))):
        msg = (
            f"{class_name(pool)} has layers {numbers}, and SGLang counts the layers of such a pool from 0 in every "
            f"pipeline stage; run this model without pipeline parallelism"
        )
        raise UnsupportedKVCacheError(msg)
    _check_order(pool)
    return tuple(
        LayerFacts(
            layer=number,
            global_layer=number,
            kind="sliding" if pool.layers_mapping[number][1] else "attention",
        )
        for number in numbers
    )


def _check_order(pool: WindowsPool) -> None:
    """Refuse halves whose buffers are not in the order of the layers.

    Raises:
        UnsupportedKVCacheError: layer by layer, the positions in a half are not 0, 1, 2, ...
    """
    for half in (False, True):
        positions = [
            position
            for _, (position, sliding) in sorted(pool.layers_mapping.items())
            if sliding is half
        ]
        if positions != list(range(len(positions))):
            msg = (
                f"{class_name(pool)} keeps its layers at positions {positions}, and described are halves in the order "
                f"of their layers; use a version of SGLang that kvlinker-sglang was tested with"
            )
            raise UnsupportedKVCacheError(msg)


def _drafts(
    request: DescribeRequest, facts: Mapping[str, Fact]
) -> dict[str, tuple[BufferSpan, ...]]:
    """Return the drafts' roles: those of full layers, and those of window layers, where there are any."""
    full: list[HeadsPool] = []
    windows: list[HeadsPool] = []
    for i, draft in enumerate(draft_pools(request)):
        halves = _draft_halves(draft, f"draft pool {i}", request)
        for parts, taken in zip(halves, (full, windows), strict=True):
            for half in filter(_keeps_layers, parts):
                require_same_facts(heads_facts(half, f"draft pool {i}"), facts, f"draft pool {i}")
                taken.append(half)
    return {**_roles("draft_", full), **_roles("draft_swa_", windows)}


def _draft_halves(
    draft: object, where: str, request: DescribeRequest
) -> tuple[tuple[HeadsPool, ...], tuple[HeadsPool, ...]]:
    """Return what of a draft is addressed by slots of the full pool, and what by slots of the windows'."""
    if class_name(draft) != POOL:
        return (heads_pool(draft, where, request),), ()
    pool = _windows_pool(draft, where, request)
    full, window = _halves(pool, where, request)
    # SGLang may give a draft room for windows at every slot of the full pool, and no slots of the windows' own.
    return ((full, window), ()) if pool.swa_uses_full_indices else ((full,), (window,))


def _keeps_layers(pool: HeadsPool) -> bool:
    return pool.layer_num > 0


def _chunks(request: DescribeRequest) -> dict[str, Fact]:
    if ATTENTION_CHUNK_SIZE not in request.facts:
        return {}
    return {ATTENTION_CHUNK_SIZE: request.facts[ATTENTION_CHUNK_SIZE]}


def _roles(prefix: str, pools: Sequence[HeadsPool]) -> dict[str, tuple[BufferSpan, ...]]:
    return heads_roles(prefix, pools) if pools else {}
