"""A description is what an engine adapter reports about a KV cache: facts and buffers, no decisions.

A model plugin lays a cache out from its description alone, so that N engines and M families need N + M plugins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import ContractError
from kvlinker.integers import as_integer
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
        where = f"logical pool {self.name!r}"
        if not self.name:
            msg = f"{where}: needs a name, such as kv, swa or mamba"
            raise ContractError(msg)
        size = as_integer(self.page_size, f"{where}: page_size", at_least=1)
        object.__setattr__(self, "page_size", size)
        if self.window is not None:
            window = as_integer(self.window, f"{where}: window", at_least=1)
            object.__setattr__(self, "window", window)
        if self.kind is PoolKind.SLOT and self.page_size != 1:
            msg = f"{where}: a slot pool has page_size 1, got {self.page_size}"
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

    def __post_init__(self) -> None:
        numbers = (
            ("layer", self.layer),
            ("global_layer", self.global_layer),
            ("compress_ratio", self.compress_ratio),
        )
        for name, value in numbers:
            number = as_integer(value, f"layer {self.layer}: {name}", at_least=0)
            object.__setattr__(self, name, number)
        if not self.kind:
            msg = f"layer {self.layer}: needs a kind, such as attention or mamba"
            raise ContractError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAxis:
    """This process's place on one axis of parallelism."""

    name: str
    """`tp`, `cp` or `dcp`; the pipeline stage is not an axis but a layer range."""
    rank: int
    size: int

    def __post_init__(self) -> None:
        where = f"rank axis {self.name!r}"
        for name, value in (("rank", self.rank), ("size", self.size)):
            object.__setattr__(self, name, as_integer(value, f"{where}: {name}"))
        if not self.name or not 0 <= self.rank < self.size:
            msg = f"{where}: rank {self.rank} is not within size {self.size}"
            raise ContractError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """On which ranks a role's bytes differ; a role that is not listed is sharded over every axis."""

    axes: tuple[RankAxis, ...] = ()
    sharded_over: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Role to the names of the axes whose ranks hold different bytes; an empty set is a full replica."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            msg = f"rank axes {names} repeat a name"
            raise ContractError(msg)
        sharded = {role: frozenset(over) for role, over in self.sharded_over.items()}
        for role, over in sharded.items():
            if unknown := over - set(names):
                msg = f"role {role!r} is sharded over {sorted(unknown)}, but the axes are {names}"
                raise ContractError(msg)
        object.__setattr__(self, "sharded_over", MappingProxyType(sharded))

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

    def __post_init__(self) -> None:
        size = as_integer(self.page_size, "a request's page_size", at_least=1)
        object.__setattr__(self, "page_size", size)
        object.__setattr__(self, "facts", _checked_facts("a request", self.facts))
        object.__setattr__(self, "extras", MappingProxyType(dict(self.extras)))


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
        where = f"description {self.family!r}"
        size = as_integer(self.page_size, f"{where}: page_size", at_least=1)
        object.__setattr__(self, "page_size", size)
        buffers = {role: _labelled(role, spans) for role, spans in self.buffers.items()}
        object.__setattr__(self, "buffers", MappingProxyType(buffers))
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "logical_pools", tuple(self.logical_pools))
        object.__setattr__(self, "index_maps", MappingProxyType(dict(self.index_maps)))
        object.__setattr__(self, "facts", _checked_facts(where, self.facts))
        if not self.family or not self.layers:
            msg = f"{where}: needs a family and at least one layer, got {len(self.layers)} layers"
            raise ContractError(msg)
        self._check_layers()
        self._check_names()

    def _check_layers(self) -> None:
        first = self.layers[0].global_layer
        for i, facts in enumerate(self.layers):
            if facts.layer != i:
                numbers = [facts.layer for facts in self.layers]
                msg = f"description {self.family!r}: layers must be 0..n-1 in order, got {numbers}"
                raise ContractError(msg)
            if facts.global_layer != first + i:
                numbers = [facts.global_layer for facts in self.layers]
                msg = (
                    f"description {self.family!r}: a stage's global layers must be consecutive, for keys name "
                    f"them as a range; got {numbers}; describe the layers without a cache too"
                )
                raise ContractError(msg)

    def _check_names(self) -> None:
        pools = [pool.name for pool in self.logical_pools]
        labels = [span.label for spans in self.buffers.values() for span in spans if span.rows]
        for what, names in (("logical pool", pools), ("span label", labels)):
            if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
                msg = f"description {self.family!r}: {what} {repeated[0]!r} is used twice"
                raise ContractError(msg)
        if unknown := sorted(self.index_maps.keys() - set(pools)):
            msg = f"description {self.family!r}: index maps for {unknown}, but the logical pools are {pools}"
            raise ContractError(msg)

    @property
    def layer_range(self) -> tuple[int, int]:
        """Global layers [start, end) of this pipeline stage."""
        return self.layers[0].global_layer, self.layers[-1].global_layer + 1

    def logical_pool(self, name: str) -> LogicalPool | None:
        """Return the logical pool of that name, or None."""
        return next((pool for pool in self.logical_pools if pool.name == name), None)

    def describe(self) -> str:
        """Return a text form for people."""
        start, end = self.layer_range
        lines = [f"{self.family}: layers [{start}, {end}), page of {self.page_size} slots"]
        lines.extend(f"  {kind}" for kind in _layer_kinds(self.layers))
        for role, spans in self.buffers.items():
            shapes = Counter((span.rows, span.row_bytes, span.row_stride) for span in spans)
            text = ", ".join(
                f"{count} x [{rows} rows of {size} B, stride {stride} B]"
                for (rows, size, stride), count in shapes.items()
            )
            lines.append(f"  buffer {role}: {text or 'no spans'}")
        lines.extend(f"  {_pool_text(pool, self.index_maps)}" for pool in self.logical_pools)
        lines.extend(f"  fact {key} = {value}" for key, value in sorted(self.facts.items()))
        lines.extend(
            f"  rank {axis.rank} of {axis.size} on {axis.name}" for axis in self.replication.axes
        )
        return "\n".join(lines)


def _labelled(role: str, spans: Sequence[BufferSpan]) -> tuple[BufferSpan, ...]:
    if not role:
        msg = "a buffer's role needs a name, such as kv or index_k"
        raise ContractError(msg)
    return tuple(
        span if span.label else span.relabel(f"{role}[{i}]") for i, span in enumerate(spans)
    )


def _checked_facts(where: str, facts: Mapping[str, Fact]) -> Mapping[str, Fact]:
    return MappingProxyType({name: _fact(where, name, value) for name, value in facts.items()})


def _fact(where: str, name: str, value: object) -> Fact:
    if isinstance(value, str):
        return value
    what = f"{where}: fact {name!r}"
    if isinstance(value, list | tuple):
        return tuple(as_integer(item, what) for item in value)
    # A claim such as kv_scaled is a number, so that every form of a description spells it alike.
    return int(value) if isinstance(value, bool) else as_integer(value, what)


def _layer_kinds(layers: tuple[LayerFacts, ...]) -> list[str]:
    kinds = Counter((la.kind, la.compress_ratio, la.indexer) for la in layers)
    return [
        f"{count} layers: {kind}"
        + (f", compressed {ratio}" if ratio else "")
        + (f", indexer {indexer.value}" if indexer is not IndexerKind.NONE else "")
        for (kind, ratio, indexer), count in kinds.items()
    ]


def _pool_text(pool: LogicalPool, index_maps: Mapping[str, IndexMap]) -> str:
    window = f", window {pool.window}" if pool.window else ""
    mapped = ", slots translated" if pool.name in index_maps else ""
    return f"logical pool {pool.name}: {pool.kind.value}, page {pool.page_size}{window}{mapped}"
