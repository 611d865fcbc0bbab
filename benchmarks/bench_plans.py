"""Compare plans with those of SGLang 0.5.23's own pool classes, on the same geometry in the same run.

The reference makes nested lists of integers for every layer of a load. Ours is measured three ways:
as plans (columns, nothing expanded), expanded to int64 arrays, and lowered to the same nested lists,
which are compared with the reference's before anything is timed. The garbage collector runs as it does in
any Python program, unless a row says that it is off; it is the same for both.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from measuring import (
    Ratio,
    Row,
    Scale,
    Times,
    in_turn,
    missing_peer,
    run_script,
    size,
    timed,
)
from peers import SGLANG, PeerUnavailableError

from kvlinker.description import IndexArray
from kvlinker.entries import DevicePoolEntry
from kvlinker.plans import LayerMetadata, PreparedPages
from kvlinker.spans import BufferSpan

TOPIC = "Plans of all layers of a load"
PAGES = (64, 512, 4096)
MOST_ROUNDS_OF_LARGE_PLANS = 3
TARGETS = {"expanded": 20.0, "lowered": 4.0, "plans": 500.0}
WORDS = {
    "plans": "plans, nothing expanded",
    "expanded": "expanded to int64 columns",
    "lowered": "lowered to the same lists",
}
WHY_MISSED = {
    "plans": "A plan costs the same at any number of pages, and the reference what its pages cost: with few pages the "
    "fixed cost of a call for each pool and layer is all there is.",
    "expanded": "With few pages the fixed cost of some numpy calls for each pool and layer is all there is.",
    "lowered": "Most of it is the collector's time, which walks the lists that both keep of all layers; rows with the "
    "collector off show what making them takes.",
}


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
    c4 = range(2, 61, 2)
    c128 = [0, 1, *range(3, 61, 2)]
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

    pool_name = SGLANG.load("srt.mem_cache.hicache_storage").PoolName
    make_entry: Callable[..., ReferencePool] = SGLANG.load(
        "srt.mem_cache.hybrid_cache.linker_pool_assembler"
    ).DevicePoolEntry
    entries: list[ReferencePool] = []
    for pool in model.pools:
        rows = pages if pool.rows_are_pages else pages * model.page_size
        row_bytes = pool.page_bytes if pool.rows_are_pages else pool.page_bytes // model.page_size
        buffers = [torch.empty((rows, row_bytes), dtype=torch.uint8) for _ in pool.layers]
        entries.append(
            make_entry(
                name=pool_name(pool.name),
                indices_from_pool=pool_name.KV,
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
        spans = [
            BufferSpan.from_tensor(b, label=f"{pool.name}[{i}]") for i, b in enumerate(buffers)
        ]
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


class Pools:
    """The pools of one model, as the reference's entries and as ours over the same memory."""

    def __init__(self, model: Model, pages: int) -> None:
        """Make both, and validate the pages of one load.

        Raises:
            PeerUnavailableError: the reference cannot be had.
        """
        import torch

        self.model = model
        self._theirs = _reference_entries(model, pages)
        self._ours = _our_entries(model, self._theirs)
        self._slots = _indices(model, pages)
        tensor = torch.from_numpy(self._slots)
        self._locations = [entry.prepare_locations(tensor) for entry in self._theirs]
        self._prepared = self.prepare()

    def prepare(self) -> list[PreparedPages]:
        """Return the pages of the load, validated for every pool."""
        return [entry.prepare_locations(self._slots) for entry in self._ours]

    def reference(self) -> list[LayerMetadata | None]:
        """Return the reference's lists for every layer and pool."""
        return [
            entry.get_prepared_layer_range_meta(where, layer)
            for layer in range(self.model.num_layers)
            for entry, where in zip(self._theirs, self._locations, strict=True)
        ]

    def lowered(self) -> list[LayerMetadata | None]:
        """Return our lists for every layer and pool."""
        return [
            entry.get_prepared_layer_range_meta(where, layer)
            for layer in range(self.model.num_layers)
            for entry, where in zip(self._ours, self._prepared, strict=True)
        ]

    def plans(self) -> list[object]:
        """Return our plans for every layer and pool."""
        return [
            entry.layer_plan(where, layer)
            for layer in range(self.model.num_layers)
            for entry, where in zip(self._ours, self._prepared, strict=True)
        ]

    def expanded(self) -> list[object]:
        """Return our plans for every layer and pool, expanded."""
        found = (
            entry.layer_plan(where, layer)
            for layer in range(self.model.num_layers)
            for entry, where in zip(self._ours, self._prepared, strict=True)
        )
        return [plan.expand() for plan in found if plan is not None]

    def check(self) -> None:
        """Compare our lists with the reference's.

        Raises:
            RuntimeError: they differ.
        """
        if self.reference() != self.lowered():
            msg = f"{self.model.name}: lowered lists differ from the reference's"
            raise RuntimeError(msg)


@contextmanager
def _collector_off() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _peak_bytes(run: Callable[[], object]) -> int:
    tracemalloc.start()
    kept = run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return peak


def _time(pools: Pools, rounds: int) -> Times:
    runs = {
        "reference": pools.reference,
        "plans": pools.plans,
        "expanded": pools.expanded,
        "lowered": pools.lowered,
    }
    return in_turn({name: timed(run) for name, run in runs.items()}, rounds=rounds)


def _speed_rows(name: str, times: Times) -> Iterator[Row]:
    for ours, words in WORDS.items():
        yield Row(
            topic=TOPIC,
            what=f"{name}: {words}",
            against=SGLANG.name,
            ratio=times.ratio("reference", ours),
            figures=times.figures("reference", ours),
            target=TARGETS[ours],
            why_missed=WHY_MISSED[ours],
        )


def _memory_row(name: str, pools: Pools) -> Row:
    theirs, expanded = _peak_bytes(pools.reference), _peak_bytes(pools.expanded)
    prepared, plans = _peak_bytes(pools.prepare), _peak_bytes(pools.plans)
    ratio = theirs / expanded
    return Row(
        topic=TOPIC,
        what=f"{name}: memory of all layers, expanded",
        against=SGLANG.name,
        ratio=Ratio.of([ratio]),
        figures=f"{size(theirs)} / {size(expanded)}; unexpanded {size(prepared)} for the pages once and "
        f"{size(plans)} for all plans",
    )


def measure(scale: Scale) -> Iterator[Row]:
    """Yield the rows of every model and number of pages."""
    for model in _models():
        for pages in PAGES[: scale.choose(len(PAGES), 1)]:
            name = f"{model.name}, {pages} pages"
            try:
                pools = Pools(model, pages)
            except PeerUnavailableError as error:
                yield missing_peer(TOPIC, name, SGLANG.name, str(error))
                continue
            pools.check()
            is_large = pages == PAGES[-1]
            rounds = min(scale.rounds, MOST_ROUNDS_OF_LARGE_PLANS) if is_large else scale.rounds
            yield from _speed_rows(name, _time(pools, rounds))
            yield _memory_row(name, pools)
            if is_large:
                with _collector_off():
                    times = _time(pools, rounds)
                yield from _speed_rows(f"{name}, collector off", times)


if __name__ == "__main__":
    run_script(__doc__, measure)
