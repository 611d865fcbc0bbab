"""Explains a description: which strategy takes it, why the others do not, and what each pool costs.

Works on made-up addresses, so that a layout can be read on a machine without the engine, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlinker.description import KVCacheDescription, PoolKind
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import KVLinkerError
from kvlinker.pools import DevicePoolGroup
from kvlinker.registry import PluginRegistry
from kvlinker.selection import Verdict, build_group, judge, select_strategy

__all__ = ["Explanation", "PoolExplanation", "explain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolExplanation:
    """What one physical pool of a group costs."""

    name: str
    indices_from_pool: str
    """Logical pool that the engine allocates its slots from."""
    page_size: int
    """Slots in a page; 1 for a pool of whole states."""
    page_bytes: int
    spans: int
    layers: int
    """Transfer layers that have a part in the pool."""
    objects_per_page: int
    window: int | None = None
    """Slots that must be restored, where attention looks back no further."""
    holds_states: bool = False
    """A slot is the state of a whole prefix, not of a token."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token takes in the pool; for a pool of states, the bytes of one state."""
        return self.page_bytes / self.page_size

    @property
    def grows(self) -> bool:
        """Whether every page of a prefix is needed, and not the last ones alone."""
        return self.window is None and not self.holds_states

    @property
    def boundary_pages(self) -> int:
        """Pages that a restorable boundary needs at its end; 0 where every page is needed anyway."""
        if self.holds_states:
            return 1
        return 0 if self.window is None else -(-self.window // self.page_size)

    def restored_bytes(self, tokens: int) -> int:
        """Return the bytes that restoring a prefix of that many tokens moves: whole pages, the window's alone."""
        if self.holds_states:
            return self.page_bytes if tokens else 0
        pages = tokens // self.page_size
        return (pages if self.grows else min(pages, self.boundary_pages)) * self.page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Which strategy takes a description, and what it makes of it."""

    winner: str | None
    """Name of the strategy, or None where there is not exactly one that can lay the cache out."""
    problem: str
    """Why there is no group; empty where there is one."""
    verdicts: tuple[Verdict, ...]
    pools: tuple[PoolExplanation, ...] = ()
    omitted: Mapping[str, str] = field(default_factory=dict)
    """Span label to the reason why it is neither stored nor restored."""
    fingerprint: str = ""
    """Hexadecimal; layouts that differ in it never load each other's bytes."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token over all pools that grow with the prefix."""
        return sum(pool.bytes_per_token for pool in self.pools if pool.grows)

    @property
    def bytes_per_boundary(self) -> int:
        """Bytes that a stored boundary takes beside its pages: windows and states at its end."""
        return sum(pool.boundary_pages * pool.page_bytes for pool in self.pools)

    def restored_bytes(self, tokens: int) -> int:
        """Return the bytes that restoring a prefix of that many tokens moves, over all pools."""
        return sum(pool.restored_bytes(tokens) for pool in self.pools)


def explain(
    description: KVCacheDescription, registry: PluginRegistry, *, strategy: str | None = None
) -> Explanation:
    """Return which strategy takes the description, and what it makes of it; a refusal is part of the answer.

    Args:
        description: from an engine adapter, or from its JSON form.
        registry: the plugins to ask.
        strategy: ask this one alone.

    Raises:
        PluginError: the named strategy is absent, disabled, broken or doubly claimed.
    """
    verdicts = judge(description, registry, strategy=strategy)
    try:
        selection = select_strategy(description, registry, strategy=strategy)
        group = build_group(selection, description)
    except KVLinkerError as error:
        return Explanation(winner=None, problem=str(error), verdicts=verdicts)
    return Explanation(
        winner=selection.name,
        problem="",
        verdicts=verdicts,
        pools=_pools(group, description),
        omitted=selection.match.omitted,
        fingerprint=group.fingerprint.hex(),
    )


def _pools(group: DevicePoolGroup, description: KVCacheDescription) -> tuple[PoolExplanation, ...]:
    return tuple(_pool(entry, description) for entry in group.entries)


def _pool(entry: DevicePoolEntry, description: KVCacheDescription) -> PoolExplanation:
    source = description.logical_pool(entry.indices_from_pool)
    return PoolExplanation(
        name=entry.name,
        indices_from_pool=entry.indices_from_pool,
        page_size=entry.page_size,
        page_bytes=entry.page_bytes,
        spans=len(entry.spans),
        layers=len(entry.layer_mapping),
        objects_per_page=len(entry.part_bytes),
        window=source.window if source else None,
        holds_states=source is not None and source.kind is PoolKind.SLOT,
    )
