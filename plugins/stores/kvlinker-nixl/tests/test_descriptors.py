"""Descriptors are made of a plan's columns: one row of address, length and place for each range."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_client import FakeClient

from kvlinker.testing.shelves import Shelf
from kvlinker_nixl import NixlStoreOptions, open_nixl_store
from kvlinker_nixl.agents import Memory
from kvlinker_nixl.moving import Target
from kvlinker_nixl.pool_memory import PoolRanges


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
