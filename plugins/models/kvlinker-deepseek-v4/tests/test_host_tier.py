"""The host-tier planner: pages, rows and bytes of a mirror, from the pools that the device has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.description import KVCacheDescription, LogicalPool
from kvlinker.errors import ContractError
from kvlinker.spans import BufferSpan
from kvlinker_deepseek_v4 import (
    V4Formats,
    V4Pool,
    build_pool_group,
    resolve_layer_mappings,
    stage_layers,
    v4_pools,
)
from kvlinker_deepseek_v4.host_tier import (
    ByteCapacity,
    PageCapacity,
    available_host_bytes,
    plan_host_tier,
)

# config.json of deepseek-ai/DeepSeek-V4-Flash, compress_ratios without the MTP layer.
FLASH = [0, 0, *[4, 128] * 20, 4]
FORMATS = V4Formats(page_size=256)
FLASH_KV_PAGE, FLASH_SWA_PAGE = 998_208, 8_160_000


def endless() -> int:
    return 1 << 60


def pools_of(ratios: Sequence[int], *, drafts: int = 0) -> tuple[V4Pool, ...]:
    return v4_pools(FORMATS, resolve_layer_mappings(stage_layers(ratios), draft_layers=drafts))


def test_capacity_in_pages_gives_each_pool_the_pages_of_its_index_space() -> None:
    plan = plan_host_tier(
        pools_of(FLASH),
        page_size=256,
        capacity=PageCapacity(kv_pages=40, swa_pages=5),
        available_bytes=endless,
    )

    assert {pool.name: (pool.pages, pool.page_bytes) for pool in plan.pools} == {
        "kv": (40, 0),
        "swa": (5, 6_439_680),
        "deepseek_v4_c4": (40, 786_240),
        "deepseek_v4_c4_indexer": (40, 177_408),
        "deepseek_v4_c128": (40, 34_560),
        "deepseek_v4_c4_state": (5, 1_376_256),
        "deepseek_v4_c4_indexer_state": (5, 344_064),
    }
    assert plan.total_bytes == 40 * FLASH_KV_PAGE + 5 * FLASH_SWA_PAGE
    assert plan.tokens == 40 * 256


def test_capacity_in_bytes_is_filled_with_whole_boundaries() -> None:
    unit = 8 * FLASH_KV_PAGE + FLASH_SWA_PAGE

    plans = [
        plan_host_tier(
            pools_of(FLASH),
            page_size=256,
            capacity=ByteCapacity(total_bytes=total),
            available_bytes=endless,
        )
        for total in (3 * unit - 1, 3 * unit)
    ]

    assert [plan.pool("swa").pages for plan in plans] == [2, 3]
    assert [plan.pool("kv").pages for plan in plans] == [16, 24]
    assert [plan.total_bytes for plan in plans] == [2 * unit, 3 * unit]


@given(
    ratios=st.lists(st.sampled_from([0, 4, 128]), min_size=1, max_size=20),
    total=st.integers(1, 1 << 34),
    per_boundary=st.integers(1, 64),
)
def test_bytes_are_never_exceeded_and_no_further_boundary_would_fit(
    ratios: list[int], total: int, per_boundary: int
) -> None:
    pools = pools_of(ratios)
    unit = sum(
        pool.page_bytes * (per_boundary if pool.indices_from_pool == "kv" else 1) for pool in pools
    )
    capacity = ByteCapacity(total_bytes=total, kv_pages_per_swa_page=per_boundary)

    if total < unit:
        with pytest.raises(ContractError, match=f"{total} B hold no boundary"):
            plan_host_tier(pools, page_size=256, capacity=capacity, available_bytes=endless)
    else:
        plan = plan_host_tier(pools, page_size=256, capacity=capacity, available_bytes=endless)
        assert total - unit < plan.total_bytes <= total
        assert plan.pool("kv").pages == per_boundary * plan.pool("swa").pages


def test_b13_the_anchor_has_pages_and_no_bytes_even_where_nothing_is_fed_from_it() -> None:
    plan = plan_host_tier(
        pools_of([0, 0]),
        page_size=256,
        capacity=ByteCapacity(total_bytes=10 * 2 * 149_760),
        available_bytes=endless,
    )

    anchor, windows = plan.pools
    assert (anchor.name, anchor.pages, anchor.rows, anchor.total_bytes) == ("kv", 80, 0, 0)
    assert (windows.name, windows.pages) == ("swa", 10)


@pytest.mark.parametrize("drafts", [0, 1])
def test_b15_planned_bytes_are_those_of_the_buffers_that_are_really_allocated(drafts: int) -> None:
    layers = stage_layers([0, 4, 128, 4])
    mappings = resolve_layer_mappings(layers, draft_layers=drafts)
    pools, pages = v4_pools(FORMATS, mappings), 3
    tensors = {
        pool.role: [
            torch.zeros((pages * pool.rows_per_page, pool.row_bytes), dtype=torch.uint8)
            for _ in range(pool.spans)
        ]
        for pool in pools
    }
    if drafts:
        tensors["draft_swa_kv"] = [tensors["swa_kv"].pop() for _ in range(drafts)]
    description = KVCacheDescription(
        family="deepseek_v4",
        page_size=256,
        buffers={
            role: tuple(BufferSpan.from_tensor(t) for t in found) for role, found in tensors.items()
        },
        layers=layers,
        logical_pools=(
            LogicalPool(name="kv", page_size=256),
            LogicalPool(name="swa", page_size=256, window=128),
        ),
        facts={
            "kv_format": "fp8_e4m3fn_ue8m0",
            "indexer_format": "fp8_fused",
            "state_ring_rows": 8,
            "state_format": "fp32",
            "swa_page_size": 256,
            "swa_physical_page_size": 256,
            "unified_kv": 0,
            "hisparse": 0,
            "c128_state_persistent": 0,
        },
    )
    group = build_pool_group(description, mappings)

    plan = plan_host_tier(
        pools,
        page_size=256,
        capacity=PageCapacity(kv_pages=pages, swa_pages=pages),
        available_bytes=endless,
    )

    allocated = sum(tensor.nbytes for found in tensors.values() for tensor in found)
    assert plan.total_bytes == allocated
    assert {p.name: p.page_bytes for p in plan.pools[1:]} == {
        entry.name: entry.page_bytes for entry in group.entries
    }
    assert {p.name: p.layer_mapping for p in plan.pools[1:]} == {
        entry.name: entry.layer_mapping for entry in group.entries
    }


@pytest.mark.parametrize("ring", [8, 16])
def test_b16_state_rows_follow_pages_of_256_and_not_the_window_of_128(ring: int) -> None:
    formats = V4Formats(page_size=256, state_ring_rows=ring)
    pools = v4_pools(formats, resolve_layer_mappings(stage_layers([4])))
    tokens = 4096

    plan = plan_host_tier(
        pools,
        page_size=256,
        capacity=PageCapacity(kv_pages=1, swa_pages=tokens // 256),
        available_bytes=endless,
    )

    for name in ("deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state"):
        assert plan.pool(name).rows == tokens // 256 * ring


def test_the_mirror_has_the_layer_mappings_that_were_resolved_for_the_device() -> None:
    mappings = resolve_layer_mappings(stage_layers(FLASH, start=1, end=9), draft_layers=1)

    plan = plan_host_tier(
        v4_pools(FORMATS, mappings),
        page_size=256,
        capacity=PageCapacity(kv_pages=1, swa_pages=1),
        available_bytes=endless,
    )

    assert plan.pool("swa").layer_mapping is mappings.swa
    assert plan.pool("deepseek_v4_c4").layer_mapping is mappings.c4
    assert plan.pool("deepseek_v4_c4_state").layer_mapping is mappings.c4_state
    assert plan.pool("deepseek_v4_c128").layer_mapping is mappings.c128


def test_b109_the_probe_decides_what_is_available() -> None:
    needed = FLASH_KV_PAGE + FLASH_SWA_PAGE
    capacity = PageCapacity(kv_pages=1, swa_pages=1)

    plan = plan_host_tier(
        pools_of(FLASH), page_size=256, capacity=capacity, available_bytes=lambda: needed
    )

    assert plan.total_bytes == needed
    with pytest.raises(ContractError, match=f"needs {needed} B and {needed - 1} B are available"):
        plan_host_tier(
            pools_of(FLASH), page_size=256, capacity=capacity, available_bytes=lambda: needed - 1
        )


def test_the_probe_of_ordinary_memory_finds_some() -> None:
    assert available_host_bytes() > 0


@pytest.mark.parametrize(("kv_pages", "swa_pages"), [(0, 1), (1, 0), (-1, 1)])
def test_capacities_without_pages_are_refused(kv_pages: int, swa_pages: int) -> None:
    with pytest.raises(ContractError, match=f"got kv {kv_pages}, swa {swa_pages}"):
        PageCapacity(kv_pages=kv_pages, swa_pages=swa_pages)


@pytest.mark.parametrize(("total", "per_boundary"), [(0, 8), (-1, 8), (1, 0)])
def test_capacities_without_bytes_are_refused(total: int, per_boundary: int) -> None:
    with pytest.raises(ContractError, match=f"got total_bytes {total}, kv_pages_per_swa_page"):
        ByteCapacity(total_bytes=total, kv_pages_per_swa_page=per_boundary)


def test_no_pools_and_unknown_pools_are_refused() -> None:
    capacity = PageCapacity(kv_pages=1, swa_pages=1)
    plan = plan_host_tier(pools_of([0]), page_size=256, capacity=capacity, available_bytes=endless)

    with pytest.raises(ContractError, match="mirrors at least one pool, got none"):
        plan_host_tier((), page_size=256, capacity=capacity, available_bytes=endless)
    with pytest.raises(ContractError, match=r"no pool 'c4'; it has \['kv', 'swa'\]"):
        plan.pool("c4")
