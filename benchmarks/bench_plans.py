"""Compare plans with those of SGLang 0.5.23's own pool classes, on the same geometry in the same run.

The reference makes nested lists of integers for every layer of a load. Ours is measured three ways:
as plans (columns, nothing expanded), expanded to int64 arrays, and lowered to the same nested lists,
which are compared with the reference's before anything is timed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
import time
import tracemalloc
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.entries import DevicePoolEntry
from kvlinker.plans import LayerMetadata
from kvlinker.spans import BufferSpan

TARGETS = {"expanded": 20.0, "lowered": 4.0, "plans": 500.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """One pool of a model: bytes of a page in each layer's buffer, and the layers that have one."""

    name: str
    page_bytes: int
    layers: Sequence[int]
    rows_are_pages: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Pools of one model with their page size."""

    name: str
    page_size: int
    num_layers: int
    pools: Sequence[PoolShape]


def _models() -> tuple[Model, ...]:
    v4 = (128, 128, *(4, 128) * 29, 4)
    c4 = [layer for layer, ratio in enumerate(v4) if ratio == 4]
    c128 = [layer for layer, ratio in enumerate(v4) if ratio == 128]
    return (
        Model(
            name="DSA, 61 layers, page 64",
            page_size=64,
            num_layers=61,
            pools=[
                PoolShape(name="kv", page_bytes=64 * 656, layers=range(61), rows_are_pages=False),
                PoolShape(name="indexer", page_bytes=8448, layers=range(61)),
            ],
        ),
        Model(
            name="V4-Pro, 61 layers, page 256",
            page_size=256,
            num_layers=61,
            pools=[
                PoolShape(name="swa", page_bytes=149760, layers=range(61)),
                PoolShape(name="deepseek_v4_c4", page_bytes=37440, layers=c4),
                PoolShape(name="deepseek_v4_c4_indexer", page_bytes=8448, layers=c4),
                PoolShape(name="deepseek_v4_c128", page_bytes=1728, layers=c128),
                PoolShape(name="deepseek_v4_c4_state", page_bytes=65536, layers=c4),
                PoolShape(name="deepseek_v4_c4_indexer_state", page_bytes=16384, layers=c4),
            ],
        ),
    )


class ReferencePool(Protocol):
    """What is used of the reference's entry."""

    def prepare_locations(self, indices: object) -> list[int]:
        """Return the rows of the pages."""
        ...

    def get_prepared_layer_range_meta(
        self, locations: list[int], layer: int
    ) -> LayerMetadata | None:
        """Return nested lists of addresses, sizes and offsets."""
        ...


def _reference_entries(model: Model, pages: int) -> list[ReferencePool]:
    """Return SGLang's own entries over lazily committed memory that nobody touches."""
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
        DevicePoolEntry as ReferenceEntry,
    )

    entries: list[ReferencePool] = []
    for pool in model.pools:
        rows = pages if pool.rows_are_pages else pages * model.page_size
        row_bytes = pool.page_bytes if pool.rows_are_pages else pool.page_bytes // model.page_size
        buffers = [torch.empty((rows, row_bytes), dtype=torch.uint8) for _ in pool.layers]
        entries.append(
            ReferenceEntry(
                name=PoolName(pool.name),
                indices_from_pool=PoolName.KV,
                device_pool=None,
                components=[buffers],
                layer_mapping={layer: i for i, layer in enumerate(pool.layers)},
                page_size=model.page_size,
                rows_are_pages=pool.rows_are_pages,
            )
        )
    return entries


def _our_entries(model: Model, reference: Sequence[object]) -> list[DevicePoolEntry]:
    """Return our entries over the reference's very buffers."""
    entries = []
    for pool, theirs in zip(model.pools, reference, strict=True):
        buffers = vars(theirs)["kv_buffer"]
        spans = [BufferSpan.from_tensor(b, label=f"{pool.name}[{i}]") for i, b in enumerate(buffers)]
        entries.append(
            DevicePoolEntry(
                name=pool.name,
                indices_from_pool="kv",
                components=[spans],
                layer_mapping={layer: i for i, layer in enumerate(pool.layers)},
                page_size=model.page_size,
                rows_are_pages=pool.rows_are_pages,
            )
        )
    return entries


def _indices(model: Model, pages: int) -> IndexArray:
    order = np.random.default_rng(0).permutation(pages)
    return (order[:, None] * model.page_size + np.arange(model.page_size)).reshape(-1)


def _seconds(run: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def _peak_bytes(run: Callable[[], object]) -> int:
    tracemalloc.start()
    kept = run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return peak


def measure(model: Model, pages: int, repeats: int) -> str:
    """Return one row of the table."""
    import torch

    theirs = _reference_entries(model, pages)
    ours = _our_entries(model, theirs)
    slots = _indices(model, pages)
    tensor = torch.from_numpy(slots)
    layers = range(model.num_layers)
    locations = [entry.prepare_locations(tensor) for entry in theirs]
    prepared = [entry.prepare_locations(slots) for entry in ours]

    def reference() -> object:
        return [
            e.get_prepared_layer_range_meta(where, layer)
            for layer in layers
            for e, where in zip(theirs, locations, strict=True)
        ]

    def lowered() -> object:
        return [
            e.get_prepared_layer_range_meta(where, layer)
            for layer in layers
            for e, where in zip(ours, prepared, strict=True)
        ]

    def plans() -> object:
        return [
            e.layer_plan(where, layer)
            for layer in layers
            for e, where in zip(ours, prepared, strict=True)
        ]

    def expanded() -> object:
        found = (
            e.layer_plan(where, layer)
            for layer in layers
            for e, where in zip(ours, prepared, strict=True)
        )
        return [plan.expand() for plan in found if plan is not None]

    if reference() != lowered():
        msg = f"{model.name}, {pages} pages: lowered lists differ from the reference's"
        raise SystemExit(msg)
    gc.collect()
    runs = {"reference": reference, "plans": plans, "expanded": expanded, "lowered": lowered}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].extend(_seconds(run, 1))
    base = statistics.median(times["reference"])
    ratios = {name: base / statistics.median(t) for name, t in times.items() if name != "reference"}
    spread = (max(times["reference"]) - min(times["reference"])) / base
    memory = _peak_bytes(reference) / max(1, _peak_bytes(expanded))
    marks = "  ".join(
        f"{name} {ratio:7.1f}x{'' if ratio >= TARGETS[name] else ' (target ' + str(TARGETS[name]) + ')'}"
        for name, ratio in ratios.items()
    )
    return (
        f"{model.name:28} {pages:5} pages  reference {base * 1e3:8.2f} ms +-{spread:4.0%}  {marks}"
        f"  memory, reference / expanded {memory:4.1f}x  plans {_peak_bytes(plans) / 1024:6.0f} KiB"
    )


def _bare_package() -> bool:
    """Make `sglang` importable without running its package module, which wants a GPU stack."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.submodule_search_locations is None:
        return False
    package = types.ModuleType("sglang")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["sglang"] = package
    return True


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    if not _bare_package():
        print("the reference is not installed: pip install --no-deps sglang==0.5.23, and msgspec")
        raise SystemExit(1)
    for model in _models():
        for pages in arguments.pages:
            print(measure(model, pages, arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
