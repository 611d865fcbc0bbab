"""DeepSeek V4 caches keep what every model plugin promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

import kvlinker_deepseek_v4
from kvlinker.description import KVCacheDescription, LogicalPool
from kvlinker.testing.cache_examples import Allocate, Describe
from kvlinker.testing.models import CacheExample, ModelPluginTests
from kvlinker_deepseek_v4 import stage_layers

PAGE, PAGES, RING = 128, 5, 8
SPARE_ROWS = 1
RATIOS = (0, 4, 128, 4)
SHARED_RATIOS, SOURCES = (0, 2, 2, 1, 1, 2, 4), (1, 3, 5)
"""Layers of V4.1, and those that keep what others of their ratio read."""


def paged(entries: int) -> int:
    """Return the bytes of a page of fp8 entries: rows of 576 B, then scales of 8 B, in whole rows."""
    return -(-entries * (576 + 8) // 576) * 576


def describe(
    allocate: Allocate, *, start: int = 0, end: int | None = None, drafts: int = 0, split: bool
) -> KVCacheDescription:
    """Describe layers [start, end), with fp8 index keys, or with fp4 ones and their scales apart."""
    layers = stage_layers(RATIOS, start=start, end=end)
    c4, c128 = (sum(facts.compress_ratio == ratio for facts in layers) for ratio in (4, 128))
    keys, rings = PAGE // 4, PAGES * RING + SPARE_ROWS
    shapes = {
        "swa_kv": (len(layers), PAGES, paged(PAGE)),
        "c4_kv": (c4, PAGES, paged(keys)),
        "c4_indexer": (c4, PAGES, keys * (64 if split else 132)),
        "c4_indexer_scale": (c4 if split else 0, PAGES, keys * 4),
        "c4_state": (c4, rings, 4 * 512 * 4),
        "c4_indexer_state": (c4, rings, 4 * 128 * 4),
        "c128_kv": (c128, PAGES, paged(1)),
        "draft_swa_kv": (drafts, PAGES, paged(PAGE)),
    }
    return KVCacheDescription(
        family="deepseek_v4",
        page_size=PAGE,
        buffers={
            role: tuple(allocate(rows, row_bytes) for _ in range(count))
            for role, (count, rows, row_bytes) in shapes.items()
            if count
        },
        layers=layers,
        logical_pools=(
            LogicalPool(name="kv", page_size=PAGE),
            LogicalPool(name="swa", page_size=PAGE, window=128),
        ),
        facts={
            "kv_format": "fp8_e4m3fn_ue8m0",
            "indexer_format": "fp4_split" if split else "fp8_fused",
            "state_ring_rows": RING,
            "state_format": "fp32",
            "swa_page_size": PAGE,
            "swa_physical_page_size": PAGE,
            "unified_kv": 0,
            "hisparse": 0,
            "c128_state_persistent": 0,
        },
    )


def describe_shared(allocate: Allocate, *, start: int = 0, end: int = 7) -> KVCacheDescription:
    """Describe layers [start, end) of which some read what others keep: two of ratio 2, and one of ratio 1."""
    layers = stage_layers(SHARED_RATIOS, start=start, end=end, kv_source_layers=SOURCES)
    kept = [layer for layer in SOURCES if start <= layer < end]
    own = describe(allocate, end=1, split=False)
    sparse = describe(allocate, start=1, end=2, split=False).buffers if end == 7 else {}
    rows_in_a_page = {1: PAGE // 64, 2: PAGE // 2 // 64}
    shared = {
        f"c{ratio}_{part}": tuple(
            allocate(rows, size) for layer in kept if SHARED_RATIOS[layer] == ratio
        )
        for ratio, in_a_page in rows_in_a_page.items()
        for part, rows, size in (
            ("kv", PAGES, paged(PAGE // ratio)),
            ("indexer", PAGES * in_a_page + SPARE_ROWS, 64 * 68),
        )
    }
    windows = tuple(allocate(PAGES, paged(PAGE)) for _ in layers)
    return replace(
        own,
        buffers={
            role: spans for role, spans in {**sparse, "swa_kv": windows, **shared}.items() if spans
        },
        layers=layers,
        facts={**own.facts, "shared_indexer_format": "fp4_fused_rne_rows64"},
    )


def example(name: str, *, drafts: int = 0, split: bool = False) -> CacheExample:
    sparse: Sequence[int] = (1, 3)
    in_windows = ("swa_kv", "c4_state", "c4_indexer_state", "draft_swa_kv")
    of_ratio_4 = ("c4_kv", "c4_indexer", "c4_indexer_scale", "c4_state", "c4_indexer_state")
    stages: list[Describe] = [
        partial(describe, end=2, split=split),
        partial(describe, start=2, split=split),
    ]
    return CacheExample(
        name=name,
        describe=partial(describe, drafts=drafts, split=split),
        pages=PAGES,
        pools=dict.fromkeys(in_windows, "swa"),
        role_layers=dict.fromkeys(of_ratio_4, sparse) | {"c128_kv": (2,)},
        stages=stages,
    )


@pytest.mark.supports(engine="any", level="kit", of="cache")
class TestDeepSeekV4(ModelPluginTests):
    plugin = kvlinker_deepseek_v4
    caches = (
        example("fp8_indexer"),
        example("fp4_indexer", split=True),
        example("drafts", drafts=2),
        CacheExample(
            name="shared_ratios",
            describe=describe_shared,
            pages=PAGES,
            pools=dict.fromkeys(("swa_kv", "c4_state", "c4_indexer_state"), "swa"),
            role_layers={
                "c1_kv": (3,),
                "c1_indexer": (3,),
                "c2_kv": (1, 5),
                "c2_indexer": (1, 5),
                **dict.fromkeys(("c4_kv", "c4_indexer", "c4_state", "c4_indexer_state"), (6,)),
            },
            stages=[
                partial(describe_shared, end=3),
                partial(describe_shared, start=3, end=5),
                partial(describe_shared, start=5),
            ],
        ),
    )
