"""Stages of a pipeline below the server, which refuses them: each one's tree stores and finds its own layers."""

from __future__ import annotations

import pytest
from rank_jobs import PAGES, Servers, objects_in, restored
from rank_trees import V4_RATIOS, Ranks

UNEVEN = ((0, 2), (2, 7))
"""The first one has no layer with compressed KV, and the second one all."""
FOUR = ((0, 2), (2, 4), (4, 6), (6, 7))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Servers:
    """Return servers that stored a prompt."""
    return Servers(lambda: tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize("stages", [UNEVEN, FOUR], ids=["two", "four"])
def test_k3_each_of_uneven_stages_finds_its_own_layers_after_a_restart(
    servers: Servers, stages: tuple[tuple[int, int], ...]
) -> None:
    ranks = Ranks(kind="v4", stages=stages)

    kept, folder = servers(ranks)
    found = restored(ranks, folder)

    for (start, end), stage in zip(stages, kept, strict=True):
        assert ("c4_kv" in stage.roles) == (4 in V4_RATIOS[start:end])
        assert ("c128_kv" in stage.roles) == (128 in V4_RATIOS[start:end])
        assert "swa_kv" in stage.roles
    assert "c4_kv" not in kept[0].roles
    assert objects_in(folder) == sum(stage.written for stage in kept)
    assert all(after.has(stage) for after, stage in zip(found, kept, strict=True))


@pytest.mark.parametrize(
    "other", [((0, 3), (3, 7)), ((0, 1), (1, 3), (3, 5), (5, 7))], ids=["two", "four"]
)
def test_k3_layers_that_are_split_otherwise_miss(
    servers: Servers, other: tuple[tuple[int, int], ...]
) -> None:
    _, folder = servers(Ranks(kind="v4", stages=UNEVEN))

    found = restored(Ranks(kind="v4", stages=other), folder)

    assert all(stage.is_nothing for stage in found)


def test_k3_stages_whose_pools_look_alike_store_under_keys_of_their_own(servers: Servers) -> None:
    ranks = Ranks(kind="mla", stages=((0, 3), (3, 6)))

    kept, folder = servers(ranks)
    found = restored(ranks, folder)

    assert [(stage.written, stage.skipped) for stage in kept] == [(PAGES, 0)] * 2
    assert kept[0].kept.digest != kept[1].kept.digest
    assert all(after.has(stage) for after, stage in zip(found, kept, strict=True))


def test_k3_two_stages_of_two_ranks_each_find_four_shares(servers: Servers) -> None:
    ranks = Ranks(kind="mha", tp=2, stages=((0, 2), (2, 4)))

    kept, folder = servers(ranks)
    found = restored(ranks, folder)
    shifted = restored(Ranks(kind="mha", tp=2, stages=((0, 1), (1, 4))), folder)

    assert len({rank.kept.digest for rank in kept}) == 4
    assert objects_in(folder) == 4 * PAGES
    assert all(after.has(rank) for after, rank in zip(found, kept, strict=True))
    assert all(rank.is_nothing for rank in shifted)


def test_k3_latents_are_written_by_the_first_rank_of_each_stage(servers: Servers) -> None:
    ranks = Ranks(kind="mla", tp=2, stages=((0, 2), (2, 4)), are_alike=True)

    kept, folder = servers(ranks)
    found = restored(ranks, folder)

    assert [rank.written for rank in kept] == [PAGES, 0, PAGES, 0]
    assert objects_in(folder) == 2 * PAGES
    assert all(after.has(rank) for after, rank in zip(found, kept, strict=True))
