"""Checks that every model plugin should pass: it claims the whole cache, it is pure, and every byte comes back.

Each check raises AssertionError with what was wrong. None of them trusts the plugin for where a page is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvlinker.coverage import claim_problem, group_problem
from kvlinker.description import KVCacheDescription
from kvlinker.device import HostAccess, HostObjects
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError
from kvlinker.hookspecs import StrategyMatch
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan

__all__ = ["MadeUpMemory", "ModelHooks", "PageRows", "check_round_trip", "check_strategy"]

_POISON = 0xFF


class ModelHooks(Protocol):
    """A module with the two hooks of a model plugin."""

    def match_kv_cache(self, description: KVCacheDescription) -> StrategyMatch | None:
        """See `kvlinker.hookspecs`."""
        ...

    def build_direct_linker_pool_group(self, description: KVCacheDescription) -> DevicePoolGroup:
        """See `kvlinker.hookspecs`."""
        ...


class MadeUpMemory:
    """Addresses that overlap nowhere and cannot be dereferenced: a layout can be checked without memory."""

    _FIRST, _ALIGNMENT = 1 << 40, 1 << 12

    def __init__(self) -> None:
        self._next = self._FIRST

    def span(self, rows: int, row_bytes: int) -> BufferSpan:
        """Return a span of dense rows; without rows, one as of a layer that keeps no buffer."""
        start = self._next if rows else 0
        self._next += -(-rows * row_bytes // self._ALIGNMENT) * self._ALIGNMENT
        return BufferSpan(base_ptr=start, rows=rows, row_bytes=row_bytes, row_stride=row_bytes)


@dataclass(frozen=True, slots=True)
class PageRows:
    """Where a role's pages are, said by the test and not by the plugin."""

    logical_pool: str
    rows: int
    """Rows of the described buffer in a page: page p begins at row p * rows."""


def check_strategy(plugin: ModelHooks, description: KVCacheDescription) -> DevicePoolGroup:
    """Return the plugin's group after checking its claim, its purity and that no buffer is lost.

    Raises:
        AssertionError: the claim is not to the whole cache, asking twice gives two answers, or the group
            is not exactly what was described and claimed.
    """
    match = plugin.match_kv_cache(description)
    if match is None:
        msg = f"the plugin: declines the family {description.family!r}"
        raise AssertionError(msg)
    _refuse(claim_problem(match, description))
    if plugin.match_kv_cache(description) != match:
        _refuse("matches differently when asked again")
    group = plugin.build_direct_linker_pool_group(description)
    again = plugin.build_direct_linker_pool_group(description)
    if group.fingerprint != again.fingerprint:
        _refuse("gives another layout when asked again")
    _refuse(group_problem(group, match, description))
    return group


def check_round_trip(
    group: DevicePoolGroup,
    description: KVCacheDescription,
    page_rows: Mapping[str, PageRows],
    moves: Mapping[str, Mapping[int, int]],
    *,
    omitted: Collection[str] = (),
    layers: Sequence[int] | None = None,
) -> None:
    """Move pages out of the described memory and, layer by layer, to other places in it; compare every byte.

    The memory is filled with random bytes, which are lost. Between the two it is overwritten with 0xFF.

    Args:
        group: the plugin's group over memory of this process.
        description: what the group was built from.
        page_rows: for each role that is stored, where its pages are.
        moves: for each logical pool, the source page to the target page.
        omitted: labels of spans that must stay as they are.
        layers: the order in which layers are restored; ascending by default.

    Raises:
        AssertionError: a byte of a page did not arrive, or a byte elsewhere changed.
        ContractError: a span's memory may be made up, or gone.
    """
    memory = {
        span.label: _memory_of(span)
        for spans in description.buffers.values()
        for span in spans
        if span.rows
    }
    generator = np.random.default_rng(0)
    for array in memory.values():
        array[:] = generator.integers(0, _POISON, size=array.shape, dtype=np.uint8)
    expected = _expected(description, memory, page_rows, moves)
    objects = {entry.name: _take(entry, moves) for entry in group.entries}
    for label in omitted:
        expected[label][:] = _POISON
    for array in memory.values():
        array[:] = _POISON
    for layer in range(group.num_layers) if layers is None else layers:
        for entry in group.entries:
            _give(entry, layer, moves, objects[entry.name])
    for label, array in memory.items():
        wrong = np.flatnonzero((array != expected[label]).any(axis=1))
        if wrong.size:
            _refuse(f"span {label!r}: rows {wrong.tolist()} are not as expected")


def _memory_of(span: BufferSpan) -> NDArray[np.uint8]:
    """Return a view of a span's rows without their padding: [rows, row_bytes]."""
    if span.region is None or span.region.owner is None:
        msg = f"span {span.label!r} has no owner that keeps its memory alive; describe real buffers"
        raise ContractError(msg)
    size = span.end_ptr - span.base_ptr
    buffer = memoryview((ctypes.c_uint8 * size).from_address(span.base_ptr)).cast("B")
    strides = (span.row_stride, 1)
    return np.ndarray((span.rows, span.row_bytes), dtype=np.uint8, buffer=buffer, strides=strides)


def _expected(
    description: KVCacheDescription,
    memory: Mapping[str, NDArray[np.uint8]],
    page_rows: Mapping[str, PageRows],
    moves: Mapping[str, Mapping[int, int]],
) -> dict[str, NDArray[np.uint8]]:
    """Return what the memory should hold in the end: poison, and each moved page in its new place."""
    expected = {label: np.full_like(array, _POISON) for label, array in memory.items()}
    for role, place in page_rows.items():
        for span in description.buffers[role]:
            for source, target in moves[place.logical_pool].items() if span.rows else ():
                page = memory[span.label][source * place.rows : (source + 1) * place.rows]
                expected[span.label][target * place.rows : (target + 1) * place.rows] = page
    return expected


def _slots(entry: DevicePoolEntry, pages: list[int]) -> NDArray[np.int64]:
    within = np.arange(entry.page_size)
    return (np.array(pages, dtype=np.int64)[:, None] * entry.page_size + within).reshape(-1)


def _take(
    entry: DevicePoolEntry, moves: Mapping[str, Mapping[int, int]]
) -> tuple[NDArray[np.uint8], ...]:
    """Return the entry's pages as its objects, one array [pages, object bytes] for each part."""
    sources = list(moves[entry.indices_from_pool])
    plan = entry.page_plan(entry.prepare_locations(_slots(entry, sources)))
    parts = []
    for part in plan.by_part():
        objects = np.zeros((len(sources), part.object_bytes), dtype=np.uint8)
        HostAccess().copy_out(part, _host(objects))
        parts.append(objects)
    return tuple(parts)


def _give(
    entry: DevicePoolEntry,
    layer: int,
    moves: Mapping[str, Mapping[int, int]],
    parts: tuple[NDArray[np.uint8], ...],
) -> None:
    targets = list(moves[entry.indices_from_pool].values())
    plan = entry.layer_plan(entry.prepare_locations(_slots(entry, targets)), layer)
    if plan is not None:
        for part, objects in zip(plan.by_part(), parts, strict=True):
            HostAccess().copy_in(part, _host(objects))


def _host(objects: NDArray[np.uint8]) -> HostObjects:
    count, size = objects.shape
    span = BufferSpan(base_ptr=objects.ctypes.data, rows=count, row_bytes=size, row_stride=size)
    return HostObjects(span=span, slots=np.arange(count, dtype=np.int64))


def _refuse(problem: str) -> None:
    """Raise what is wrong; an empty text is nothing."""
    if problem:
        msg = f"the plugin: {problem}"
        raise AssertionError(msg)
