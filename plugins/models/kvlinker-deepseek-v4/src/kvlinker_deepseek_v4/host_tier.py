"""Plans a host mirror of a DeepSeek V4 cache: how many pages, rows and bytes each pool gets.

It follows the same pools, and so the same layer mappings, as the device group: sizes are those of the layout, not
of a formula beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from kvlinker.errors import ContractError
from kvlinker.pools import KV
from kvlinker_deepseek_v4.mappings import LayerPositions
from kvlinker_deepseek_v4.pools import SWA, V4Pool

__all__ = [
    "ByteCapacity",
    "HostCapacity",
    "HostPool",
    "HostTierPlan",
    "MemoryProbe",
    "PageCapacity",
    "available_host_bytes",
    "plan_host_tier",
]

MemoryProbe: TypeAlias = Callable[[], int]
"""Returns how many bytes may still be allocated in the memory that the tier will live in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCapacity:
    """A host tier's size in pages."""

    kv_pages: int
    """Pages of the prefix."""
    swa_pages: int
    """Stored boundaries: a page of windows and states each."""

    def __post_init__(self) -> None:
        if self.kv_pages < 1 or self.swa_pages < 1:
            msg = f"a host tier needs at least one page of each, got kv {self.kv_pages}, swa {self.swa_pages}"
            raise ContractError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteCapacity:
    """A host tier's size in bytes."""

    total_bytes: int
    """Never exceeded."""
    kv_pages_per_swa_page: int = 8
    """Pages of the prefix for each stored boundary; with 8, either set takes about half of the bytes."""

    def __post_init__(self) -> None:
        if self.total_bytes < 1 or self.kv_pages_per_swa_page < 1:
            msg = (
                f"a host tier needs bytes and pages of at least 1, got total_bytes {self.total_bytes}, "
                f"kv_pages_per_swa_page {self.kv_pages_per_swa_page}"
            )
            raise ContractError(msg)


HostCapacity: TypeAlias = PageCapacity | ByteCapacity


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPool:
    """The host mirror of one pool."""

    name: str
    indices_from_pool: str
    pages: int
    page_bytes: int
    """Bytes of a page over all layers; 0 for an anchor, which has indices and keys and no storage."""
    rows_per_page: int
    """Rows of one layer's buffer in a page; 0 for an anchor."""
    layer_mapping: LayerPositions

    @property
    def rows(self) -> int:
        """Rows of one layer's buffer."""
        return self.pages * self.rows_per_page

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers' buffers."""
        return self.pages * self.page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierPlan:
    """A host mirror: the anchor `kv` first, then every pool of the device in its order."""

    page_size: int
    """Slots in a page."""
    pools: tuple[HostPool, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes to allocate."""
        return sum(pool.total_bytes for pool in self.pools)

    @property
    def tokens(self) -> int:
        """Tokens of prefix that fit."""
        return self.pools[0].pages * self.page_size

    def pool(self, name: str) -> HostPool:
        """Return a pool by name.

        Raises:
            ContractError: there is no such pool.
        """
        for pool in self.pools:
            if pool.name == name:
                return pool
        msg = f"host tier has no pool {name!r}; it has {[pool.name for pool in self.pools]}"
        raise ContractError(msg)


def plan_host_tier(
    pools: Sequence[V4Pool],
    *,
    page_size: int,
    capacity: HostCapacity,
    available_bytes: MemoryProbe,
) -> HostTierPlan:
    """Return the host mirror of a stage's pools.

    Args:
        pools: from `v4_pools`, as the device group was built.
        page_size: slots in a page.
        capacity: in pages, or in bytes that are not exceeded.
        available_bytes: asked once, of the memory that the tier will live in; huge pages are another one.

    Raises:
        ContractError: there are no pools, the capacity holds no page, or the memory does not hold the capacity.
    """
    if not pools:
        msg = "a host tier mirrors at least one pool, got none; pass what v4_pools returned"
        raise ContractError(msg)
    pages = _page_counts(pools, capacity)
    mirrors = (_mirror(pool, pages[pool.indices_from_pool]) for pool in pools)
    plan = HostTierPlan(page_size=page_size, pools=(_anchor(pages[KV]), *mirrors))
    available = available_bytes()
    if plan.total_bytes > available:
        msg = (
            f"the host tier needs {plan.total_bytes} B and {available} B are available; "
            f"lower the capacity, or probe the memory that it is allocated in"
        )
        raise ContractError(msg)
    return plan


def _page_counts(pools: Sequence[V4Pool], capacity: HostCapacity) -> dict[str, int]:
    """Return the pages of each logical pool."""
    if isinstance(capacity, PageCapacity):
        return {KV: capacity.kv_pages, SWA: capacity.swa_pages}
    page_bytes = dict.fromkeys((KV, SWA), 0)
    for pool in pools:
        page_bytes[pool.indices_from_pool] += pool.page_bytes
    unit = capacity.kv_pages_per_swa_page * page_bytes[KV] + page_bytes[SWA]
    count = capacity.total_bytes // unit
    if not count:
        msg = (
            f"{capacity.total_bytes} B hold no boundary: {capacity.kv_pages_per_swa_page} kv pages of "
            f"{page_bytes[KV]} B and one swa page of {page_bytes[SWA]} B are {unit} B"
        )
        raise ContractError(msg)
    return {KV: count * capacity.kv_pages_per_swa_page, SWA: count}


def _anchor(pages: int) -> HostPool:
    """Return the index space of the prefix itself: it gives pages their numbers, and stores nothing."""
    return HostPool(
        name=KV,
        indices_from_pool=KV,
        pages=pages,
        page_bytes=0,
        rows_per_page=0,
        layer_mapping=MappingProxyType({}),
    )


def _mirror(pool: V4Pool, pages: int) -> HostPool:
    return HostPool(
        name=pool.name,
        indices_from_pool=pool.indices_from_pool,
        pages=pages,
        page_bytes=pool.page_bytes,
        rows_per_page=pool.rows_per_page,
        layer_mapping=pool.layer_mapping,
    )


def available_host_bytes() -> int:
    """Return the bytes of ordinary host memory that nothing uses now: a probe for `plan_host_tier`."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
