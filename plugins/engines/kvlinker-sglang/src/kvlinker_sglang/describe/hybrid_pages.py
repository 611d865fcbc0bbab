"""Pages beside states: what the layers of attention in a hybrid keep, with the drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from kvlinker.description import DescribeRequest, Fact, IndexerKind
from kvlinker.spans import BufferSpan
from kvlinker_sglang.describe.buffers import require_same_facts, spans_of
from kvlinker_sglang.describe.classes import class_name
from kvlinker_sglang.describe.heads import POOL as HEADS_POOL
from kvlinker_sglang.describe.heads import draft_heads, heads_facts, heads_pool, heads_roles
from kvlinker_sglang.describe.latent import POOL as LATENT_POOL
from kvlinker_sglang.describe.latent import latent_facts, latent_pool, latents_of
from kvlinker_sglang.describe.refusals import refusal_of
from kvlinker_sglang.describe.sparse import POOL as SPARSE_POOL
from kvlinker_sglang.describe.sparse import (
    index_keys_of,
    indexers_of,
    sparse_facts,
    sparse_latents_of,
    sparse_pool,
)

__all__ = ["Pages", "pages_of"]

_Pool = TypeVar("_Pool")
_WHERE = "the pool of the layers of attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """What a hybrid keeps in pages, in the words of the family that keeps them alone."""

    family: str
    buffers: Mapping[str, tuple[BufferSpan, ...]]
    facts: Mapping[str, Fact]
    replicated: frozenset[str]
    """Roles that all ranks of a group have the same bytes in."""
    indexers: Mapping[int, IndexerKind] = field(default_factory=dict)
    """Global layer to whether it selects by an index of its own; empty where attention is not sparse."""


def pages_of(
    pool: object, drafts: Sequence[object], numbers: Sequence[int], request: DescribeRequest
) -> Pages:
    """Return the pages of a hybrid's layers of attention, and of its drafts.

    Args:
        pool: what keeps them.
        drafts: pools of draft models, beside the target's or its own MTP layers.
        numbers: global layers of attention, in the order of the pool's buffers.
        request: what is asked for.

    Raises:
        UnsupportedKVCacheError: a pool is of another class, or keeps its values in another way.
        ContractError: pages are not the tree's.
    """
    kind = class_name(pool)
    if kind not in _BY_CLASS:
        raise refusal_of(pool)
    return _BY_CLASS[kind](pool, drafts, numbers, request)


def _heads(
    pool: object, drafts: Sequence[object], numbers: Sequence[int], request: DescribeRequest
) -> Pages:
    del numbers
    target = heads_pool(pool, _WHERE, request)
    facts = heads_facts(target, _WHERE)
    riding = [heads_pool(draft, f"draft pool {i}", request) for i, draft in enumerate(drafts)]
    return Pages(
        family="mha",
        buffers={**heads_roles("", [target]), **draft_heads(riding, facts)},
        facts=facts,
        replicated=frozenset(),
    )


def _latents(
    pool: object, drafts: Sequence[object], numbers: Sequence[int], request: DescribeRequest
) -> Pages:
    del numbers
    target = latent_pool(pool, _WHERE, request)
    facts = latent_facts(target, _WHERE)
    riding = _alike(drafts, request, latent_pool, latent_facts, facts)
    buffers = {"latent": spans_of("latent", latents_of(target))}
    if riding:
        buffers["draft_latent"] = spans_of("draft_latent", *map(latents_of, riding))
    beside, beside_facts = _draft_heads(drafts, request)
    return Pages(
        family="mla",
        buffers={**buffers, **beside},
        facts={**facts, **beside_facts},
        replicated=frozenset(buffers),
    )


def _sparse(
    pool: object, drafts: Sequence[object], numbers: Sequence[int], request: DescribeRequest
) -> Pages:
    target = sparse_pool(pool, _WHERE, request)
    facts = sparse_facts(target, _WHERE)
    riding = _alike(drafts, request, sparse_pool, sparse_facts, facts)
    buffers = {
        "kv": spans_of("kv", sparse_latents_of(target)),
        "index_k": spans_of("index_k", index_keys_of(target)),
    }
    if riding:
        buffers["draft_kv"] = spans_of("draft_kv", *map(sparse_latents_of, riding))
        buffers["draft_index_k"] = spans_of("draft_index_k", *map(index_keys_of, riding))
    beside, beside_facts = _draft_heads(drafts, request)
    return Pages(
        family="dsa",
        buffers={**buffers, **beside},
        facts={**facts, **beside_facts},
        replicated=frozenset(buffers),
        indexers=dict(zip(numbers, indexers_of(target, numbers, request), strict=True)),
    )


def _alike(
    drafts: Sequence[object],
    request: DescribeRequest,
    checked: Callable[[object, str, DescribeRequest], _Pool],
    facts_of: Callable[[_Pool, str], Mapping[str, Fact]],
    facts: Mapping[str, Fact],
) -> list[_Pool]:
    """Return the drafts that keep what the target keeps, those with heads left out.

    Raises:
        UnsupportedKVCacheError: one is of another class, or keeps its values otherwise than the target.
    """
    alike = []
    for i, draft in enumerate(drafts):
        if class_name(draft) != HEADS_POOL:
            pool = checked(draft, f"draft pool {i}", request)
            require_same_facts(facts_of(pool, f"draft pool {i}"), facts, f"draft pool {i}")
            alike.append(pool)
    return alike


def _draft_heads(
    drafts: Sequence[object], request: DescribeRequest
) -> tuple[dict[str, tuple[BufferSpan, ...]], dict[str, Fact]]:
    """Return the roles and facts of drafts with heads beside a target with latents; none without such drafts.

    Raises:
        UnsupportedKVCacheError: they keep their values otherwise than one another.
    """
    riding = [
        heads_pool(draft, f"draft pool {i}", request)
        for i, draft in enumerate(drafts)
        if class_name(draft) == HEADS_POOL
    ]
    if not riding:
        return {}, {}
    facts = heads_facts(riding[0], "the first draft pool with heads")
    return draft_heads(riding, facts), {
        "draft_kv_layout": facts["kv_layout"],
        "draft_kv_format": facts["kv_format"],
    }


_BY_CLASS: Mapping[
    str, Callable[[object, Sequence[object], Sequence[int], DescribeRequest], Pages]
] = MappingProxyType({HEADS_POOL: _heads, LATENT_POOL: _latents, SPARSE_POOL: _sparse})
"""By the exact class."""
