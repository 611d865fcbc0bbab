"""Buckets find what was entered and nothing else, whatever was entered and removed before, and whatever they hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlinker.errors import StoreError
from kvlinker_file.buckets import (
    ABSENT,
    bucket_count,
    distinct,
    find_rows,
    insert_rows,
    key_words,
    remove_rows,
)

ROWS = 40


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.sets(st.integers(0, ROWS - 1), min_size=1)), max_size=30
    ),
    size=st.sampled_from([64, 1024]),
)
def test_batches_come_and_go_as_in_a_dictionary(
    steps: list[tuple[bool, set[int]]], size: int
) -> None:
    buckets = np.zeros(size, dtype=np.int32)
    table, used = key_words([key(i) for i in range(ROWS)]), 0
    there: set[int] = set()

    for is_added, numbers in steps:
        chosen = np.array(sorted(numbers - there if is_added else numbers & there), dtype=np.int64)
        if is_added:
            used += insert_rows(buckets, table[chosen], chosen)
            there |= numbers
        else:
            used -= remove_rows(buckets, table[chosen], chosen)
            there -= numbers
        found = find_rows(buckets, table, table)
        assert found.tolist() == [i if i in there else ABSENT for i in range(ROWS)]
        assert used == np.count_nonzero(buckets)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), low=st.integers(-(1 << 31), 0), high=st.integers(1, 1 << 31))
def test_garbage_in_the_buckets_finds_rows_with_the_key_or_nothing(
    seed: int, low: int, high: int
) -> None:
    buckets = np.random.default_rng(seed).integers(low, high, 1024).astype(np.int32)
    table = key_words([key(i) for i in range(ROWS)])

    found = find_rows(buckets, table, key_words([key(i) for i in range(2 * ROWS)]))

    assert all(row in (ABSENT, number) for number, row in enumerate(found.tolist()))
    assert (found[ROWS:] == ABSENT).all()


def test_full_buckets_are_an_error_and_end_every_search() -> None:
    buckets = np.full(1024, 1, dtype=np.int32)
    table = key_words([key(0)])

    with pytest.raises(StoreError, match="no bucket left for 1 objects"):
        insert_rows(buckets, key_words([key(1)]), np.array([0]))
    assert find_rows(buckets, table, key_words([key(1)])).tolist() == [ABSENT]
    assert remove_rows(buckets, key_words([key(1)]), np.array([7])) == 0


def test_there_are_at_least_twice_as_many_buckets_as_rows() -> None:
    counts = [bucket_count(rows) for rows in (0, 1, 512, 513, 1 << 20, (1 << 20) + 1)]

    assert counts == [1024, 1024, 1024, 2048, 2 << 20, 4 << 20]


@given(numbers=st.lists(st.integers(-5, 5)))
def test_distinct_numbers_ascend(numbers: list[int]) -> None:
    assert distinct(np.array(numbers, dtype=np.int64)).tolist() == sorted(set(numbers))
