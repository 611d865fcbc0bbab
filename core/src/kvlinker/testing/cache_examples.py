"""Examples of caches that a model plugin takes, and the variants of them that it is tested with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvlinker.description import Fact, KVCacheDescription
from kvlinker.errors import ContractError
from kvlinker.layouts import DRAFT_LAYERS
from kvlinker.pools import KV
from kvlinker.spans import BufferSpan
from kvlinker.testing.pool_memory import HostMemory
from kvlinker.testing.strategies import MadeUpMemory, PageRows

__all__ = [
    "DRAFT_PREFIX",
    "Allocate",
    "CacheExample",
    "Describe",
    "changed_facts",
    "draft_layers",
    "layer_slices",
    "with_facts",
    "without_drafts",
    "without_role",
]

Allocate: TypeAlias = Callable[[int, int], BufferSpan]
"""Takes rows and bytes of a row and returns the span of a new buffer; without rows, of none."""
Describe: TypeAlias = Callable[[Allocate], KVCacheDescription]

DRAFT_PREFIX = "draft_"
"""Roles of draft layers begin with it; a cache without them is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheExample:
    """A cache that a plugin takes, and where its pages are, said by the test and not by the plugin."""

    name: str
    """Of the test cases with this cache."""
    describe: Describe
    """Describes the cache over buffers that it asks for, the same each time but for addresses."""
    pages: int
    """Pages in every buffer, at least 4; rows that fill no page may be left over."""
    pools: Mapping[str, str] = field(default_factory=dict)
    """Role to the logical pool that its pages come from; `kv` for roles that are not named."""
    omitted: frozenset[str] = frozenset()
    """Labels of spans whose bytes are never read, so that nobody stores or restores them."""
    optional: frozenset[str] = frozenset()
    """Roles without which the cache is whole, beside those of drafts."""
    role_layers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Role to the layer of each of its spans, for roles that have not one span for each layer in order."""
    stages: Sequence[Describe] = ()
    """Describe consecutive stages of the same model, where layers cannot be told from the number of spans."""

    def __post_init__(self) -> None:
        if self.pages < 4:  # noqa: PLR2004  # pages move to, from and between places that stay
            msg = f"an example needs at least 4 pages, got {self.pages}"
            raise ContractError(msg)

    def made_up(self) -> KVCacheDescription:
        """Return the cache at addresses that nobody can dereference."""
        return self.describe(MadeUpMemory().span)

    def elsewhere(self) -> KVCacheDescription:
        """Return the same cache at other addresses, and with twice the rows."""
        memory = MadeUpMemory()
        memory.span(1, 1 << 20)
        return self.describe(lambda rows, row_bytes: memory.span(2 * rows, row_bytes))

    def in_memory(self) -> KVCacheDescription:
        """Return the cache in memory of this process, which lives as long as the description."""
        memory, nowhere = HostMemory(), MadeUpMemory()
        return self.describe(
            lambda rows, size: memory.allocate(rows, size) if rows else nowhere.span(0, size)
        )

    def page_rows(self, description: KVCacheDescription) -> dict[str, PageRows]:
        """Return where the pages of each role are."""
        rows = {
            role: max((span.rows for span in spans), default=0)
            for role, spans in description.buffers.items()
        }
        return {
            role: PageRows(self.pools.get(role, KV), count // self.pages)
            for role, count in rows.items()
            if count
        }

    def moves(self, description: KVCacheDescription) -> dict[str, dict[int, int]]:
        """Return for each logical pool, its own way, which page is restored at which place."""
        last = self.pages - 1
        moves = {}
        for number, pool in enumerate(description.logical_pools):
            turned = [(page + number) % self.pages for page in (0, 1, 2, last)]
            first, stays, second, third = turned
            moves[pool.name] = {first: third, third: second, stays: stays}
        return moves

    def layers_of(self, description: KVCacheDescription, role: str) -> Sequence[int] | None:
        """Return the layer of each of a role's spans; None where the example does not say."""
        if role in self.role_layers:
            return self.role_layers[role]
        layers = len(description.layers)
        return range(layers) if len(description.buffers[role]) == layers else None


def with_facts(description: KVCacheDescription, **facts: Fact) -> KVCacheDescription:
    """Return the cache with other or more facts."""
    return replace(description, facts={**description.facts, **facts})


def without_role(description: KVCacheDescription, role: str) -> KVCacheDescription:
    """Return the cache without a role."""
    kept = {name: spans for name, spans in description.buffers.items() if name != role}
    return replace(description, buffers=kept)


def draft_layers(description: KVCacheDescription) -> int:
    """Return how many draft layers are described: the most spans that a draft's role has."""
    roles = (role for role in description.buffers if role.startswith(DRAFT_PREFIX))
    return max((len(description.buffers[role]) for role in roles), default=0)


def without_drafts(description: KVCacheDescription) -> KVCacheDescription:
    """Return the cache as it would be without any draft layer."""
    buffers = {r: s for r, s in description.buffers.items() if not r.startswith(DRAFT_PREFIX)}
    facts = {name: value for name, value in description.facts.items() if name != DRAFT_LAYERS}
    return replace(description, buffers=buffers, facts=facts)


def changed_facts(
    description: KVCacheDescription,
) -> Iterator[tuple[str, Fact, KVCacheDescription]]:
    """Yield each fact's name, another value, and the cache with that value."""
    for name, value in description.facts.items():
        other = _other(value)
        yield name, other, with_facts(description, **{name: other})


def _other(value: Fact) -> Fact:
    if isinstance(value, str):
        return f"{value}-other"
    return (*value, 1) if isinstance(value, tuple) else value + 1


def layer_slices(description: KVCacheDescription) -> tuple[KVCacheDescription, ...] | None:
    """Return two stages that the layers of a cache without drafts are cut into.

    None where a role has not one span for each layer, so that its spans cannot be told apart; a single
    layer is the only stage.
    """
    count = len(description.layers)
    if any(len(spans) != count for spans in description.buffers.values()):
        return None
    if count == 1:
        return (description,)
    middle = (count + 1) // 2
    return _slice(description, 0, middle), _slice(description, middle, count)


def _slice(description: KVCacheDescription, start: int, end: int) -> KVCacheDescription:
    return replace(
        description,
        buffers={role: spans[start:end] for role, spans in description.buffers.items()},
        layers=tuple(
            replace(facts, layer=number)
            for number, facts in enumerate(description.layers[start:end])
        ),
    )
