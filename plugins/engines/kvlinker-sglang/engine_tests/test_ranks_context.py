"""Ranks that split the tokens of a prompt, each of which has all in the end, and ranks that take slots in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hybrid_pools import hybrid_pool, request_pool
from pool_groups import installed_plugins
from rank_jobs import PAGES, Servers, objects_in, restored
from rank_trees import Ranks
from real_pools import heads_pool, latent_pool, sparse_pool, v4_pool, windows_pool
from sglang.srt.runtime_context import get_parallel

from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.selection import describe_cache
from kvlinker_sglang.describe.requests import DRAFTS_BESIDE, SLIDING_WINDOW, STATES_BESIDE

HEADS = Ranks(kind="mha", tp=2, cp=2)
"""Four ranks: of the first and third, and of the second and fourth, the heads are the same."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Servers:
    """Return servers that stored a prompt."""
    return Servers(lambda: tmp_path_factory.mktemp("ranks"))


def described(pool: object, *drafts: object) -> KVCacheDescription:
    """Return what a linker is told of a rank's pools."""
    request = DescribeRequest(
        page_size=16, facts={SLIDING_WINDOW: 32}, extras={DRAFTS_BESIDE: drafts}
    )
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


@pytest.mark.parametrize("make", [heads_pool, windows_pool])
def test_k3_each_rank_stores_its_own_heads_where_ranks_of_several_groups_do_not_split_tokens(
    make: Callable[[], object],
) -> None:
    owners = set()

    for rank in range(HEADS.size):
        places = {**HEADS.places(rank), "enable_prefill_cp": False}
        with get_parallel().override(**places):
            replication = described(make()).replication
        assert replication.is_writer("k")
        owners.add(replication.axes_of("k"))

    # Models that know of no context parallelism split their heads over all four.
    assert len(owners) == HEADS.size


# ---- decode -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "dcp"), [(2, 2), (4, 2), (4, 4)])
def test_k3_slots_that_ranks_take_in_turn_are_found_by_as_many_after_a_restart(
    servers: Servers, tp: int, dcp: int
) -> None:
    ranks = Ranks(kind="mla", tp=tp, dcp=dcp)

    kept, folder = servers(ranks)
    found = restored(ranks, folder)

    # Each share is written once, by the first group of ranks that take turns.
    assert len({rank.kept.digest for rank in kept}) == dcp
    assert [rank.written for rank in kept] == [PAGES] * dcp + [0] * (tp - dcp)
    assert objects_in(folder) == dcp * PAGES
    assert all(after.has(rank) for after, rank in zip(found, kept, strict=True))


@pytest.mark.parametrize(("tp", "dcp"), [(2, 1), (4, 4)])
def test_k3_slots_that_are_taken_in_turn_by_more_or_fewer_miss(
    servers: Servers, tp: int, dcp: int
) -> None:
    _, folder = servers(Ranks(kind="mla", tp=2, dcp=2))

    found = restored(Ranks(kind="mla", tp=tp, dcp=dcp, are_alike=True), folder)

    assert all(rank.is_nothing for rank in found)


def test_k3_more_groups_of_ranks_that_take_turns_find_what_one_group_stored(
    servers: Servers,
) -> None:
    kept, folder = servers(Ranks(kind="mla", tp=2, dcp=2))

    found = restored(Ranks(kind="mla", tp=4, dcp=2), folder)

    assert all(after.has(kept[rank % 2]) for rank, after in enumerate(found))


@pytest.mark.parametrize("make", [heads_pool, sparse_pool, v4_pool, windows_pool])
def test_slots_of_other_pools_that_are_taken_in_turn_are_refused_by_name(
    make: Callable[[], object],
) -> None:
    pool = make()

    with (
        get_parallel().override(**Ranks(kind="mla", tp=2, dcp=2).places(0)),
        pytest.raises(UnsupportedKVCacheError, match=r"latents of a plain MLATokenToKVPool alone"),
    ):
        described(pool)


def test_slots_beside_states_that_are_taken_in_turn_are_refused_by_name() -> None:
    requests = request_pool(states="kda")
    pool = hybrid_pool(requests, family="mla", page_size=8)
    request = DescribeRequest(page_size=16, extras={STATES_BESIDE: requests})

    with (
        get_parallel().override(**Ranks(kind="mla", tp=2, dcp=2).places(0)),
        pytest.raises(UnsupportedKVCacheError, match=r"latents of a plain MLATokenToKVPool alone"),
    ):
        describe_cache("sglang", pool, request, registry=installed_plugins())


def test_drafts_beside_slots_that_are_taken_in_turn_are_refused() -> None:
    pool, draft = latent_pool(page_size=8), latent_pool(page_size=8, layers=1)

    with (
        get_parallel().override(**Ranks(kind="mla", tp=2, dcp=2).places(0)),
        pytest.raises(UnsupportedKVCacheError, match=r"1 draft pools beside latents .* 2 ranks"),
    ):
        described(pool, draft)


@pytest.mark.parametrize("places", [{"attn_dcp_rank": 1}, {"attn_tp_rank": 1}])
def test_turns_that_are_not_taken_by_neighbours_are_refused(places: dict[str, int]) -> None:
    pool = latent_pool(page_size=8)
    usual = Ranks(kind="mla", tp=2, dcp=2).places(0)

    with (
        get_parallel().override(**{**usual, **places}),
        pytest.raises(UnsupportedKVCacheError, match="described are whole groups of neighbours"),
    ):
        described(pool)
