"""MHA caches keep what every model plugin promises."""

from __future__ import annotations

import pytest
from indexed_examples import Indexed

import kvlinker_mha
from kvlinker.description import Fact, KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.spans import BufferSpan
from kvlinker.testing.cache_examples import Allocate
from kvlinker.testing.models import CacheExample, ModelPluginTests

PAGE, PAGES, LAYERS = 16, 6, 3


def example(
    name: str, *, head_major: bool = False, scaled: bool = False, drafts: int = 0
) -> CacheExample:
    """Return a cache of K rows of 32 B and V rows of 48 B."""

    def describe(allocate: Allocate) -> KVCacheDescription:
        buffers: dict[str, tuple[BufferSpan, ...]] = {}
        for prefix, count in (("", LAYERS), ("draft_", drafts)):
            for role, size in (("k", 32), ("v", 48)):
                rows = (PAGES, size * PAGE) if head_major else (PAGES * PAGE, size)
                buffers[f"{prefix}{role}"] = tuple(allocate(*rows) for _ in range(count))
                if scaled:
                    scales = tuple(allocate(PAGES, size // 8 * PAGE) for _ in range(count))
                    buffers[f"{prefix}{role}_scale"] = scales
        return KVCacheDescription(
            family="mha",
            page_size=PAGE,
            buffers={role: spans for role, spans in buffers.items() if spans},
            layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(LAYERS)),
            logical_pools=(LogicalPool(name="kv", page_size=PAGE),),
            facts={
                "kv_layout": "head_major" if head_major else "token_major",
                "kv_format": "fp4_e2m1_block16_e8m0" if scaled else "bf16",
                "kv_scaled": int(scaled),
            },
        )

    return CacheExample(name=name, describe=describe, pages=PAGES)


def indexed(name: str, cache: Indexed) -> CacheExample:
    """Return a cache with index keys."""
    return CacheExample(name=name, describe=cache.describe, pages=PAGES)


OWN_DRAFTS: dict[str, Fact] = {"draft_kv_layout": "token_major", "draft_kv_format": "bf16"}


@pytest.mark.supports(engine="any", level="kit", of="cache")
class TestMHA(ModelPluginTests):
    plugin = kvlinker_mha
    caches = (
        example("token_major"),
        example("head_major", head_major=True),
        example("scaled", scaled=True),
        example("drafts", drafts=2),
        example("all_at_once", head_major=True, scaled=True, drafts=2),
        indexed("indexed", Indexed(drafts=1)),
        indexed("indexed_nvfp4", Indexed(indexed=(0, 2), packed=True)),
        indexed("indexed_nvfp4_drafts", Indexed(packed=True, drafts=2, draft_facts=OWN_DRAFTS)),
    )
