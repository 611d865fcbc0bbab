"""What holds for every model plugin: give the plugin and the caches that it takes."""

from __future__ import annotations

from functools import partial

import kvlinker_example
from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.testing.cache_examples import Allocate
from kvlinker.testing.models import CacheExample, ModelPluginTests

PAGE, PAGES, LAYERS = 128, 6, 3
SLOT_BYTES = 24


def describe(allocate: Allocate, block_size: int) -> KVCacheDescription:
    """Describe a cache over buffers that the kit hands out: made up, or real memory."""
    blocks, block_bytes = PAGES * PAGE // block_size, block_size * SLOT_BYTES
    return KVCacheDescription(
        family="example_blocks",
        page_size=PAGE,
        buffers={"blocks": tuple(allocate(blocks, block_bytes) for _ in range(LAYERS))},
        layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(LAYERS)),
        logical_pools=(LogicalPool(name="kv", page_size=PAGE),),
        facts={"kv_format": "bf16", "block_size": block_size},
    )


class TestExample(ModelPluginTests):
    plugin = kvlinker_example
    caches = (
        CacheExample(name="half_pages", describe=partial(describe, block_size=64), pages=PAGES),
        CacheExample(name="whole_pages", describe=partial(describe, block_size=128), pages=PAGES),
    )
