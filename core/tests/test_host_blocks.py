"""Tests of host blocks: memory that was given back is lent again where it is long enough, to one at a time."""

from __future__ import annotations

import numpy as np

from kvlinker.host_blocks import HostBlocks


def test_a_block_is_lent_to_one_at_a_time_and_used_again() -> None:
    blocks = HostBlocks(100)

    with blocks.lent(80) as first, blocks.lent(50) as second:
        assert (len(first), len(second)) == (80, 50)
        assert not np.shares_memory(first, second)
    with blocks.lent(60) as third, blocks.lent(40) as fourth:
        assert np.shares_memory(third, first)
        assert np.shares_memory(fourth, second)


def test_a_block_that_is_longer_than_the_longest_is_not_kept() -> None:
    blocks = HostBlocks(100)

    with blocks.lent(200) as long:
        pass
    with blocks.lent(200) as longer:
        assert not np.shares_memory(long, longer)


def test_the_longest_blocks_are_kept_and_so_many_alone() -> None:
    blocks = HostBlocks(1000, kept=2)
    given = [blocks.take(size) for size in (100, 300, 200)]
    for block in given:
        blocks.give_back(block)

    taken = [blocks.take(1) for _ in range(3)]

    assert {id(block) for block in taken} & {id(block) for block in given} == {
        id(given[1]),
        id(given[2]),
    }


def test_a_block_that_is_too_short_is_not_lent() -> None:
    blocks = HostBlocks(1000)
    blocks.give_back(blocks.take(100))

    assert len(blocks.take(101)) >= 101


def test_blocks_come_from_where_the_store_says() -> None:
    made: list[int] = []

    def allocate(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        made.append(size)
        return np.zeros(size, dtype=np.uint8)

    blocks = HostBlocks(1000, allocate=allocate)
    for _ in range(3):
        with blocks.lent(64):
            pass

    assert made == [64]
