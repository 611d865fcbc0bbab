"""Room and memory of a late transfer are nobody else's until it is over, whoever sees that first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_client import FakeClient

from kvlinker.errors import StoreTimeoutError
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker_nixl import NixlStoreOptions, open_nixl_store
from kvlinker_nixl.agents import Operation
from kvlinker_nixl.blocks import Blocks
from kvlinker_nixl.moving import descriptors
from kvlinker_nixl.store import SlotStore


@pytest.fixture
def stuck() -> threading.Event:
    """Give what keeps transfers from making progress while it is set."""
    return threading.Event()


@pytest.fixture
def store(tmp_path: Path, stuck: threading.Event) -> Iterator[SlotStore]:
    """Give a staged store that is impatient."""
    options = NixlStoreOptions.of_config(
        {
            "backend": "POSIX",
            "path": str(tmp_path / "store"),
            "capacity": "4MiB",
            "transfer_seconds": 0.1,
            "pause_seconds": 0.1,
            "close_seconds": 0.5,
        }
    )
    found = open_nixl_store(options, client=FakeClient(is_stuck=stuck.is_set))
    assert isinstance(found, SlotStore)
    yield found
    stuck.clear()
    found.close()


def test_t2_room_of_a_late_write_is_given_to_others_when_it_is_over(
    store: SlotStore, stuck: threading.Event
) -> None:
    shelf, depot = Shelf(store), store.state.depot
    late, other = object_keys(2)
    shelf.stock([other])
    length = 640 + int(depot.pin([other], 640).header_bytes[0])
    first = depot.reserve([late], length)
    depot.discard(first)
    stuck.set()
    with pytest.raises(StoreTimeoutError, match="transfer_seconds"):
        shelf.write([late])

    beside = depot.reserve([late], length)
    assert beside.offsets[0] != first.offsets[0], "the late bytes would land in it"
    depot.discard(beside)

    stuck.clear()
    assert store.state.writes.blocks.sweep() == 0
    assert first.offsets[0] in {
        depot.reserve([key], length).offsets[0] for key in object_keys(2, chain="new")
    }


def test_l5_a_block_that_another_thread_gave_back_behind_a_late_transfer_is_given_back_once(
    store: SlotStore, stuck: threading.Event
) -> None:
    line = store.state.reads
    target = store.state.depot.pin([], 1).target
    stuck.set()

    with line.blocks.borrow(64) as block:
        mine = descriptors([block.address], 64, 0)
        place = descriptors([0], 64, target.device)
        with pytest.raises(StoreTimeoutError):
            line.move(Operation.READ, mine, place, target, block=block)
        stuck.clear()
        line.blocks.sweep()  # as another thread that needs a block

    assert line.blocks.take(64) is block
    assert line.blocks.take(64) is not block, "two would have the same memory"


def test_a_block_that_is_longer_than_a_transfer_is_not_kept(store: SlotStore) -> None:
    agent = store.state.reads.agent
    before, blocks = agent.registrations, Blocks(agent, 1 << 20)

    for size in (1 << 20, 2 << 20):
        with blocks.borrow(size) as block:
            assert block.size >= size
        assert agent.registrations == before + 1

    assert blocks.close(seconds=0)
    assert agent.registrations == before


def test_of_blocks_that_are_alike_the_one_that_came_back_last_is_lent_first(
    store: SlotStore,
) -> None:
    blocks = store.state.reads.blocks
    lent = [blocks.take(1 << 20) for _ in range(3)]

    for block in lent:
        blocks.give(block)

    assert [blocks.take(1 << 20) for _ in range(3)] == lent[::-1]
    for block in lent:
        blocks.give(block)
