"""Caches of heads in which some layers select what they attend to by index keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from kvlinker.description import Fact, IndexerKind, KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.spans import BufferSpan

__all__ = ["LAYERS", "PAGE", "PAGES", "Indexed"]

PAGE, PAGES, LAYERS = 16, 6, 4
VALUES = 32
"""Of an index key."""
NVFP4 = "fp4_e2m1_block16_e4m3"
Allocate = Callable[[int, int], BufferSpan]


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """A cache of four layers: K and V of 32 B a slot, and index keys of 32 values."""

    indexed: Collection[int] = (1, 2, 3)
    with_values: Collection[int] = (2,)
    """Layers whose index attends to values."""
    packed: bool = False
    """Everything as nvfp4, a row for each page, with scales."""
    drafts: int = 0
    draft_facts: Mapping[str, Fact] = field(default_factory=dict)
    """How drafts keep K and V, where they do otherwise than the target: without scales, a row for each slot."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Those that are stated otherwise than they are."""

    def describe(self, allocate: Allocate) -> KVCacheDescription:
        """Return the description of the cache over buffers that are allocated for it."""
        buffers: dict[str, tuple[BufferSpan, ...]] = {}
        for prefix, count in (("", LAYERS), ("draft_", self.drafts)):
            paged = self.packed and not (prefix and self.draft_facts)
            for role in ("k", "v"):
                rows = (PAGES, 32 * PAGE) if paged else (PAGES * PAGE, 32)
                buffers[f"{prefix}{role}"] = tuple(allocate(*rows) for _ in range(count))
                if paged:
                    scales = tuple(allocate(PAGES, 4 * PAGE) for _ in range(count))
                    buffers[f"{prefix}{role}_scale"] = scales
        buffers |= self._indexes(allocate)
        return KVCacheDescription(
            family="mha",
            page_size=PAGE,
            buffers={role: spans for role, spans in buffers.items() if spans},
            layers=tuple(
                LayerFacts(
                    layer=i,
                    global_layer=i,
                    indexer=IndexerKind.OWN if i in self.indexed else IndexerKind.NONE,
                )
                for i in range(LAYERS)
            ),
            logical_pools=(LogicalPool(name="kv", page_size=PAGE),),
            facts={
                "kv_layout": "head_major" if self.packed else "token_major",
                "kv_format": NVFP4 if self.packed else "bf16",
                "kv_scaled": int(self.packed),
                "index_format": NVFP4 if self.packed else "bf16",
                "index_values": VALUES,
                "index_has_values": int(bool(self.with_values) and not self.packed),
                **self.draft_facts,
                **self.facts,
            },
        )

    def _indexes(self, allocate: Allocate) -> dict[str, tuple[BufferSpan, ...]]:
        def of(layers: Collection[int], row_bytes: int) -> tuple[BufferSpan, ...]:
            return tuple(allocate(PAGES if i in layers else 0, row_bytes) for i in range(LAYERS))

        if self.packed:
            return {
                "index_k": of(self.indexed, PAGE * VALUES // 2),
                "index_k_scale": of(self.indexed, PAGE * VALUES // 16),
            }
        keys = {"index_k": of(self.indexed, PAGE * VALUES * 2)}
        values = {"index_v": of(self.with_values, PAGE * VALUES * 2)} if self.with_values else {}
        return keys | values
