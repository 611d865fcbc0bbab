"""Requests are cut into calls that a store with a bound on ranges takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.errors import ContractError
from kvlinker.plans import PreparedPages
from kvlinker.range_limits import page_groups


def whole(pages: int) -> PreparedPages:
    return PreparedPages.of_starts("kv", np.arange(pages, dtype=np.int64), 1)


def test_without_a_bound_there_is_one_call() -> None:
    assert page_groups(whole(5), 3, None) == [range(5)]


def test_pages_are_grouped_in_order_and_each_group_is_within_the_bound() -> None:
    assert page_groups(whole(5), 3, 7) == [range(2), range(2, 4), range(4, 5)]
    assert page_groups(whole(4), 2, 8) == [range(4)]
    assert page_groups(whole(2), 3, 3) == [range(1), range(1, 2)]


def test_a_scattered_page_counts_each_of_its_runs() -> None:
    slots = np.array([0, 1, 2, 3, 8, 5, 10, 11], dtype=np.int64)
    pages = PreparedPages.of_slots("kv", slots, 4)

    assert page_groups(pages, 1, 3) == [range(1), range(1, 2)]
    assert page_groups(pages, 1, 6) == [range(2)]


def test_a_page_with_more_ranges_than_the_bound_is_refused_by_name() -> None:
    with pytest.raises(ContractError, match=r"pool 'kv': one page has 3 ranges.* takes 2"):
        page_groups(whole(5), 3, 2)


@given(st.integers(0, 40), st.integers(1, 5), st.integers(5, 30))
def test_every_page_is_in_one_group_and_no_group_breaks_the_bound(
    pages: int, spans: int, limit: int
) -> None:
    groups = page_groups(whole(pages), spans, limit)

    assert [page for group in groups for page in group] == list(range(pages))
    assert all(len(group) * spans <= limit for group in groups)
