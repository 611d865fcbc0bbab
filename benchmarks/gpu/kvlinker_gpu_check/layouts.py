"""Layouts: pools of the reference engine, family by family, laid out anew in a device's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

import kvlinker_deepseek_v4
import kvlinker_dsa
import kvlinker_mha
import kvlinker_mla
from kvlinker.description import IndexArray, KVCacheDescription
from kvlinker.description_json import description_from_json
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker.transfers import HitPolicy, PageKey, PoolTransfer
from kvlinker_gpu_check.lab import PoolBytes

__all__ = ["FOLDER", "PAGES", "Layout", "PlacedPools", "layouts"]

FOLDER = Path(__file__).parent / "layouts"
PAGES = 9
"""Pages of each index space in the kept layouts."""


class _ModelPlugin(Protocol):
    def build_direct_linker_pool_group(self, description: KVCacheDescription) -> DevicePoolGroup:
        """See `kvlinker.hookspecs`."""
        ...


_PLUGINS: Mapping[str, _ModelPlugin] = MappingProxyType(
    {
        "mha": kvlinker_mha,
        "mla": kvlinker_mla,
        "dsa": kvlinker_dsa,
        "deepseek_v4": kvlinker_deepseek_v4,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A described KV cache that can be laid out in any memory, with any number of pages."""

    name: str
    description: KVCacheDescription
    pages: int = PAGES
    """Pages of each index space that the description's buffers have."""

    @classmethod
    def load(cls, path: Path, *, pages: int = PAGES) -> Layout:
        """Return the layout of a description in JSON form, whose buffers have so many pages."""
        return cls(name=path.stem, description=description_from_json(path.read_text()), pages=pages)

    def place(self, memory: PoolBytes, *, pages: int | None = None) -> PlacedPools:
        """Return pools of this layout in a memory.

        Args:
            memory: where they go.
            pages: of each index space; as many as described by default. Spare rows stay.
        """
        count = pages or self.pages
        buffers = {
            role: tuple(self._span(memory, span, count) for span in spans)
            for role, spans in self.description.buffers.items()
        }
        description = replace(self.description, buffers=buffers)
        group = _PLUGINS[description.family].build_direct_linker_pool_group(description)
        return PlacedPools(description=description, group=group, pages=count)

    def _span(self, memory: PoolBytes, span: BufferSpan, pages: int) -> BufferSpan:
        if not span.rows:
            return span
        rows = span.rows // self.pages * pages + span.rows % self.pages
        return memory.allocate(rows, span.row_bytes, row_stride=span.row_stride, label=span.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPools:
    """Pools of a layout in a memory."""

    description: KVCacheDescription
    group: DevicePoolGroup
    pages: int

    @property
    def spans(self) -> tuple[BufferSpan, ...]:
        """Every buffer with rows, as it was described."""
        return tuple(s for spans in self.description.buffers.values() for s in spans if s.rows)

    def slots(self, logical_pool: str, pages: Sequence[int]) -> IndexArray:
        """Return the slots of some pages of an index space."""
        size = next(p.page_size for p in self.description.logical_pools if p.name == logical_pool)
        return (np.array(pages, dtype=np.int64)[:, None] * size + np.arange(size)).reshape(-1)

    def transfers(
        self, keys: Sequence[PageKey], pages: Sequence[int] | None
    ) -> tuple[PoolTransfer, ...]:
        """Return the transfers of a prefix: every index space keeps all of its pages.

        Args:
            keys: one a page.
            pages: the same numbers in every index space; None for a lookup.
        """
        return tuple(
            PoolTransfer(
                name=pool.name,
                keys=tuple(keys),
                device_indices=None if pages is None else self.slots(pool.name, pages),
                hit_policy=HitPolicy.ALL_PAGES,
            )
            for pool in self.description.logical_pools
        )


def layouts() -> tuple[Layout, ...]:
    """Return all kept layouts, by name."""
    return tuple(Layout.load(path) for path in sorted(FOLDER.glob("*.json")))
