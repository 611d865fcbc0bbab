"""Descriptors are made of a plan's columns: one row of address, length and place for each range."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_client import FakeClient

from kvlinker.testing.shelves import Shelf
from kvlinker_nixl import NixlStoreOptions, open_nixl_store
from kvlinker_nixl.agents import Memory, Operation
from kvlinker_nixl.moving import Target, descriptors
from kvlinker_nixl.pool_memory import PoolRanges
from kvlinker_nixl.store import SlotStore


@pytest.mark.parametrize("layer", [None, 2], ids=["whole", "layer"])
def test_descriptors_are_n_by_3_and_name_each_range_of_a_plan_once(
    tmp_path: Path, layer: int | None
) -> None:
    options = NixlStoreOptions.of_config(
        {"backend": "POSIX", "path": str(tmp_path / "store"), "capacity": "4MiB", "staged": False}
    )
    store = open_nixl_store(options, client=FakeClient())
    shelf, pages = Shelf(store), [3, 0, 5]
    plan = shelf.plan(pages) if layer is None else shelf.layer_plan(pages, layer)
    starts = np.array([1000, 50_000, 9000], dtype=np.int64)

    places = PoolRanges(plan)
    local, remote = places.descriptors(starts, Target(memory=Memory.FILE, device=7))

    ranges = [
        (address, size, start + offset)
        for start, *columns in zip(starts.tolist(), *plan.nested_lists(packed=True), strict=True)
        for address, size, offset in zip(*columns, strict=True)
    ]
    assert len(ranges) == len(pages) * len(plan.spans.base)
    assert places.memory is Memory.HOST
    assert local.dtype == remote.dtype == np.uint64
    assert sorted(map(tuple, local.tolist())) == sorted((a, size, 0) for a, size, _ in ranges)
    moved = zip(local[:, 0].tolist(), remote.tolist(), strict=True)
    assert sorted((a, *row) for a, row in moved) == sorted(
        (a, at, size, 7) for a, size, at in ranges
    )
    store.close()


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([1] * 8192, [8192]),
        ([1] * 20_000, [8192, 8192, 3616]),
        ([300 << 10] * 7, [3, 3, 1]),
        ([1 << 20, 1, 3 << 20, 1, 1], [1, 1, 1, 2]),
    ],
    ids=["most", "many", "long", "longer than any"],
)
def test_a_transfer_has_so_many_ranges_and_bytes_and_no_more(
    tmp_path: Path, sizes: list[int], parts: list[int]
) -> None:
    options = NixlStoreOptions.of_config(
        {
            "backend": "POSIX",
            "path": str(tmp_path / "store"),
            "capacity": "16MiB",
            "call_bytes": "1MiB",
        }
    )
    client = FakeClient()
    store = open_nixl_store(options, client=client)
    assert isinstance(store, SlotStore)
    line, target = store.state.writes, store.state.depot.pin([], 1).target
    lengths = np.array(sizes, dtype=np.int64)
    places = np.cumsum(lengths) - lengths

    with line.blocks.borrow(int(lengths.sum())) as block:
        local = descriptors(block.address + places, lengths, 0)
        remote = descriptors(4096 + places, lengths, target.device)
        line.move(Operation.WRITE, local, remote, target, block=block)

    assert [len(handle.local) for handle in client.begun] == parts
    moved = np.concatenate([handle.remote for handle in client.begun])
    assert np.array_equal(moved, remote)
    store.close()
