"""The whole way: from an engine's pool, over its description, to a group that moves the right bytes."""

from __future__ import annotations

import pytest
import torch

import kvlinker_example_engine
from kvlinker.description import DescribeRequest
from kvlinker.discovery import load_modules
from kvlinker.errors import ContractError, StalePoolError, UnsupportedKVCacheError
from kvlinker.registry import PluginRegistry
from kvlinker.selection import describe_cache, resolve_hybrid_device_pool_group
from kvlinker.testing.strategies import PageRows, check_round_trip
from kvlinker_example_engine.layout import check_tiles
from kvlinker_example_engine.toy_engine import MirroredTilePool, TilePool

PAGE = 16
TILE_BYTES = 2 * 2 * PAGE * 32
SCALE_BYTES = 2 * 2 * 4
REQUEST = DescribeRequest(page_size=PAGE)


@pytest.fixture
def registry() -> PluginRegistry:
    plugin = {"example_engine": kvlinker_example_engine}
    return load_modules(engines=plugin, models=plugin)


def test_a_pool_becomes_a_group_of_pages_of_tiles_and_scales(registry: PluginRegistry) -> None:
    pool = TilePool(layers=3, pages=6, page_size=PAGE)

    group = resolve_hybrid_device_pool_group("tiles", pool, REQUEST, registry=registry)

    (entry,) = group.entries
    assert (entry.page_bytes, entry.rows_are_pages) == (3 * (TILE_BYTES + SCALE_BYTES), True)
    ranges = entry.page_plan(entry.prepare_locations(range(2 * PAGE, 3 * PAGE))).expand()
    assert ranges.address.tolist() == [
        *(pool.tiles[layer, 2].data_ptr() for layer in range(3)),
        *(pool.scales[layer, 2].data_ptr() for layer in range(3)),
    ]


def test_every_byte_of_the_engines_own_tensors_comes_back(registry: PluginRegistry) -> None:
    pool = TilePool(layers=3, pages=6, page_size=PAGE)
    description = describe_cache("tiles", pool, REQUEST, registry=registry)
    group = resolve_hybrid_device_pool_group("tiles", pool, REQUEST, registry=registry)
    places = {"tiles": PageRows("kv", 1), "scales": PageRows("kv", 1)}

    check_round_trip(group, description, places, {"kv": {1: 4, 5: 0, 2: 2}})

    assert pool.tiles[:, 3].flatten().unique().tolist() == [0xFF]


def test_c10_a_pool_whose_tensor_is_replaced_is_noticed(registry: PluginRegistry) -> None:
    pool = TilePool(layers=1, pages=4, page_size=PAGE)
    group = resolve_hybrid_device_pool_group("tiles", pool, REQUEST, registry=registry)

    pool.scales.data = torch.zeros_like(pool.scales)

    with pytest.raises(StalePoolError, match=r"'scales\[0\]': its buffer moved"):
        group.verify()


def test_a_mirrored_pool_is_refused_with_what_to_do(registry: PluginRegistry) -> None:
    pool = MirroredTilePool(layers=1, pages=4, page_size=PAGE)

    with pytest.raises(UnsupportedKVCacheError, match="run the engine without mirrors"):
        describe_cache("tiles", pool, REQUEST, registry=registry)


def test_b96_page_sizes_that_differ_are_refused_with_both_numbers(registry: PluginRegistry) -> None:
    pool = TilePool(layers=1, pages=4, page_size=PAGE)

    with pytest.raises(UnsupportedKVCacheError, match=r"pages of 16 slots .* pages of 64;"):
        resolve_hybrid_device_pool_group(
            "tiles", pool, DescribeRequest(page_size=64), registry=registry
        )


def test_tiles_that_are_no_pages_are_refused(registry: PluginRegistry) -> None:
    pool = TilePool(layers=1, pages=4, page_size=PAGE)
    pool.tiles = torch.zeros((1, 4, 33), dtype=torch.uint8)
    description = describe_cache("tiles", pool, REQUEST, registry=registry)

    with pytest.raises(ContractError, match="tiles of 33 B, which are no pages of 16 slots"):
        check_tiles(description)
