"""The model plugins together: each cache has exactly one strategy, and every other one says why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlinker.description import (
    IndexerKind,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
    PoolKind,
)
from kvlinker.discovery import load_plugins
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.installed import PluginKind
from kvlinker.registry import PluginRegistry
from kvlinker.selection import Outcome, build_group, judge, select_strategy
from kvlinker.testing.strategies import MadeUpMemory

PAGE, PAGES = 128, 4
SLOTS = PAGE * PAGES
KV = LogicalPool(name="kv", page_size=PAGE)


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    return load_plugins(environ={}, kinds=[PluginKind.MODEL])


def cache(
    family: str, buffers: dict[str, list[tuple[int, int]]], **facts: int | str
) -> KVCacheDescription:
    """Describe a cache of two layers; a buffer is its rows and the bytes of one."""
    span = MadeUpMemory().span
    indexer = IndexerKind.OWN if "index_k" in buffers else IndexerKind.NONE
    return KVCacheDescription(
        family=family,
        page_size=PAGE,
        buffers={
            role: tuple(span(rows, row_bytes) for rows, row_bytes in shapes)
            for role, shapes in buffers.items()
        },
        layers=tuple(LayerFacts(layer=i, global_layer=i, indexer=indexer) for i in range(2)),
        logical_pools=(KV,),
        facts=facts,
    )


def hybrid() -> KVCacheDescription:
    """Describe a layer of full attention, and one that looks through a window."""
    described = cache(
        "swa",
        {role: [(SLOTS, 256)] for role in ("k", "v", "swa_k", "swa_v")},
        kv_layout="token_major",
        kv_format="bf16",
        kv_scaled=0,
    )
    full, sliding = described.layers
    return replace(
        described,
        layers=(full, replace(sliding, kind="sliding")),
        logical_pools=(KV, LogicalPool(name="swa", page_size=PAGE, window=128)),
    )


def stateful() -> KVCacheDescription:
    """Describe a layer of full attention, and one that keeps a state."""
    described = cache(
        "mamba",
        {
            "k": [(SLOTS, 256)],
            "v": [(SLOTS, 256)],
            "ssm_state": [(PAGES, 4096)],
            "conv_state_0": [(PAGES, 384)],
        },
        kv_family="mha",
        kv_layout="token_major",
        kv_format="bf16",
        kv_scaled=0,
        ssm_format="fp32",
        ssm_layout="value_major",
        conv_states=1,
        conv_format="bf16",
        conv_layout="channel_major",
        conv_window=3,
    )
    full, state = described.layers
    return replace(
        described,
        layers=(full, replace(state, kind="mamba")),
        logical_pools=(KV, LogicalPool(name="mamba", kind=PoolKind.SLOT, page_size=1)),
    )


def caches() -> dict[str, KVCacheDescription]:
    """Return one cache for each plugin, under the plugin's name."""
    return {
        "mha": cache(
            "mha",
            {"k": [(SLOTS, 256)] * 2, "v": [(SLOTS, 256)] * 2},
            kv_layout="token_major",
            kv_format="bf16",
            kv_scaled=0,
        ),
        "mla": cache("mla", {"latent": [(SLOTS, 1152)] * 2}, kv_format="bf16"),
        "swa": hybrid(),
        "mamba": stateful(),
        "dsa": cache(
            "dsa",
            {"kv": [(SLOTS, 1152)] * 2, "index_k": [(PAGES, PAGE * 132)] * 2},
            kv_format="bf16",
            index_format="fp8_e4m3fn_fp32_scale",
        ),
        "deepseek_v4": replace(
            cache(
                "deepseek_v4",
                {"swa_kv": [(PAGES, 74_880)] * 2},
                kv_format="fp8_e4m3fn_ue8m0",
                indexer_format="fp8_fused",
                state_ring_rows=8,
                state_format="fp32",
                swa_page_size=PAGE,
                swa_physical_page_size=PAGE,
                unified_kv=0,
                hisparse=0,
                c128_state_persistent=0,
            ),
            logical_pools=(KV, LogicalPool(name="swa", page_size=PAGE, window=128)),
        ),
        "example": cache(
            "example_blocks", {"blocks": [(8, 64)] * 2}, kv_format="bf16", block_size=64
        ),
        "example_engine": cache(
            "example_tiles",
            {"tiles": [(PAGES, 2 * PAGE)] * 2, "scales": [(PAGES, 16)] * 2},
            tile_format="bf16",
        ),
    }


@pytest.mark.parametrize(
    "name", ["mha", "mla", "swa", "mamba", "dsa", "deepseek_v4", "example", "example_engine"]
)
def test_s3_every_family_has_one_strategy_and_the_others_decline(
    registry: PluginRegistry, name: str
) -> None:
    description = caches()[name]

    outcomes = {verdict.record.name: verdict.outcome for verdict in judge(description, registry)}
    group = build_group(select_strategy(description, registry), description)

    assert outcomes.pop(name) is Outcome.SELECTED
    assert set(outcomes.values()) == {Outcome.DECLINED}
    assert len(group.entries) >= 1


def test_s1_an_index_beside_a_latent_cache_is_taken_by_nobody(registry: PluginRegistry) -> None:
    description = caches()["mla"]
    index = caches()["dsa"].buffers["index_k"]
    both = replace(description, buffers={**description.buffers, "index_k": index})

    with pytest.raises(UnsupportedKVCacheError, match=r"buffers \['index_k'\] are unknown here"):
        select_strategy(both, registry)


def test_s3_a_refusal_reaches_the_reader_with_its_numbers(registry: PluginRegistry) -> None:
    description = replace(caches()["dsa"], page_size=64)

    with pytest.raises(
        UnsupportedKVCacheError, match="pages of 128 slots and the prefix tree pages of 64"
    ):
        select_strategy(description, registry)


def test_s1_a_hybrid_that_calls_itself_plain_attention_is_taken_by_nobody(
    registry: PluginRegistry,
) -> None:
    plain = replace(hybrid(), family="mha")

    with pytest.raises(UnsupportedKVCacheError, match=r"logical pools \['swa'\] are unknown here"):
        select_strategy(plain, registry)
