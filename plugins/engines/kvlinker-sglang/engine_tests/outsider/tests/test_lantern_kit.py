"""The kits of engine adapters and of model plugins: this distribution is both."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import lantern_kv
from lantern_kv.pool import SLOT_BYTES, DimLanternPool, LanternPool

from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.testing.cache_examples import Allocate
from kvlinker.testing.engines import EngineAdapterTests, PoolExample
from kvlinker.testing.models import CacheExample, ModelPluginTests

PAGE, PAGES, LAYERS = 8, 6, 3


class TestAdapter(EngineAdapterTests):
    plugin = lantern_kv
    engine = "sglang"
    goldens = Path(__file__).parent / "goldens"
    pools = (
        PoolExample(
            name="lantern",
            make=partial(LanternPool, layers=LAYERS, pages=PAGES, page_size=PAGE),
            page_size=PAGE,
            excused={"glow": "scratch of the running forward"},
        ),
    )
    unsupported = (
        PoolExample(
            name="dim",
            make=partial(DimLanternPool, layers=LAYERS, pages=PAGES, page_size=PAGE),
            page_size=PAGE,
        ),
    )


def describe(allocate: Allocate) -> KVCacheDescription:
    """Describe a cache over buffers that the kit hands out."""
    return KVCacheDescription(
        family="lantern",
        page_size=PAGE,
        buffers={
            "lamps": tuple(allocate(PAGES, PAGE * SLOT_BYTES) for _ in range(LAYERS)),
            "wicks": tuple(allocate(PAGES * PAGE, 12) for _ in range(LAYERS)),
        },
        layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(LAYERS)),
        logical_pools=(LogicalPool(name="kv", page_size=PAGE),),
        facts={"lamp_format": "lantern8"},
    )


class TestStrategy(ModelPluginTests):
    plugin = lantern_kv
    caches = (CacheExample(name="lantern", describe=describe, pages=PAGES),)
