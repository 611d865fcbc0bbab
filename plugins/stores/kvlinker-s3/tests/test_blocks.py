"""Blocks: memory that was given back is taken again where it is long enough, and not much of it is kept."""

from __future__ import annotations

from kvlinker_s3.blocks import Blocks


def test_a_block_that_was_given_back_is_taken_again_by_one_user_alone() -> None:
    blocks = Blocks(1000)
    first = blocks.take(100)

    blocks.give(first)
    again, another = blocks.take(90), blocks.take(90)

    assert again is first
    assert another is not first
    assert another.nbytes >= 90


def test_a_block_that_is_too_short_is_not_taken() -> None:
    blocks = Blocks(1000)
    blocks.give(blocks.take(100))

    assert blocks.take(101).nbytes >= 101


def test_the_two_longest_blocks_up_to_the_limit_are_kept() -> None:
    blocks = Blocks(1000)
    given = [blocks.take(size) for size in (100, 300, 200, 1001)]
    for block in given:
        blocks.give(block)

    taken = [blocks.take(1) for _ in range(3)]

    assert {id(block) for block in taken} & {id(block) for block in given} == {
        id(given[1]),
        id(given[2]),
    }
