"""A description is what an engine adapter reports about a KV cache: facts and buffers, no decisions.

A model plugin lays a cache out from its description alone, so that N engines and M families need N + M plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import ContractError
from kvlinker.spans import BufferSpan

__all__ = [
    "DescribeRequest",
    "Fact",
    "IndexArray",
    "IndexMap",
    "IndexerKind",
    "KVCacheDescription",
    "LayerFacts",
    "LogicalPool",
    "PoolKind",
    "RankAxis",
    "Replication",
]

IndexArray: TypeAlias = NDArray[np.int64]
IndexMap: TypeAlias = Callable[[IndexArray], IndexArray]
"""An engine's translation of slots, such as full to swa: int64 [slots] in, int64 [slots] out."""
Fact: TypeAlias = int | str | tuple[int, ...]


class PoolKind(Enum):
    """How an engine allocates from an index space."""

    PAGED = "paged"
    SLOT = "slot"
    """One slot holds one whole state, such as Mamba's."""


class IndexerKind(Enum):
    """Whether a layer owns the index keys that sparse attention selects by."""

    NONE = "none"
    OWN = "own"
    SHARED = "shared"
    """The layer uses another layer's index; a buffer of its own is absent or dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalPool:
    """An index space that the engine allocates from."""

    name: str
    """`kv`, `swa` or `mamba` for the well-known ones."""
    kind: PoolKind = PoolKind.PAGED
    page_size: int
    """Slots in a page; 1 for a slot pool."""
    window: int | None = None
    """Slots that attention looks back, for a pool of trailing windows."""

    def __post_init__(self) -> None:
        if not self.name or self.page_size < 1 or (self.window is not None and self.window < 1):
            msg = f"logical pool {self.name!r}: page_size {self.page_size} and window {self.window} must be at least 1"
            raise ContractError(msg)
        if self.kind is PoolKind.SLOT and self.page_size != 1:
            msg = f"logical pool {self.name!r}: a slot pool has page_size 1, got {self.page_size}"
            raise ContractError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What one transfer layer is."""

    layer: int
    """Transfer layer id, local to the pipeline stage."""
    global_layer: int
    """Layer number in the whole model."""
    kind: str = "attention"
    compress_ratio: int = 0
    """Tokens folded into one entry (DeepSeek V4: 4 or 128); 0 without compression."""
    indexer: IndexerKind = IndexerKind.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAxis:
    """This process's place on one axis of parallelism."""

    name: str
    """`tp`, `cp` or `dcp`; the pipeline stage is not an axis but a layer range."""
    rank: int
    size: int

    def __post_init__(self) -> None:
        if not self.name or not 0 <= self.rank < self.size:
            msg = f"rank axis {self.name!r}: rank {self.rank} is not within size {self.size}"
            raise ContractError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """On which ranks a role's bytes differ; a role that is not listed is sharded over every axis."""

    axes: tuple[RankAxis, ...] = ()
    sharded_over: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Role to the names of the axes whose ranks hold different bytes; an empty set is a full replica."""

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            msg = f"rank axes {names} repeat a name"
            raise ContractError(msg)
        for role, over in self.sharded_over.items():
            if unknown := over - set(names):
                msg = f"role {role!r} is sharded over {sorted(unknown)}, but the axes are {names}"
                raise ContractError(msg)
        object.__setattr__(self, "sharded_over", MappingProxyType(dict(self.sharded_over)))

    def axes_of(self, role: str) -> tuple[RankAxis, ...]:
        """Return the axes over which the role is sharded, by name."""
        over = self.sharded_over.get(role)
        chosen = self.axes if over is None else tuple(a for a in self.axes if a.name in over)
        return tuple(sorted(chosen, key=lambda axis: axis.name))

    def is_replicated(self, role: str) -> bool:
        """Return whether every rank holds the same bytes for the role."""
        return role in self.sharded_over and not self.sharded_over[role]

    def is_writer(self, role: str) -> bool:
        """Return whether this rank is the one that writes the role's shard."""
        sharded = {axis.name for axis in self.axes_of(role)}
        return all(axis.rank == 0 for axis in self.axes if axis.name not in sharded)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeRequest:
    """What an engine asks an adapter to describe a cache for."""

    page_size: int
    """Page size of the engine's prefix tree, in slots."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """What only the caller knows, such as the pipeline stage's first global layer."""
    extras: Mapping[str, object] = field(default_factory=dict)
    """Engine objects beside the cache, such as draft pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheDescription:
    """Everything persistent in one rank's KV cache, as facts."""

    family: str
    """`mha`, `mla`, `dsa`, `deepseek_v4`, ... or the name of a third party's layout."""
    page_size: int
    """Page size of the prefix tree, in slots."""
    buffers: Mapping[str, tuple[BufferSpan, ...]]
    """Role to its spans, usually one per layer."""
    layers: tuple[LayerFacts, ...]
    logical_pools: tuple[LogicalPool, ...]
    index_maps: Mapping[str, IndexMap] = field(default_factory=dict)
    """Logical pool to the translation of the engine's slots, applied once."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Value formats and layout facts that bytes alone do not tell."""
    replication: Replication = field(default_factory=Replication)

    def __post_init__(self) -> None:
        if not self.family or self.page_size < 1 or not self.layers:
            msg = (
                f"description {self.family!r}: needs a family, a page size of at least 1 (got "
                f"{self.page_size}) and at least one layer (got {len(self.layers)})"
            )
            raise ContractError(msg)
        buffers = {role: _labelled(role, spans) for role, spans in self.buffers.items()}
        object.__setattr__(self, "buffers", MappingProxyType(buffers))
        object.__setattr__(self, "index_maps", MappingProxyType(dict(self.index_maps)))
        object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))
        self._check_names()

    def _check_names(self) -> None:
        layers = [facts.layer for facts in self.layers]
        if layers != list(range(len(layers))):
            msg = f"description {self.family!r}: layers must be 0..n-1 in order, got {layers}"
            raise ContractError(msg)
        pools = [pool.name for pool in self.logical_pools]
        labels = [span.label for spans in self.buffers.values() for span in spans if span.rows]
        for what, names in (("logical pool", pools), ("span label", labels)):
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                msg = f"description {self.family!r}: {what} {repeated[0]!r} is used twice"
                raise ContractError(msg)

    @property
    def layer_range(self) -> tuple[int, int]:
        """Global layers [start, end) of this pipeline stage."""
        numbers = [facts.global_layer for facts in self.layers]
        return min(numbers), max(numbers) + 1

    def logical_pool(self, name: str) -> LogicalPool | None:
        """Return the logical pool of that name, or None."""
        return next((pool for pool in self.logical_pools if pool.name == name), None)

    def describe(self) -> str:
        """Return a text form for people."""
        lines = [f"{self.family}: {len(self.layers)} layers, page of {self.page_size} slots"]
        for role, spans in self.buffers.items():
            shapes = sorted({(s.rows, s.row_bytes, s.row_stride) for s in spans})
            text = ", ".join(
                f"{rows} x {size} B (stride {stride})" for rows, size, stride in shapes
            )
            lines.append(f"  {role}: {len(spans)} spans; {text}")
        pools = ", ".join(
            f"{p.name} ({p.kind.value}, page {p.page_size})" for p in self.logical_pools
        )
        lines.append(f"  logical pools: {pools}")
        lines.extend(f"  {key} = {value}" for key, value in sorted(self.facts.items()))
        return "\n".join(lines)


def _labelled(role: str, spans: tuple[BufferSpan, ...]) -> tuple[BufferSpan, ...]:
    return tuple(
        span if span.label else span.relabel(f"{role}[{i}]") for i, span in enumerate(spans)
    )
