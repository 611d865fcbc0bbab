"""What holds for every engine adapter and for every model plugin: this distribution is both."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import kvlinker_example_engine
from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.testing.cache_examples import Allocate
from kvlinker.testing.engines import EngineAdapterTests, PoolExample
from kvlinker.testing.models import CacheExample, ModelPluginTests
from kvlinker_example_engine.toy_engine import MirroredTilePool, TilePool

PAGE, PAGES, LAYERS = 16, 6, 3


class TestAdapter(EngineAdapterTests):
    plugin = kvlinker_example_engine
    engine = "tiles"
    goldens = Path(__file__).parent / "goldens"
    pools = (
        PoolExample(
            name="tiles",
            make=partial(TilePool, layers=LAYERS, pages=PAGES, page_size=PAGE),
            page_size=PAGE,
            excused={"slot_of_request.*": "which slots a request has is the engine's own business"},
        ),
    )
    unsupported = (
        PoolExample(
            name="mirrored",
            make=partial(MirroredTilePool, layers=LAYERS, pages=PAGES, page_size=PAGE),
            page_size=PAGE,
        ),
    )


def describe(allocate: Allocate) -> KVCacheDescription:
    """Describe a cache over buffers that the kit hands out: made up, or real memory."""
    return KVCacheDescription(
        family="example_tiles",
        page_size=PAGE,
        buffers={
            "tiles": tuple(allocate(PAGES, 2 * 2 * PAGE * 32) for _ in range(LAYERS)),
            "scales": tuple(allocate(PAGES, 2 * 2 * 4) for _ in range(LAYERS)),
        },
        layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(LAYERS)),
        logical_pools=(LogicalPool(name="kv", page_size=PAGE),),
        facts={"tile_format": "fp8_e4m3fn"},
    )


class TestStrategy(ModelPluginTests):
    plugin = kvlinker_example_engine
    caches = (CacheExample(name="tiles", describe=describe, pages=PAGES),)
