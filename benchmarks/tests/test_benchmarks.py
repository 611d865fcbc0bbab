"""Benchmarks run, at sizes too small for figures; no time is looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from measuring import Row
from pages import PagePool
from stores import TorchFiles, slots_of

from kvlinker.device import HostAccess

FOLDER = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "script",
    [
        "bench_plans",
        "bench_copies",
        "bench_lookup",
        "bench_file_index",
        "bench_local",
        "bench_mooncake",
        "bench_redis",
        "bench_s3",
        "bench_tiers",
    ],
)
def test_a_benchmark_has_a_ratio_or_a_reason_in_every_row(script: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    options = ["--quick", "--rounds", "1", "--rows", str(path)]

    subprocess.run(
        [sys.executable, str(FOLDER / f"{script}.py"), *options],
        check=True,
        stdout=subprocess.DEVNULL,
    )

    rows = [Row.load(line) for line in path.read_text().splitlines()]
    assert rows
    assert all(row.ratio is not None or "Error: " in row.figures for row in rows)


def test_pages_come_back_from_a_store_of_files_as_they_were(tmp_path: Path) -> None:
    pool, store = PagePool.make("kv", [48, 16], 3), TorchFiles(tmp_path / "files")
    pieces, keys = store.pieces(3, 64), ["0", "1", "2"]
    before = [buffer.copy() for buffer in pool.buffers]

    HostAccess().copy_out(pool.plan, slots_of(pieces))
    store.put(keys, pieces)
    for buffer in pool.buffers:
        buffer[pool.chosen] = 0
    HostAccess().copy_in(pool.plan, slots_of(store.get(keys)))

    assert all((b == a).all() for b, a in zip(pool.buffers, before, strict=True))
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == ["0.pt", "1.pt", "2.pt"]


def test_pieces_in_any_order_are_slots_of_one_span() -> None:
    block = torch.zeros((4, 10), dtype=torch.uint8)

    slots = slots_of([block[3], block[0], block[2]])

    assert slots.slots.tolist() == [3, 0, 2]
    assert (slots.span.row_bytes, slots.span.base_ptr) == (10, block.data_ptr())


def test_pieces_at_odd_distances_are_refused() -> None:
    block = torch.zeros(64, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match="do not lie at equal distances"):
        slots_of([block[0:10], block[16:26], block[40:50]])


def test_the_pages_that_move_are_half_of_a_pool_each_once() -> None:
    pool = PagePool.make("kv", [8, 24], 5)

    assert [buffer.shape for buffer in pool.buffers] == [(10, 8), (10, 24)]
    assert len(np.unique(pool.chosen)) == pool.plan.num_pages == 5
    assert pool.plan.object_bytes == 32
