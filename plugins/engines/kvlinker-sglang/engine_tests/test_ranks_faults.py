"""One rank's store fails, hangs or lacks pages alone: all ranks act alike, and nothing wrong is ever used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
from rank_faults import FEWER, LOADS, LOOKUPS, OFFLOADS, PAGES, Endured, endured
from rank_trees import Ranks

Outcomes = list[Mapping[tuple[str, str], Endured]]
PLACES = {
    "the first of two": (Ranks(kind="mha", tp=2), 0),
    "the last of four": (Ranks(kind="mha", tp=4), 3),
    "one of two with the same": (Ranks(kind="mla", tp=2, are_alike=True), 1),
    "the one of two with the same that writes": (Ranks(kind="mla", tp=2, are_alike=True), 0),
}
"""Which rank's store fails, among which ranks."""
each_place = pytest.mark.parametrize("place", PLACES)


def writes(place: str) -> bool:
    """Whether the rank whose store fails writes pages: of ranks with the same, the first alone does."""
    ranks, bad = PLACES[place]
    return not ranks.are_alike or bad == 0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcomes]:
    """Return a function that tells what each rank saw of every fault, and tries them once."""

    @cache
    def outcomes(place: str) -> Outcomes:
        ranks, bad = PLACES[place]
        return endured(ranks, bad, tmp_path_factory.mktemp("faults"))

    return outcomes


@each_place
@pytest.mark.parametrize("fault", LOOKUPS)
def test_l1_a_lookup_that_fails_on_one_rank_is_a_miss_on_all_and_a_hit_once_it_answers(
    outcomes: Callable[[str], Outcomes], place: str, fault: str
) -> None:
    for rank in outcomes(place):
        seen = rank["lookup", fault]
        assert (seen.offered, seen.failed, seen.got.slots) == (0, False, ())
        assert seen.retried == PAGES
        assert seen.again.digest == seen.before.digest


@each_place
@pytest.mark.parametrize("fault", LOADS)
def test_l1_a_load_that_fails_on_one_rank_fails_on_all_and_all_agree_on_what_is_left(
    outcomes: Callable[[str], Outcomes], place: str, fault: str
) -> None:
    seen = [rank["load", fault] for rank in outcomes(place)]

    assert [(rank.offered, rank.failed) for rank in seen] == [(PAGES, True)] * len(seen)
    assert len({rank.retried for rank in seen}) == 1
    assert seen[0].retried < PAGES


@each_place
@pytest.mark.parametrize("fault", OFFLOADS)
def test_l1_pages_that_one_rank_could_not_store_are_offered_to_none(
    outcomes: Callable[[str], Outcomes], place: str, fault: str
) -> None:
    for rank in outcomes(place):
        seen = rank["offload", fault]
        assert (seen.offered, seen.failed) == (FEWER if writes(place) else PAGES, False)
        assert seen.got.digest == (seen.head if writes(place) else seen.before).digest
        assert seen.again.digest == seen.before.digest


@pytest.mark.parametrize("place", [place for place in PLACES if writes(place)])
@pytest.mark.parametrize("fault", LOADS)
def test_l5_what_one_rank_lost_comes_back_to_all_once_it_was_computed_again(
    outcomes: Callable[[str], Outcomes], place: str, fault: str
) -> None:
    for rank in outcomes(place):
        seen = rank["load", fault]
        assert seen.again.digest == seen.before.digest
