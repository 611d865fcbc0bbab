"""What a store is compared with does the work that it is said to do: bytes leave the pages, and come back to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bench_local import MappedFile, PagesInCalls, PagesInMap, SystemCalls
from numpy.typing import NDArray
from pages import PagePool
from remote_stores import CopyingClient, PageClient, Pages, RawClient, Shape

SHAPE = Shape(name="three ranges", ranges=[24, 8, 40])
OBJECTS = 5
EVERY = slice(None)


def random_block() -> NDArray[np.uint8]:
    rng = np.random.default_rng(7)
    return rng.integers(0, 255, (OBJECTS, SHAPE.object_bytes), dtype=np.uint8)


def content(pages: Pages) -> NDArray[np.uint8]:
    """Return what stands in the pages, an object a line."""
    return np.hstack([buffer[pages.pool.chosen] for buffer in pages.pool.buffers])


def spoil(pages: Pages) -> None:
    for buffer in pages.pool.buffers:
        buffer[:] = 0


def pages_of(block: NDArray[np.uint8]) -> Pages:
    pool = PagePool.make("raw", SHAPE.ranges, OBJECTS, seed=3)
    return Pages(pool=pool, ranges=SHAPE.ranges, block=block)


class InBlock(RawClient):
    """Values in a dictionary, which are put from the block and read into it, as Mooncake and NIXL do."""

    def __init__(self, block: NDArray[np.uint8]) -> None:
        """Take the bytes of all objects."""
        self.block = block
        self.values: dict[int, NDArray[np.uint8]] = {}

    def put(self, part: slice) -> None:
        """See RawClient."""
        self.values |= {i: self.block[i].copy() for i in range(OBJECTS)[part]}

    def get(self, part: slice) -> None:
        """See RawClient."""
        for i in range(OBJECTS)[part]:
            self.block[i] = self.values[i]

    def get_ranges(self, part: slice) -> None:
        """See RawClient."""
        self.get(part)

    def forget(self) -> None:
        """See RawClient."""
        self.values.clear()

    def look_up(self, names: object) -> None:
        """See RawClient."""


CLIENTS: dict[type[PageClient], Callable[[Path, NDArray[np.uint8]], RawClient]] = {
    CopyingClient: lambda _, block: InBlock(block),
    PagesInCalls: lambda folder, block: SystemCalls(folder, SHAPE, block),
    PagesInMap: lambda folder, block: MappedFile(folder, SHAPE, block),
}


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("by_layer", [False, True])
def test_bytes_leave_the_pages_and_come_back_to_them(
    kind: type[PageClient], tmp_path: Path, *, by_layer: bool
) -> None:
    block = random_block()
    pages = pages_of(block)
    client = CLIENTS[kind](tmp_path, block).from_pages(pages)
    before = content(pages)

    client.put(EVERY)
    spoil(pages)
    block[:] = 0
    for part in (slice(3, 5), slice(0, 3)):
        (client.get_ranges if by_layer else client.get)(part)

    assert isinstance(client, kind)
    assert before.any()
    assert np.array_equal(content(pages), before)


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_thread_moves_its_part_alone(kind: type[PageClient], tmp_path: Path) -> None:
    block = random_block()
    pages = pages_of(block)
    client = CLIENTS[kind](tmp_path, block).from_pages(pages)
    before = content(pages)
    client.put(EVERY)
    spoil(pages)

    client.get(slice(1, 3))

    assert np.array_equal(content(pages)[1:3], before[1:3])
    assert not content(pages)[[0, 3, 4]].any()
