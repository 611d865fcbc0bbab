"""Ranks in processes of their own, agreeing over gloo: their bytes, their keys, and who writes what they share."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_jobs import PAGES, Servers, launches, objects_in, restored
from rank_trees import Ranks


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Servers:
    """Return servers that stored a prompt."""
    return Servers(lambda: tmp_path_factory.mktemp("ranks"))


def test_k2_ranks_of_one_start_call_it_alike_and_no_other_start(tmp_path: Path) -> None:
    first, second = (launches(2, tmp_path) for _ in range(2))

    assert first[0] == first[1] != second[0] == second[1]


# ---- heads that are split ---------------------------------------------------------------------


@pytest.mark.parametrize(("size", "core"), [(2, "rust"), (2, "python"), (4, "rust")])
def test_k3_each_rank_stores_its_heads_and_as_many_ranks_find_them_after_a_restart(
    servers: Servers, size: int, core: str
) -> None:
    ranks = Ranks(kind="mha", tp=size, core=core)

    kept, folder = servers(ranks)
    found = restored(ranks, folder)

    assert len({rank.kept.digest for rank in kept}) == size
    assert [(rank.written, rank.skipped) for rank in kept] == [(PAGES, 0)] * size
    assert objects_in(folder) == size * PAGES
    assert all(after.has(rank) for after, rank in zip(found, kept, strict=True))


@pytest.mark.parametrize(("size", "other"), [(2, 1), (2, 4), (4, 2)])
def test_k3_more_or_fewer_ranks_miss_what_ranks_stored_of_heads(
    servers: Servers, size: int, other: int
) -> None:
    _, folder = servers(Ranks(kind="mha", tp=size))

    found = restored(Ranks(kind="mha", tp=other), folder)

    assert all(rank.is_nothing for rank in found)


# ---- what ranks share -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "size", "parts"),
    [("mla", 2, 1), ("mla", 4, 1), ("dsa", 2, 2)],
)
def test_k3_what_all_ranks_have_alike_the_first_writes_once_and_every_rank_finds(
    servers: Servers, kind: str, size: int, parts: int
) -> None:
    ranks = Ranks(kind=kind, tp=size, are_alike=True)

    kept, folder = servers(ranks)
    found = restored(ranks, folder)

    assert len({rank.kept.digest for rank in kept}) == 1
    others = [(0, 0)] * (size - 1)
    assert [(rank.written, rank.skipped) for rank in kept] == [(parts * PAGES, 0), *others]
    assert objects_in(folder) == parts * PAGES
    assert all(after.has(rank) for after, rank in zip(found, kept, strict=True))


@pytest.mark.parametrize("other", [1, 4])
def test_k3_what_all_ranks_have_alike_is_found_by_more_or_fewer_of_them(
    servers: Servers, other: int
) -> None:
    kept, folder = servers(Ranks(kind="mla", tp=2, are_alike=True))

    found = restored(Ranks(kind="mla", tp=other, are_alike=True), folder)

    assert all(rank.has(kept[0]) for rank in found)


# ---- both beside each other -------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_k3_latents_are_written_once_beside_states_that_each_rank_has_for_itself(
    servers: Servers, size: int
) -> None:
    ranks = Ranks(kind="mla", states=True, tp=size, are_alike=True)

    kept, folder = servers(ranks)
    found = restored(ranks, folder)

    assert len({rank.kept.digest for rank in kept}) == size
    assert [rank.written for rank in kept] == [PAGES + 1, *[1] * (size - 1)]
    assert objects_in(folder) == PAGES + size
    assert all(after.has(rank) for after, rank in zip(found, kept, strict=True))


@pytest.mark.parametrize("other", [1, 4])
def test_k3_more_or_fewer_ranks_miss_latents_whose_states_are_split_otherwise(
    servers: Servers, other: int
) -> None:
    _, folder = servers(Ranks(kind="mla", states=True, tp=2, are_alike=True))

    found = restored(Ranks(kind="mla", states=True, tp=other, are_alike=True), folder)

    assert all(rank.is_nothing for rank in found)
