"""Stack view: a core group as SGLang's own linkers read one, without a copy.

SGLang's Mooncake and mori linkers read more of a group than it can be asked for: they tell entries by SGLang's class,
and take addresses, strides and offsets from its attributes. A view is that class, filled from the group's spans:

| attribute | of an entry's view |
|---|---|
| `name`, `indices_from_pool` | SGLang's `PoolName` where it has that name, and else the text |
| `components` | one list: the entry's spans in object order, each as a tensor uint8 [rows, row bytes] |
| `kv_buffer`, `get_hybrid_pool_buffer()` | the same tensors; their storages are whole allocations, for registration |
| `buffer_meta` | for each span its address, its stride, and its bytes of a page |
| `layer_mapping` | transfer layer to the span's position, or to several |
| `packed` | always: a page is one object, with the bytes that the core's entry gives it where it is packed |
| `device_pool` | the core's entry |
| `prepare_locations(indices)`, `get_page_buffer_meta(indices)` | checked by the core's entry |

A group's view has `entries`, `entry_map`, `sources`, `num_layers`, `page_size` and `rank_replicated`.
It has no `kv_buffer`: no pool is the anchor that hits are counted by.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry as EngineEntry,
)
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolGroup as EngineGroup,
)

from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import UnsupportedOperationError
from kvlinker.plans import LayerMetadata
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan, MemoryRegion

__all__ = ["StackEntry", "stack_view"]

_DRAFTS: Mapping[str, str] = MappingProxyType(
    {"indexer": "draft_indexer", "kv": "draft", "swa": "draft_swa"}
)
"""SGLang's names for pools of drafts beside the target."""
_TURNS = "dcp"
"""Axis of ranks that take the slots of a page in turn."""


class StackEntry(EngineEntry):  # type: ignore[misc, no-any-unimported]  # SGLang is untyped where it is not installed
    """One entry of the core's, as SGLang's `DevicePoolEntry`; it keeps the memory's owners alive."""

    def __init__(self, entry: DevicePoolEntry, name: str, shown: Sequence[int]) -> None:
        """Show spans as tensors over their memory.

        Args:
            entry: the core's.
            name: under which SGLang finds it.
            shown: numbers of its spans, in object order.

        Raises:
            UnsupportedOperationError: a page is no single range of rows, or the memory's allocation is unknown.
        """
        if entry.fragmented:
            msg = (
                f"pool {entry.name!r} has pages of scattered slots, which SGLang's own linkers cannot move; "
                f"use the linker KVLinker"
            )
            raise UnsupportedOperationError(msg)
        spans = entry.spans
        super().__init__(
            name=_pool_name(name),
            indices_from_pool=_pool_name(entry.indices_from_pool),
            device_pool=entry,
            components=[[_bytes_of(spans[number]) for number in shown]],
            layer_mapping=_mapping(entry, shown),
            page_size=entry.page_size,
            rows_are_pages=entry.rows_are_pages,
        )
        self._entry = entry

    def translate_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the pool's own slots for the engine's; where they are the same, the tensor stays on its device."""
        if self._entry.index_mapper is None:
            return indices
        return torch.from_numpy(self._entry.translate_indices(indices))

    def prepare_locations(self, indices: torch.Tensor) -> list[int]:
        """Return the first row of each page, checked; see `kvlinker.entries.DevicePoolEntry`."""
        rows: list[int] = self._entry.prepare_locations(indices).row.tolist()
        return rows

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return flat lists of addresses and sizes, page by page and span by span."""
        rows = self.prepare_locations(indices)
        spans: list[tuple[int, int, int]] = self.buffer_meta[0]
        addresses = [base + row * stride for row in rows for base, stride, _ in spans]
        return addresses, [size for _, _, size in spans] * len(rows)

    def get_prepared_layer_range_meta(
        self, locations: Sequence[int], layer: int
    ) -> LayerMetadata | None:
        """Return a layer's addresses, sizes and object offsets, one list a page; None where it has nothing here."""
        self._entry.check_live()
        metadata: LayerMetadata | None = super().get_prepared_layer_range_meta(locations, layer)
        return metadata


def stack_view(  # type: ignore[no-any-unimported]  # SGLang's
    group: DevicePoolGroup, *, beside: Collection[str] = ()
) -> EngineGroup:
    """Return the group as SGLang's `DevicePoolGroup`.

    Args:
        group: the core's.
        beside: labels of spans that are shown as entries of their own: SGLang looks for the pages of a draft beside
            the target under names for drafts.

    Raises:
        UnsupportedOperationError: SGLang's own linkers cannot move its pages; the text says which and why.
    """
    if several := {pool: count for pool, count in group.page_multiples.items() if count > 1}:
        msg = (
            f"pages of {several} are several of the prefix tree's, which SGLang's own linkers cannot key; "
            f"use the linker KVLinker"
        )
        raise UnsupportedOperationError(msg)
    if shared := [e.name for e in group.entries if any(a.name == _TURNS for a in e.rank_axes)]:
        msg = (
            f"pages of {shared} are dealt out to ranks that take slots in turn, whose number the keys of SGLang's own "
            f"linkers do not have; use the linker KVLinker, or run SGLang without --dcp-size"
        )
        raise UnsupportedOperationError(msg)
    return EngineGroup(
        [
            StackEntry(entry, name, shown)
            for entry in group.entries
            for name, shown in _parts(entry, beside)
        ],
        group.num_layers,
        group.page_size,
        rank_replicated=group.rank_replicated,
    )


def _parts(entry: DevicePoolEntry, beside: Collection[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield the names under which an entry is shown, with the numbers of the spans."""
    is_draft = [span.label in beside for span in entry.spans]
    drafts = [number for number, draft in enumerate(is_draft) if draft]
    target = [number for number, draft in enumerate(is_draft) if not draft]
    if not drafts or not target:
        yield entry.name, list(range(len(is_draft)))
        return
    yield entry.name, target
    yield _DRAFTS.get(entry.name, f"draft_{entry.name}"), drafts


def _pool_name(name: str) -> str:
    names: dict[str, str] = {member.value: member for member in PoolName}
    return names.get(name, name)


def _mapping(entry: DevicePoolEntry, shown: Sequence[int]) -> dict[int, int | tuple[int, ...]]:
    """Return transfer layer to places among the shown spans, as SGLang writes them: one alone is no tuple."""
    count = len(entry.components[0])
    starts = range(0, count * len(entry.components), count)
    place_of = {number: place for place, number in enumerate(shown)}
    mapping: dict[int, int | tuple[int, ...]] = {}
    for layer, positions in entry.layer_mapping.items():
        numbers = [start + position for start in starts for position in positions]
        places = tuple(place_of[number] for number in numbers if number in place_of)
        if places:
            mapping[layer] = places[0] if len(places) == 1 else places
    return mapping


class _Memory:
    """An allocation, as numpy and torch ask for one that they are to use in place."""

    def __init__(self, region: MemoryRegion) -> None:
        self.region = region
        interface = {
            "data": (region.base_ptr, False),
            "shape": (region.size_bytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }
        if region.device == "cpu":
            self.__array_interface__ = interface
        else:
            self.__cuda_array_interface__ = interface


def _bytes_of(span: BufferSpan) -> torch.Tensor:
    """Return the span's memory: uint8 [rows, row bytes], in the storage of its whole allocation."""
    region = span.region
    if region is None:
        msg = (
            f"span {span.label!r} does not say which allocation it lies in, and SGLang's own linkers register whole "
            f"ones; describe it with its region"
        )
        raise UnsupportedOperationError(msg)
    memory = _Memory(region)
    if region.device == "cpu":
        whole = torch.from_numpy(np.asarray(memory))
    else:
        whole = torch.as_tensor(memory, device=region.device)
    offset = span.base_ptr - region.base_ptr
    return whole.as_strided((span.rows, span.row_bytes), (span.row_stride, 1), offset)
