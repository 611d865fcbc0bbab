"""Small groups of pools of several families, whose pages a test can fill, load elsewhere and check byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError
from kvlinker.pools import KV, DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker.testing.patterns import PagePattern
from kvlinker.testing.pool_memory import HostMemory, PoolMemory
from kvlinker.transfers import HitPolicy, PageKey, PoolTransfer

__all__ = ["FakePools", "Family", "PageFault", "fake_group"]

PAGE_SIZE = 4
"""Slots in a page of every fake group."""
_LAYERS = 4


class Family(Enum):
    """A shape of group that real models have, as small as it can be."""

    MHA = "mha"
    """K and V of every layer, rows are slots, one object a page."""
    MHA_UNPACKED = "mha_unpacked"
    """The same, with one object for K and one for V."""
    DSA = "dsa"
    """A latent for every layer, and index keys with padded page rows on two of the layers."""
    V4 = "v4"
    """Windows for every layer; compressed keys, their states and long-range keys on some layers only."""
    MAMBA = "mamba"
    """Attention on two layers, and a state in one slot on the two others."""
    SCATTERED = "scattered"
    """A latent for every layer, in pages whose slots need not follow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFault:
    """A place whose bytes are not what they should be."""

    pool: str
    label: str
    page: int
    """Number of the page in its logical pool."""


class FakePools:
    """A group over test memory, with the means to fill and to check its pages."""

    def __init__(
        self,
        group: DevicePoolGroup,
        memory: PoolMemory,
        *,
        pages: int,
        windows: Mapping[str, int],
        pattern: PagePattern,
    ) -> None:
        """Keep the parts; `fake_group` makes them.

        Args:
            group: its entries' spans lie in the memory.
            memory: where the bytes are.
            pages: pages in each logical pool.
            windows: logical pool to its window in pages; pools without one need all pages.
            pattern: what pages hold.
        """
        self.group = group
        self.memory = memory
        self.pages = pages
        self.windows = MappingProxyType(dict(windows))
        self.pattern = pattern

    @property
    def logical_pools(self) -> tuple[str, ...]:
        """Names of the logical pools, in entry order."""
        return tuple(dict.fromkeys(self.group.sources.values()))

    def access(self) -> DeviceAccess:
        """Return a new access to the memory."""
        return self.memory.access()

    def slots(self, logical_pool: str, pages: Sequence[int]) -> IndexArray:
        """Return the slots of some pages of a logical pool, as an engine would name them."""
        size = self._page_size(logical_pool)
        numbers = np.asarray(pages, dtype=np.int64)
        return (numbers[:, None] * size + np.arange(size)).reshape(-1)

    def _page_size(self, logical_pool: str) -> int:
        return next(
            entry.page_size
            for entry in self.group.entries
            if entry.indices_from_pool == logical_pool
        )

    def lookup_transfers(self, keys: Sequence[PageKey]) -> tuple[PoolTransfer, ...]:
        """Return the transfers of a lookup: all keys for `kv`, a window's length of keys for the others."""
        return tuple(self._transfer(name, keys, None) for name in self.logical_pools)

    def page_transfers(
        self, keys: Sequence[PageKey], pages: Mapping[str, Sequence[int]]
    ) -> tuple[PoolTransfer, ...]:
        """Return the transfers of a load or an offload of a prefix.

        Args:
            keys: of the pages of `kv`, in prefix order.
            pages: logical pool to the numbers of the pages that its keys stand for: one a key for
                `kv`, the last ones within the window for the others.
        """
        return tuple(self._transfer(name, keys, pages[name]) for name in self.logical_pools)

    def _transfer(
        self, name: str, keys: Sequence[PageKey], pages: Sequence[int] | None
    ) -> PoolTransfer:
        window = self.windows.get(name)
        chosen = tuple(keys) if window is None else tuple(keys)[-window:]
        return PoolTransfer(
            name=name,
            keys=chosen,
            device_indices=None if pages is None else self.slots(name, pages),
            hit_policy=HitPolicy.ALL_PAGES if window is None else HitPolicy.TRAILING_PAGES,
        )

    def fill(
        self, transfers: Sequence[PoolTransfer], *, layers: Sequence[int] | None = None
    ) -> None:
        """Write what the pages of the transfers should hold, as a model would have.

        Args:
            transfers: as of an offload.
            layers: only the spans of these layers; all by default.
        """
        chosen = None if layers is None else self._labels(layers)
        for pool, span, rows, page, content in self._places(transfers):
            del pool, page
            if chosen is not None and span.label not in chosen:
                continue
            width = span.row_bytes
            for number, row in enumerate(rows):
                self.memory.write(span, row, content[number * width : (number + 1) * width])

    def wrong_pages(
        self, transfers: Sequence[PoolTransfer], *, layers: Sequence[int] | None = None
    ) -> tuple[PageFault, ...]:
        """Return the places of the transfers whose bytes are not what they should be.

        Args:
            transfers: as of a load.
            layers: only the spans of these layers; all by default.
        """
        chosen = None if layers is None else self._labels(layers)
        return tuple(
            PageFault(pool=pool, label=span.label, page=page)
            for pool, span, rows, page, content in self._places(transfers)
            if (chosen is None or span.label in chosen)
            and b"".join(self.memory.read(span, row) for row in rows) != content
        )

    def _labels(self, layers: Sequence[int]) -> frozenset[str]:
        return frozenset(
            component[position].label
            for entry in self.group.entries
            for layer in layers
            for position in entry.layer_mapping.get(layer, ())
            for component in entry.components
        )

    def _places(
        self, transfers: Sequence[PoolTransfer]
    ) -> Iterator[tuple[str, BufferSpan, list[int], int, bytes]]:
        """Yield pool, span, pool rows, page number and right content of every page in every span."""
        for transfer in transfers:
            for entry in self.group.entries:
                if entry.indices_from_pool == transfer.name:
                    yield from self._entry_places(entry, transfer)

    def _entry_places(
        self, entry: DevicePoolEntry, transfer: PoolTransfer
    ) -> Iterator[tuple[str, BufferSpan, list[int], int, bytes]]:
        slots = entry.translate_indices(transfer.device_indices).reshape(-1, entry.page_size)
        for key, page_slots in zip(transfer.keys, slots.tolist(), strict=True):
            page = page_slots[0] // entry.page_size
            rows = [page] if entry.rows_are_pages else page_slots
            for span in entry.spans:
                content = self.pattern.content(
                    pool=entry.name,
                    label=span.label,
                    page_key=key,
                    size=span.row_bytes * len(rows),
                )
                yield entry.name, span, rows, page, content


class _Builder:
    """Allocates the spans of a family's entries."""

    def __init__(self, memory: PoolMemory, pages: int) -> None:
        self._memory = memory
        self._pages = pages

    def slot_rows(self, role: str, row_bytes: Sequence[int]) -> list[BufferSpan]:
        """One span per given size, whose rows are slots."""
        return [
            self._memory.allocate(self._pages * PAGE_SIZE, size, label=f"{role}[{i}]")
            for i, size in enumerate(row_bytes)
        ]

    def page_rows(self, role: str, row_bytes: Sequence[int], *, pad: int = 0) -> list[BufferSpan]:
        """One span per given size, whose rows are pages, `pad` bytes apart."""
        return [
            self._memory.allocate(self._pages, size, row_stride=size + pad, label=f"{role}[{i}]")
            for i, size in enumerate(row_bytes)
        ]


def _mha(build: _Builder, *, packed: bool) -> list[DevicePoolEntry]:
    return [
        DevicePoolEntry(
            name=KV,
            indices_from_pool=KV,
            components=[build.slot_rows("k", [16] * _LAYERS), build.slot_rows("v", [24] * _LAYERS)],
            layer_mapping={layer: layer for layer in range(_LAYERS)},
            page_size=PAGE_SIZE,
            rows_are_pages=False,
            packed=packed,
        )
    ]


def _latent(build: _Builder, *, fragmented: bool = False) -> DevicePoolEntry:
    return DevicePoolEntry(
        name=KV,
        indices_from_pool=KV,
        components=[build.slot_rows("latent", [18] * _LAYERS)],
        layer_mapping={layer: layer for layer in range(_LAYERS)},
        page_size=PAGE_SIZE,
        rows_are_pages=False,
        replicated=True,
        fragmented=fragmented,
    )


def _dsa(build: _Builder) -> list[DevicePoolEntry]:
    indexer = _paged(
        "indexer", KV, build.page_rows("index_k", [33, 33], pad=7), {0: 0, 2: 1}, replicated=True
    )
    return [_latent(build), indexer]


def _v4(build: _Builder) -> list[DevicePoolEntry]:
    every = {layer: layer for layer in range(_LAYERS)}
    return [
        _paged("swa", "swa", build.page_rows("swa_kv", [40] * _LAYERS, pad=8), every),
        _paged("deepseek_v4_c4", KV, build.page_rows("c4_kv", [24, 24]), {1: 0, 2: 1}),
        _paged("deepseek_v4_c128", KV, build.page_rows("c128_kv", [9]), {3: 0}),
        _paged("deepseek_v4_c4_state", "swa", build.page_rows("c4_state", [32, 32]), {1: 0, 2: 1}),
    ]


def _paged(
    name: str,
    logical_pool: str,
    spans: Sequence[BufferSpan],
    mapping: Mapping[int, int],
    *,
    replicated: bool = False,
) -> DevicePoolEntry:
    return DevicePoolEntry(
        name=name,
        indices_from_pool=logical_pool,
        components=[spans],
        layer_mapping=mapping,
        page_size=PAGE_SIZE,
        rows_are_pages=True,
        replicated=replicated,
    )


def _mamba(build: _Builder) -> list[DevicePoolEntry]:
    attention = DevicePoolEntry(
        name=KV,
        indices_from_pool=KV,
        components=[build.slot_rows("k", [16, 16]), build.slot_rows("v", [16, 16])],
        layer_mapping={0: 0, 2: 1},
        page_size=PAGE_SIZE,
        rows_are_pages=False,
    )
    states = DevicePoolEntry(
        name="mamba",
        indices_from_pool="mamba",
        components=[build.page_rows("conv", [20, 20]), build.page_rows("ssm", [48, 48])],
        layer_mapping={1: 0, 3: 1},
        page_size=1,
        rows_are_pages=False,
    )
    return [attention, states]


_ENTRIES: Mapping[Family, Callable[[_Builder], list[DevicePoolEntry]]] = MappingProxyType(
    {
        Family.MHA: lambda build: _mha(build, packed=True),
        Family.MHA_UNPACKED: lambda build: _mha(build, packed=False),
        Family.DSA: _dsa,
        Family.V4: _v4,
        Family.MAMBA: _mamba,
        Family.SCATTERED: lambda build: [_latent(build, fragmented=True)],
    }
)
_WINDOWS: Mapping[Family, Mapping[str, int]] = MappingProxyType(
    {Family.V4: {"swa": 2}, Family.MAMBA: {"mamba": 1}}
)


def fake_group(
    family: Family = Family.MHA,
    *,
    memory: PoolMemory | None = None,
    pages: int = 16,
    pattern: PagePattern | None = None,
) -> FakePools:
    """Return a group of a family's shape: 4 layers, pages of 4 slots, rows of a few bytes.

    Args:
        family: the shape.
        memory: HostMemory by default.
        pages: pages in each logical pool; a Mamba pool has as many states.
        pattern: what pages hold.
    """
    if pages < 1:
        msg = f"a fake group needs at least one page, got {pages}"
        raise ContractError(msg)
    memory = memory or HostMemory()
    entries = _ENTRIES[family](_Builder(memory, pages))
    group = DevicePoolGroup(entries, _LAYERS, PAGE_SIZE, layout=f"fake-{family.value}/1")
    return FakePools(
        group,
        memory,
        pages=pages,
        windows=_WINDOWS.get(family, {}),
        pattern=pattern or PagePattern(),
    )
