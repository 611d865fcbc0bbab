"""Small caches of compressed sparse attention, as an engine adapter would describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlinker.description import Fact, KVCacheDescription, LayerFacts, LogicalPool, PoolKind
from kvlinker.testing.cache_examples import Allocate

__all__ = ["INDEX", "KINDS", "PAGE", "PAGES", "Cache"]

PAGE, PAGES = 16, 6
KINDS = ("mamba", "attention", "mamba", "attention")
INDEX: Mapping[str, Fact] = {"index_format": "bf16", "index_values": 8, "index_ratio": 4}
_KEY_BYTES = 8 * 2
"""Bytes of an index key as INDEX says."""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A model, of which stages are described; no two kinds of rows have one size."""

    drafts: int = 0
    facts: Mapping[str, Fact] = field(default_factory=lambda: INDEX)
    index_row: int = PAGE // 4 * _KEY_BYTES

    def describe(
        self, allocate: Allocate, start: int = 0, end: int = len(KINDS)
    ) -> KVCacheDescription:
        """Describe layers [start, end)."""
        kinds = KINDS[start:end]
        pages, states = kinds.count("attention"), kinds.count("mamba")
        rows = {
            "k": (pages, PAGES * PAGE, 10),
            "v": (pages, PAGES * PAGE, 12),
            "index_k": (pages, PAGES, self.index_row),
            "draft_k": (self.drafts, PAGES * PAGE, 10),
            "draft_v": (self.drafts, PAGES * PAGE, 12),
            "draft_index_k": (self.drafts, PAGES, self.index_row),
            "ssm_state": (states, PAGES, 32),
            "conv_state_0": (states, PAGES, 18),
        }
        return KVCacheDescription(
            family="qsa",
            page_size=PAGE,
            buffers={
                role: tuple(allocate(length, size) for _ in range(count))
                for role, (count, length, size) in rows.items()
                if count
            },
            layers=tuple(
                LayerFacts(layer=i, global_layer=start + i, kind=kind)
                for i, kind in enumerate(kinds)
            ),
            logical_pools=(
                LogicalPool(name="kv", page_size=PAGE),
                LogicalPool(name="mamba", page_size=1, kind=PoolKind.SLOT),
            ),
            facts={
                "kv_family": "mha",
                "kv_layout": "token_major",
                "kv_format": "bf16",
                "kv_scaled": 0,
                "ssm_format": "fp32",
                "ssm_layout": "value_major",
                "conv_states": 1,
                "conv_format": "bf16",
                "conv_layout": "channel_major",
                "conv_window": 3,
                **self.facts,
            },
        )
