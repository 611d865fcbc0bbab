"""Pools of real models in host memory: caches of `examples/descriptions`, laid out by their plugins, with few pages."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray, KVCacheDescription
from kvlinker.description_json import description_from_json
from kvlinker.device import HostAccess, HostObjects
from kvlinker.plans import TransferPlan
from kvlinker.pools import KV
from kvlinker.registry import PluginRegistry
from kvlinker.selection import build_group, select_strategy
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker.transfers import HitPolicy, PoolTransfer

__all__ = ["MODELS", "Model", "ModelPools", "copier"]

_DESCRIPTIONS = Path(__file__).resolve().parent.parent / "examples" / "descriptions"
_EXAMPLE_PAGES = 1024
"""Pages in every buffer of the examples: `PAGES` of `make_descriptions.py` there."""
_WINDOW_PAGES = 4
"""Of pools that keep the window at a boundary alone: one to store, another one to restore into, and some between."""


def _packed_latents(description: KVCacheDescription) -> KVCacheDescription:
    """Return a DSA cache whose latents are kept as fp8, with scales and rope: 656 bytes of each token."""
    packed = tuple(
        replace(span, row_bytes=656, row_stride=656) for span in description.buffers["kv"]
    )
    return replace(
        description,
        buffers={**description.buffers, "kv": packed},
        facts={**description.facts, "kv_format": "fp8_packed_656"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's cache."""

    name: str
    description: str
    """Name of the example that describes it."""
    change: Callable[[KVCacheDescription], KVCacheDescription] = lambda description: description
    windows: frozenset[str] = frozenset()
    """Roles whose rows belong to windows and to states at a boundary."""

    def describe(self) -> KVCacheDescription:
        """Return the cache as the example has it, at made-up addresses."""
        text = (_DESCRIPTIONS / f"{self.description}.json").read_text(encoding="utf-8")
        return self.change(description_from_json(text))


MODELS = (
    Model(name="DeepSeek V3.2, fp8", description="deepseek-v3.2", change=_packed_latents),
    Model(
        name="DeepSeek V4-Pro, fp8",
        description="deepseek-v4-pro",
        windows=frozenset({"swa_kv", "c4_state", "c4_indexer_state"}),
    ),
    Model(name="GQA of 8B, bf16", description="llama-3.1-8b"),
)


class ModelPools:
    """A prefix of one model: where it is stored from, where it is restored to, and its keys."""

    def __init__(self, model: Model, registry: PluginRegistry, *, total_bytes: int) -> None:
        """Make pools in which a prefix of so many bytes, and at least of two pages, fits twice."""
        described = model.describe()
        self.name = model.name
        self.pages = max(2, total_bytes // _page_bytes(described, model.windows))
        self._buffers: list[NDArray[np.uint8]] = []
        self._rng = np.random.default_rng(0)
        live = replace(described, buffers=self._in_memory(described, model.windows))
        self.group = build_group(select_strategy(live, registry), live)
        self.tokens = self.pages * self.group.page_size
        self._keys = tuple(f"{number:064x}" for number in range(self.pages))
        pools = dict.fromkeys(self.group.sources.values())
        order = self._rng.permutation(2 * self.pages)
        self._places = {
            pool: _halves(order if pool == KV else np.arange(_WINDOW_PAGES), self._count(pool))
            for pool in pools
        }
        self.total_bytes = sum(plan.total_bytes for plan in self._plans(0))

    def _in_memory(
        self, described: KVCacheDescription, windows: frozenset[str]
    ) -> Mapping[str, tuple[BufferSpan, ...]]:
        """Return every span over random bytes, with rows for as many pages as are needed."""
        return {
            role: tuple(
                self._span(span, _WINDOW_PAGES if role in windows else 2 * self.pages)
                for span in spans
            )
            for role, spans in described.buffers.items()
        }

    def _span(self, span: BufferSpan, pages: int) -> BufferSpan:
        rows = span.rows * pages // _EXAMPLE_PAGES
        buffer = self._rng.integers(0, 255, max(1, rows * span.row_bytes), dtype=np.uint8)
        self._buffers.append(buffer)
        base = buffer.ctypes.data
        region = MemoryRegion(base_ptr=base, size_bytes=buffer.nbytes, owner=buffer)
        return BufferSpan(
            base_ptr=base,
            rows=rows,
            row_bytes=span.row_bytes,
            row_stride=span.row_bytes,
            region=region,
            label=span.label,
        )

    def _count(self, pool: str) -> int:
        return self.pages if pool == KV else 1

    def questions(self) -> tuple[PoolTransfer, ...]:
        """Return what is looked up: the keys of the prefix."""
        return tuple(self._transfer(pool, None) for pool in self._places)

    def transfers(self, half: int) -> tuple[PoolTransfer, ...]:
        """Return the prefix at one of its two places: 0 to store from, 1 to restore into."""
        return tuple(self._transfer(pool, places[half]) for pool, places in self._places.items())

    def _transfer(self, pool: str, pages: IndexArray | None) -> PoolTransfer:
        size = self.group.page_size
        slots = None if pages is None else (pages[:, None] * size + np.arange(size)).reshape(-1)
        is_whole = pool == KV
        return PoolTransfer(
            name=pool,
            keys=self._keys[-self._count(pool) :],
            device_indices=slots,
            hit_policy=HitPolicy.ALL_PAGES if is_whole else HitPolicy.TRAILING_PAGES,
        )

    def _plans(self, half: int) -> list[TransferPlan]:
        """Return a plan for each object of each page, at one of the two places."""
        slots = {transfer.name: transfer.device_indices for transfer in self.transfers(half)}
        return [
            part
            for entry in self.group.entries
            for part in entry.page_plan(
                entry.prepare_locations(slots[entry.indices_from_pool])
            ).by_part()
        ]

    def spoil(self) -> None:
        """Write other bytes into what is restored into."""
        for plan in self._plans(1):
            rows = np.zeros((plan.num_pages, plan.object_bytes), dtype=np.uint8)
            HostAccess().copy_in(plan, _slots(rows))

    def is_restored(self) -> bool:
        """Whether both places hold the same bytes."""
        pairs = zip(self._plans(0), self._plans(1), strict=True)
        return all(np.array_equal(_content(source), _content(target)) for source, target in pairs)


def copier(size: int) -> Callable[[], object]:
    """Return what copies so many bytes once, from one place to another, both of which are in use."""
    source, target = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
    return lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, size)


def _page_bytes(described: KVCacheDescription, windows: frozenset[str]) -> int:
    """Return the bytes of a page in all buffers but those of windows and states."""
    return sum(
        span.rows * span.row_bytes // _EXAMPLE_PAGES
        for role, spans in described.buffers.items()
        if role not in windows
        for span in spans
    )


def _halves(order: IndexArray, count: int) -> tuple[IndexArray, IndexArray]:
    return order[:count], order[count : 2 * count]


def _slots(rows: NDArray[np.uint8]) -> HostObjects:
    span = BufferSpan(
        base_ptr=rows.ctypes.data,
        rows=len(rows),
        row_bytes=rows.shape[1],
        row_stride=rows.shape[1],
        label="rows",
    )
    return HostObjects(span=span, slots=np.arange(len(rows), dtype=np.int64))


def _content(plan: TransferPlan) -> NDArray[np.uint8]:
    rows = np.empty((plan.num_pages, plan.object_bytes), dtype=np.uint8)
    HostAccess().copy_out(plan, _slots(rows))
    return rows
