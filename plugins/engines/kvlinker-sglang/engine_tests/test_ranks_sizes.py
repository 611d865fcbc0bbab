"""Ranks in processes of their own, agreeing over gloo: their bytes, their keys, and who writes what they share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
from rank_jobs import PAGES, Stored, restored, stored
from rank_trees import Ranks

from kvlinker_file import FileStore, FileStoreOptions

Before = Callable[[Ranks], tuple[list[Stored], Path]]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Before:
    """Return a function that lets a server store a prompt, once, and tells what was stored, and in which folder."""

    @cache
    def before(ranks: Ranks) -> tuple[list[Stored], Path]:
        folder = tmp_path_factory.mktemp("ranks")
        return stored(ranks, folder), folder

    return before


def objects_in(folder: Path) -> int:
    """Count what a server's store holds."""
    options = FileStoreOptions.of_config({"path": str(folder / "store"), "capacity": "64MiB"})
    with closing(FileStore(options)) as store:
        return store.stats().objects


# ---- heads that are split ---------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_k3_each_rank_stores_its_heads_and_as_many_ranks_find_them_after_a_restart(
    before: Before, size: int
) -> None:
    ranks = Ranks(kind="mha", tp=size)

    kept, folder = before(ranks)
    found = restored(ranks, folder)

    assert len({rank.kept.digest for rank in kept}) == size
    assert [(rank.written, rank.skipped) for rank in kept] == [(PAGES, 0)] * size
    assert objects_in(folder) == size * PAGES
    assert all(after.has(rank) for after, rank in zip(found, kept, strict=True))


@pytest.mark.parametrize(("size", "other"), [(2, 1), (2, 4), (4, 2)])
def test_k3_more_or_fewer_ranks_miss_what_ranks_stored_of_heads(
    before: Before, size: int, other: int
) -> None:
    _, folder = before(Ranks(kind="mha", tp=size))

    found = restored(Ranks(kind="mha", tp=other), folder)

    assert all(rank.is_nothing for rank in found)


# ---- what ranks share -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "size", "parts"),
    [("mla", 2, 1), ("mla", 4, 1), ("dsa", 2, 2)],
)
def test_k3_what_all_ranks_have_alike_the_first_writes_once_and_every_rank_finds(
    before: Before, kind: str, size: int, parts: int
) -> None:
    ranks = Ranks(kind=kind, tp=size, are_alike=True)

    kept, folder = before(ranks)
    found = restored(ranks, folder)

    assert len({rank.kept.digest for rank in kept}) == 1
    others = [(0, 0)] * (size - 1)
    assert [(rank.written, rank.skipped) for rank in kept] == [(parts * PAGES, 0), *others]
    assert objects_in(folder) == parts * PAGES
    assert all(after.has(rank) for after, rank in zip(found, kept, strict=True))


@pytest.mark.parametrize("other", [1, 4])
def test_k3_what_all_ranks_have_alike_is_found_by_more_or_fewer_of_them(
    before: Before, other: int
) -> None:
    kept, folder = before(Ranks(kind="mla", tp=2, are_alike=True))

    found = restored(Ranks(kind="mla", tp=other, are_alike=True), folder)

    assert all(rank.has(kept[0]) for rank in found)


# ---- both beside each other -------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_k3_latents_are_written_once_beside_states_that_each_rank_has_for_itself(
    before: Before, size: int
) -> None:
    ranks = Ranks(kind="mla", states=True, tp=size, are_alike=True)

    kept, folder = before(ranks)
    found = restored(ranks, folder)

    assert len({rank.kept.digest for rank in kept}) == size
    assert [rank.written for rank in kept] == [PAGES + 1, *[1] * (size - 1)]
    assert objects_in(folder) == PAGES + size
    assert all(after.has(rank) for after, rank in zip(found, kept, strict=True))


@pytest.mark.parametrize("other", [1, 4])
def test_k3_more_or_fewer_ranks_miss_latents_whose_states_are_split_otherwise(
    before: Before, other: int
) -> None:
    _, folder = before(Ranks(kind="mla", states=True, tp=2, are_alike=True))

    found = restored(Ranks(kind="mla", states=True, tp=other, are_alike=True), folder)

    assert all(rank.is_nothing for rank in found)
