"""What a store holds of a prefix depends on how far its restorable boundaries are apart."""

from __future__ import annotations

import pytest

from kvlinker.capacity import USUAL_INTERVALS, stored_prefixes
from kvlinker.errors import ContractError
from kvlinker.explanation import Explanation, PoolExplanation

PAGE = 64


def pool(name: str, page_bytes: int, **facts: int | bool) -> PoolExplanation:
    """Return a pool of three layers; facts are `page_size`, `window` and `holds_states`."""
    window = facts.get("window")
    return PoolExplanation(
        name=name,
        indices_from_pool=name,
        page_size=int(facts.get("page_size", PAGE)),
        page_bytes=page_bytes,
        spans=3,
        layers=3,
        objects_per_page=1,
        window=None if window is None else int(window),
        holds_states=bool(facts.get("holds_states")),
    )


def explanation(*pools: PoolExplanation) -> Explanation:
    return Explanation(winner="toy", problem="", verdicts=(), pools=pools)


def test_without_windows_and_states_every_page_is_a_boundary_that_costs_nothing() -> None:
    explained = explanation(pool("kv", 1000), pool("index", 24))

    prefixes = stored_prefixes(explained, page_size=PAGE)

    assert [prefix.interval_pages for prefix in prefixes] == list(USUAL_INTERVALS)
    assert {prefix.boundary_bytes for prefix in prefixes} == {0}
    assert {prefix.bytes_per_token for prefix in prefixes} == {1024 / PAGE}


def test_a_boundary_adds_its_windows_last_pages_and_one_state() -> None:
    explained = explanation(
        pool("kv", 1000),
        pool("swa", 300, window=2 * PAGE),
        pool("mamba", 5000, page_size=1, holds_states=True),
    )

    (prefix,) = stored_prefixes(explained, page_size=PAGE, intervals=[4])

    assert prefix.interval_tokens == 4 * PAGE
    assert prefix.page_bytes == 4 * 1000
    assert prefix.boundary_bytes == 2 * 300 + 5000
    assert prefix.interval_bytes == 9600


def test_windows_that_overlap_are_stored_once() -> None:
    explained = explanation(pool("kv", 1000), pool("swa", 300, window=4 * PAGE))

    prefixes = stored_prefixes(explained, page_size=PAGE, intervals=[1, 2, 4, 8])

    assert [prefix.boundary_bytes for prefix in prefixes] == [300, 600, 1200, 1200]


def test_pools_of_other_page_sizes_count_by_tokens() -> None:
    explained = explanation(
        pool("kv", 1000),
        pool("coarse", 600, page_size=2 * PAGE),
        pool("far", 70, page_size=8 * PAGE, window=1),
    )

    (prefix,) = stored_prefixes(explained, page_size=PAGE, intervals=[4])

    assert prefix.page_bytes == 4 * 1000 + 2 * 600
    assert prefix.boundary_bytes == 70


def test_a_store_holds_whole_intervals() -> None:
    explained = explanation(pool("kv", 1000), pool("swa", 1000, window=1))

    one, four = stored_prefixes(explained, page_size=PAGE, intervals=[1, 4])

    assert (one.interval_bytes, four.interval_bytes) == (2000, 5000)
    assert one.tokens_in(11_999) == 5 * PAGE
    assert four.tokens_in(11_999) == 2 * 4 * PAGE
    assert one.tokens_in(1999) == 0


@pytest.mark.parametrize("interval", [0, -1, 1.5])
def test_an_interval_is_a_number_of_pages(interval: int) -> None:
    with pytest.raises(ContractError, match="an interval of boundaries, in pages, must be"):
        stored_prefixes(explanation(pool("kv", 1)), page_size=PAGE, intervals=[interval])
