"""What SGLang says of the process itself: its platform, and this rank's place among the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvlinker.description import RankAxis, Replication
from kvlinker.errors import UnsupportedKVCacheError

__all__ = [
    "heads_split_over_ranks",
    "ranks_of_a_page",
    "replicated_on_all_ranks",
    "require_platform",
    "require_whole_pages",
    "sharded_over_all_ranks",
    "slots_dealt_over_ranks",
]

_HEADS, _TOKENS, _SLOTS = "tp", "cp", "dcp"
"""Names of axes: ranks that split attention heads, groups of them that split the tokens of a prompt, and neighbours
that take the slots of a page in turn."""


class _Parallel(Protocol):
    """Sizes are always known; a rank only where its size is more than 1."""

    attn_tp_size: int
    attn_tp_rank: int
    attn_cp_size: int
    attn_cp_rank: int
    enable_prefill_cp: bool
    attn_dcp_size: int
    attn_dcp_rank: int


def require_platform() -> None:
    """Refuse a platform whose kernels keep other bytes in the same pools.

    Raises:
        UnsupportedKVCacheError: ROCm; other accelerators have pool classes of their own.
    """
    import torch

    if torch.version.hip is not None:
        msg = (
            "SGLang on ROCm keeps other bytes in its pools (e4m3fnuz values, shuffled index keys, vectorized rows), "
            "and none of them is described; run on CUDA or CPU"
        )
        raise UnsupportedKVCacheError(msg)


def ranks_of_a_page() -> int:
    """Return how many ranks take the slots of a page in turn: 1 without decode context parallelism."""
    from sglang.srt.runtime_context import get_parallel

    parallel: _Parallel = get_parallel()
    return parallel.attn_dcp_size


def require_whole_pages() -> None:
    """Refuse ranks that take the slots of a page in turn, where each one's share is not described.

    Raises:
        UnsupportedKVCacheError: there are such ranks.
    """
    if (ranks := ranks_of_a_page()) > 1:
        msg = (
            f"decode context parallelism over {ranks} ranks splits the slots of a page among them, which is described "
            f"for the latents of a plain MLATokenToKVPool alone; run SGLang without --dcp-size"
        )
        raise UnsupportedKVCacheError(msg)


def slots_dealt_over_ranks(roles: Iterable[str]) -> Replication:
    """Say that neighbours take the slots of a page in turn, and that every group of them has the same.

    Raises:
        UnsupportedKVCacheError: neighbours are placed otherwise than SGLang's publisher of ranks does it.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel: _Parallel = get_parallel()
    size, rank = parallel.attn_dcp_size, parallel.attn_dcp_rank
    group, place = divmod(parallel.attn_tp_rank, size) if parallel.attn_tp_size > 1 else (0, 0)
    if parallel.attn_tp_size % size or place != rank or parallel.attn_cp_size > 1:
        msg = (
            f"rank {rank} of {size} that take the slots of a page in turn is rank {parallel.attn_tp_rank} of "
            f"{parallel.attn_tp_size} that split heads, in one of {parallel.attn_cp_size} groups that split tokens; "
            f"described are whole groups of neighbours; run SGLang without --dcp-size"
        )
        raise UnsupportedKVCacheError(msg)
    axes = [RankAxis(name=_SLOTS, rank=rank, size=size)]
    if (groups := parallel.attn_tp_size // size) > 1:
        axes.append(RankAxis(name=_HEADS, rank=group, size=groups))
    return Replication(axes=tuple(axes), sharded_over=dict.fromkeys(roles, frozenset({_SLOTS})))


def sharded_over_all_ranks() -> Replication:
    """Say that every rank of a group counts as having bytes of its own."""
    return Replication(axes=_axes())


def heads_split_over_ranks(roles: Iterable[str], *, has_drafts: bool) -> Replication:
    """Say which ranks of a group have bytes of their own where attention heads are split.

    Ranks that split a prompt's tokens gather K and V, and each of them writes all tokens to its pool
    (`materialize_full_kv` of SGLang's context-parallel strategies). Where they do not, many models split their heads
    over those ranks too, whatever their number says. So does SGLang with a draft's (`draft_attn_parallel_group`).
    Then every rank counts as having bytes of its own.
    """
    if has_drafts or _groups_may_split_heads():
        return sharded_over_all_ranks()
    axes = _axes()
    heads = frozenset(axis.name for axis in axes if axis.name == _HEADS)
    return Replication(axes=axes, sharded_over=dict.fromkeys(roles, heads))


def replicated_on_all_ranks(roles: Iterable[str]) -> Replication:
    """Say that all ranks of a group have the same bytes: there is one head, which each rank keeps whole."""
    return Replication(axes=_axes(), sharded_over={role: frozenset() for role in roles})


def _groups_may_split_heads() -> bool:
    """Return whether there are groups of ranks (--attn-cp-size) that split no tokens (--enable-prefill-cp)."""
    from sglang.srt.runtime_context import get_parallel

    parallel: _Parallel = get_parallel()
    return parallel.attn_cp_size > 1 and not parallel.enable_prefill_cp


def _axes() -> tuple[RankAxis, ...]:
    """Return the axes with more than one rank.

    Raises:
        UnsupportedKVCacheError: slots are split over the ranks.
    """
    from sglang.srt.runtime_context import get_parallel

    require_whole_pages()
    parallel: _Parallel = get_parallel()
    axes = []
    if parallel.attn_tp_size > 1:
        axes.append(RankAxis(name=_HEADS, rank=parallel.attn_tp_rank, size=parallel.attn_tp_size))
    if parallel.attn_cp_size > 1:
        axes.append(RankAxis(name=_TOKENS, rank=parallel.attn_cp_rank, size=parallel.attn_cp_size))
    return tuple(axes)
