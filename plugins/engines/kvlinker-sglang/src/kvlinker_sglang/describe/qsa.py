"""Compressed sparse attention beside states: `QSATokenToKVPool`, a hybrid with an index key for some tokens each.

The keys of a group that is not whole yet are a request's own, and no part of a page: a page has whole groups, so that
none is open at its end, and SGLang keeps none of them in its tree or its host pools either.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvlinker.description import DescribeRequest, Fact, KVCacheDescription
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker_sglang.describe.buffers import (
    HeldTensors,
    paged,
    require_same_facts,
    spans_of,
    value_format,
)
from kvlinker_sglang.describe.classes import changed, class_name
from kvlinker_sglang.describe.hybrids import describe_kind
from kvlinker_sglang.describe.requests import draft_pools

if TYPE_CHECKING:
    import torch

__all__ = ["POOL", "describe"]

POOL = "sglang.srt.mem_cache.qsa_kv_pool.QSATokenToKVPool"


@runtime_checkable
class _IndexedPool(Protocol):
    """What is read of a `QSATokenToKVPool` beside what hybrids have."""

    qsa_compress_ratio: int
    qsa_index_kv_heads: int
    qsa_index_head_dim: int
    qsa_compressed_dtype: torch.dtype
    qsa_compressed_page_size: int
    qsa_compressed_k_buffer_pool: list[torch.Tensor]
    """[slots / ratio, heads, values] for each layer of attention."""


def describe(pool: object, request: DescribeRequest) -> KVCacheDescription:
    """Return the description of a worker's pool, its states and its drafts; see `describe_pool`."""
    hybrid = describe_kind(POOL, pool, request)
    target = _indexed(pool)
    facts = _facts(target, "the pool")
    drafts = [_draft(draft, i, facts) for i, draft in enumerate(draft_pools(request))]
    indexes = {"index_k": spans_of("index_k", _keys_of(target))}
    if drafts:
        indexes["draft_index_k"] = spans_of("draft_index_k", *map(_keys_of, drafts))
    return replace(
        hybrid,
        buffers={**hybrid.buffers, **indexes},
        facts={**hybrid.facts, **facts, "kv_family": "qsa"},
    )


def _indexed(pool: object) -> _IndexedPool:
    if not isinstance(pool, _IndexedPool):
        raise changed(pool, _IndexedPool)
    return pool


def _draft(draft: object, number: int, facts: dict[str, Fact]) -> _IndexedPool:
    """Return a draft that keeps index keys as the target does.

    Raises:
        UnsupportedKVCacheError: it keeps none, or others.
    """
    where = f"draft pool {number}"
    if class_name(draft) != POOL:
        msg = (
            f"{where} is of class {class_name(draft)}, and only {POOL} is described beside index keys; "
            f"run SGLang with the model's own MTP layers, or without speculative decoding"
        )
        raise UnsupportedKVCacheError(msg)
    pool = _indexed(draft)
    require_same_facts(_facts(pool, where), facts, where)
    return pool


def _facts(pool: _IndexedPool, where: str) -> dict[str, Fact]:
    stored = {tensor.dtype for tensor in pool.qsa_compressed_k_buffer_pool}
    if stored - {pool.qsa_compressed_dtype}:
        msg = (
            f"the index keys of {where}, a {class_name(pool)}, are {stored} where {pool.qsa_compressed_dtype} is "
            f"stated; use a version of SGLang that kvlinker-sglang was tested with"
        )
        raise UnsupportedKVCacheError(msg)
    return {
        "index_format": value_format(
            pool.qsa_compressed_dtype, pool.qsa_compressed_dtype, f"the index of {where}"
        ),
        "index_values": pool.qsa_index_kv_heads * pool.qsa_index_head_dim,
        "index_kpool": pool.qsa_compress_ratio,
    }


def _keys_of(pool: _IndexedPool) -> HeldTensors:
    """Return what reads a pool's index keys, a row for each page."""
    return paged(lambda: pool.qsa_compressed_k_buffer_pool, pool.qsa_compressed_page_size)
