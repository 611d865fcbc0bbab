"""Ranks that split the tokens of a prompt: after prefill each has all of them, so that one of them writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pool_groups import installed_plugins
from rank_jobs import PAGES, Servers, objects_in, restored
from rank_trees import Ranks
from real_pools import heads_pool
from sglang.srt.runtime_context import get_parallel

from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.selection import describe_cache
from kvlinker_sglang.describe.requests import DRAFTS_BESIDE

HEADS = Ranks(kind="mha", tp=2, cp=2)
"""Four ranks: of the first and third, and of the second and fourth, the heads are the same."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Servers:
    """Return servers that stored a prompt."""
    return Servers(lambda: tmp_path_factory.mktemp("ranks"))


def described(pool: object, *drafts: object) -> KVCacheDescription:
    """Return what a linker is told of a rank's pools."""
    request = DescribeRequest(page_size=16, extras={DRAFTS_BESIDE: drafts})
    return describe_cache("sglang", pool, request, registry=installed_plugins())


# ---- prefill ----------------------------------------------------------------------------------


def test_k3_heads_that_groups_gathered_are_written_by_the_first_group_and_found_by_every_rank(
    servers: Servers,
) -> None:
    kept, folder = servers(HEADS)
    found = restored(HEADS, folder)

    first, second, third, fourth = (rank.kept.digest for rank in kept)
    assert first == third != second == fourth
    assert [(rank.written, rank.skipped) for rank in kept] == [
        (PAGES, 0),
        (PAGES, 0),
        (0, 0),
        (0, 0),
    ]
    assert objects_in(folder) == 2 * PAGES
    assert all(after.has(rank) for after, rank in zip(found, kept, strict=True))


def test_k3_four_ranks_that_split_heads_alone_miss_what_two_groups_of_two_stored(
    servers: Servers,
) -> None:
    _, folder = servers(HEADS)

    assert all(rank.is_nothing for rank in restored(Ranks(kind="mha", tp=4), folder))


def test_k3_two_ranks_that_split_the_same_heads_find_what_two_groups_of_two_stored(
    servers: Servers,
) -> None:
    kept, folder = servers(HEADS)

    found = restored(Ranks(kind="mha", tp=2), folder)

    assert all(after.has(rank) for after, rank in zip(found, kept[:2], strict=True))


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_k3_one_of_two_ranks_that_split_tokens_alone_writes_for_both(
    servers: Servers, kind: str
) -> None:
    ranks = Ranks(kind=kind, cp=2, are_alike=True)

    kept, folder = servers(ranks)
    found = restored(ranks, folder)

    assert [(rank.written, rank.skipped) for rank in kept] == [(PAGES, 0), (0, 0)]
    assert objects_in(folder) == PAGES
    assert all(after.has(rank) for after, rank in zip(found, kept, strict=True))


STATES = Ranks(kind="mla", states=True, cp=2, are_alike=True)


def test_k3_states_are_each_ranks_own_where_tokens_are_split(servers: Servers) -> None:
    kept, folder = servers(STATES)
    found = restored(STATES, folder)

    assert [rank.written for rank in kept] == [PAGES + 1, 1]
    assert all(after.has(rank) for after, rank in zip(found, kept, strict=True))


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 4)])
def test_k3_ranks_that_split_otherwise_miss_states_of_two_that_split_tokens(
    servers: Servers, tp: int, cp: int
) -> None:
    _, folder = servers(STATES)

    found = restored(replace(STATES, tp=tp, cp=cp), folder)

    assert all(rank.is_nothing for rank in found)


def test_k3_heads_of_a_draft_may_be_split_over_groups_so_that_each_rank_stores_its_own() -> None:
    places = Ranks(kind="mha", tp=2, cp=2).places(3)

    with get_parallel().override(**places):
        replication = described(heads_pool(), heads_pool(layers=1)).replication

    for role in ("k", "v", "draft_k", "draft_v"):
        assert [(axis.name, axis.rank, axis.size) for axis in replication.axes_of(role)] == [
            ("cp", 1, 2),
            ("tp", 1, 2),
        ]
        assert replication.is_writer(role)
