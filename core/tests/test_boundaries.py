"""Boundaries are exactly the lengths that every pool can restore, and no pool is asked about more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.boundaries import (
    PoolNeed,
    common_boundaries,
    needed_pages,
    restorable_boundaries,
)
from kvlinker.errors import ContractError
from kvlinker.transfers import HitPolicy

ALL = HitPolicy.ALL_PAGES
TRAILING = HitPolicy.TRAILING_PAGES


@dataclass
class Shelf:
    """Which pages each pool holds, and what was asked of it."""

    pages: Mapping[str, set[int]]
    asked: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def probe(self, pool: str, pages: Sequence[int]) -> list[bool]:
        self.asked.append((pool, tuple(pages)))
        return [page in self.pages[pool] for page in pages]


def ends(lengths: Sequence[int], window: int) -> set[int]:
    """Return the pages of the windows that end at the lengths."""
    return {page for end in lengths for page in range(max(0, end - window), end)}


def need(pool: str, *, window: int = 0, multiple: int = 1) -> PoolNeed:
    policy = TRAILING if window else ALL
    return PoolNeed(pool=pool, policy=policy, window=window, multiple=multiple)


def holds(one: PoolNeed, pages: set[int], boundary: int) -> bool:
    """Rule L2, word by word, for one pool at one length."""
    if boundary % one.multiple:
        return False
    length = boundary // one.multiple
    first = 0 if one.policy is ALL else max(0, length - one.window)
    return all(page in pages for page in range(first, length))


def test_l2_every_restorable_length_is_returned_in_ascending_order() -> None:
    shelf = Shelf({"kv": {0, 1, 2, 3, 4}, "swa": ends([2, 5], window=2)})

    found = restorable_boundaries([need("kv"), need("swa", window=2)], 6, shelf.probe)

    assert found.boundaries == (1, 2, 5)
    assert found.limited_by == "kv"
    assert found.lacks == 5
    assert not found.is_hole


def test_l2_a_pool_of_all_pages_needs_every_page_before_the_boundary() -> None:
    shelf = Shelf({"kv": {0, 1, 3}})

    found = restorable_boundaries([need("kv")], 4, shelf.probe)

    assert found.boundaries == (1, 2)


def test_l2_a_window_that_reaches_over_the_first_page_is_shorter() -> None:
    shelf = Shelf({"kv": {0, 1, 2, 3}, "swa": {0, 1}})

    found = restorable_boundaries([need("kv"), need("swa", window=3)], 4, shelf.probe)

    assert found.boundaries == (1, 2)
    assert found.limited_by == "swa"
    assert found.lacks is None


def test_l2_no_pool_is_asked_beyond_the_longest_boundary_alive() -> None:
    shelf = Shelf({"kv": {0, 1, 2}, "index": {0, 1}, "swa": {0, 1}})
    needs = [need("swa", window=2), need("kv"), need("index")]

    restorable_boundaries(needs, 8, shelf.probe)

    assert shelf.asked == [("kv", tuple(range(8))), ("index", (0, 1, 2)), ("swa", (0, 1))]


def test_l2_nothing_is_asked_once_no_boundary_is_alive() -> None:
    shelf = Shelf({"kv": set(), "index": {0}, "swa": {0}})

    found = restorable_boundaries(
        [need("kv"), need("index"), need("swa", window=1)], 3, shelf.probe
    )

    assert found.boundaries == ()
    assert [pool for pool, _ in shelf.asked] == ["kv"]


def test_l2_a_long_prefix_is_asked_for_in_growing_pieces() -> None:
    shelf = Shelf({"kv": set(range(2000))})

    found = restorable_boundaries([need("kv")], 1000, shelf.probe)

    assert found.boundaries == tuple(range(1, 1001))
    assert found.limited_by is None
    assert [(pages[0], pages[-1]) for _, pages in shelf.asked] == [(0, 127), (128, 639), (640, 999)]


def test_l2_a_gap_behind_the_first_piece_is_found() -> None:
    shelf = Shelf({"kv": set(range(300)) - {200}})

    found = restorable_boundaries([need("kv")], 300, shelf.probe)

    assert found.boundaries[-1] == 200
    assert found.lacks == 200
    assert found.is_hole


def test_l2_an_empty_question_has_no_boundary() -> None:
    shelf = Shelf({"kv": {0}, "swa": {0}})

    found = restorable_boundaries([need("kv"), need("swa", window=1)], 0, shelf.probe)

    assert found.boundaries == ()
    assert shelf.asked == []


def test_l2_without_pools_every_length_is_restorable() -> None:
    assert restorable_boundaries([], 3, Shelf({}).probe).boundaries == (1, 2, 3)


def test_b20_the_minimum_of_per_pool_maxima_is_no_boundary() -> None:
    shelf = Shelf({"kv": {0, 1, 2}, "swa": {2}, "mamba": {1}})

    found = restorable_boundaries(
        [need("kv"), need("swa", window=1), need("mamba", window=1)], 3, shelf.probe
    )

    assert found.boundaries == ()


def test_b20_the_longest_length_that_all_pools_share_may_be_below_every_maximum() -> None:
    shelf = Shelf({"kv": {0, 1, 2}, "swa": {0, 2}, "mamba": {0, 1}})

    found = restorable_boundaries(
        [need("kv"), need("swa", window=1), need("mamba", window=1)], 3, shelf.probe
    )

    assert found.boundaries == (1,)
    assert found.limited_by == "mamba"


def test_b23_ranks_agree_on_a_length_that_each_can_restore() -> None:
    assert common_boundaries([(2, 4, 6), (2, 5)]) == (2,)
    assert common_boundaries([(2, 4, 6), (5,)]) == ()
    assert common_boundaries([(3, 1)]) == (1, 3)
    assert common_boundaries([]) == ()


def test_b25_a_missing_page_ends_the_prefix() -> None:
    shelf = Shelf({"kv": {0, 2}})

    found = restorable_boundaries([need("kv")], 3, shelf.probe)

    assert found.boundaries == (1,)
    assert needed_pages(need("kv"), found.boundaries) == [0]


def test_b24_a_hole_at_the_head_is_told_from_a_miss() -> None:
    headless = restorable_boundaries([need("kv")], 4, Shelf({"kv": {2, 3}}).probe)
    absent = restorable_boundaries([need("kv")], 4, Shelf({"kv": set()}).probe)

    assert (headless.boundaries, headless.lacks, headless.is_hole) == ((), 0, True)
    assert (absent.boundaries, absent.lacks, absent.is_hole) == ((), 0, False)


def test_b19_an_engine_that_peeks_one_page_more_needs_one_page_more() -> None:
    shelf = Shelf({"kv": set(range(8)), "swa": ends([8], window=3)})

    kept = restorable_boundaries([need("kv"), need("swa", window=3)], 8, shelf.probe)
    peeking = restorable_boundaries([need("kv"), need("swa", window=4)], 8, shelf.probe)

    assert kept.boundaries == (8,)
    assert peeking.boundaries == ()


def test_b27_a_pool_of_larger_pages_ends_only_where_one_of_its_pages_does() -> None:
    shelf = Shelf({"kv": set(range(7)), "state": {0, 1, 2}})

    found = restorable_boundaries([need("kv"), need("state", window=1, multiple=2)], 7, shelf.probe)

    assert found.boundaries == (2, 4, 6)
    assert shelf.asked[-1] == ("state", (0, 1, 2))


def test_needed_pages_are_the_windows_of_all_boundaries() -> None:
    assert needed_pages(need("swa", window=2), [1, 5, 6]) == [0, 3, 4, 5]
    assert needed_pages(need("kv"), [1, 3]) == [0, 1, 2]
    assert needed_pages(need("kv", multiple=2), [2, 4]) == [0, 1]
    assert needed_pages(need("swa", window=2, multiple=2), [8]) == [2, 3]
    assert needed_pages(need("kv"), []) == []


@pytest.mark.parametrize(("window", "multiple"), [(0, 1), (1, 0), (-1, 1), (2, -1)])
def test_a_window_without_pages_is_refused(window: int, multiple: int) -> None:
    with pytest.raises(ContractError, match=f"got {window} and {multiple}"):
        PoolNeed(pool="swa", policy=TRAILING, window=window, multiple=multiple)


needs_and_pages = st.integers(0, 24).flatmap(
    lambda length: st.tuples(
        st.just(length),
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(1, 3), st.sets(st.integers(0, 24))),
            min_size=1,
            max_size=4,
        ),
    )
)


@given(needs_and_pages)
def test_l2_the_boundaries_are_those_of_the_definition(
    case: tuple[int, list[tuple[int, int, set[int]]]],
) -> None:
    length, pools = case
    needs = [need(f"p{i}", window=w, multiple=m) for i, (w, m, _) in enumerate(pools)]
    shelf = Shelf({f"p{i}": pages for i, (_, _, pages) in enumerate(pools)})

    found = restorable_boundaries(needs, length, shelf.probe)

    assert found.boundaries == tuple(
        boundary
        for boundary in range(1, length + 1)
        if all(holds(one, shelf.pages[one.pool], boundary) for one in needs)
    )
    assert (found.limited_by is None) == (length in {0, *found.boundaries})


@given(needs_and_pages)
def test_l2_a_pool_is_asked_only_below_what_the_pools_before_it_left_alive(
    case: tuple[int, list[tuple[int, int, set[int]]]],
) -> None:
    length, pools = case
    needs = [need(f"p{i}", window=w, multiple=m) for i, (w, m, _) in enumerate(pools)]
    shelf = Shelf({f"p{i}": pages for i, (_, _, pages) in enumerate(pools)})

    restorable_boundaries(needs, length, shelf.probe)

    order = list(dict.fromkeys(pool for pool, _ in shelf.asked))
    for place, pool in enumerate(order):
        before = [one for one in needs if one.pool in order[:place]]
        alive = [
            boundary
            for boundary in range(1, length + 1)
            if all(holds(one, shelf.pages[one.pool], boundary) for one in before)
        ]
        this = next(one for one in needs if one.pool == pool)
        asked = [page for name, pages in shelf.asked if name == pool for page in pages]
        assert max(asked) < max(alive) // this.multiple
        assert len(asked) == len(set(asked))


@given(st.lists(st.sets(st.integers(1, 9)), min_size=1, max_size=4))
def test_b23_the_common_lengths_are_in_every_set_and_nothing_else(ranks: list[set[int]]) -> None:
    common = common_boundaries(ranks)

    assert list(common) == [n for n in range(1, 10) if all(n in rank for rank in ranks)]
