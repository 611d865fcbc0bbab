"""Caches of hybrids keep what every model plugin promises."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

import kvlinker_swa
from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.spans import BufferSpan
from kvlinker.testing.cache_examples import Allocate
from kvlinker.testing.models import CacheExample, ModelPluginTests

PAGE, PAGES = 16, 6
KINDS = ("sliding", "sliding", "attention", "sliding", "attention")


def describe(
    allocate: Allocate,
    *,
    start: int = 0,
    end: int = len(KINDS),
    drafts: tuple[int, int] = (0, 0),
    head_major: bool = False,
    scaled: bool = False,
) -> KVCacheDescription:
    """Describe layers [start, end), with K rows of 32 B and V rows of 48 B, of windows 16 B and 24 B."""
    kinds = KINDS[start:end]
    counts = {
        "": kinds.count("attention"),
        "draft_": drafts[0],
        "swa_": kinds.count("sliding"),
        "draft_swa_": drafts[1],
    }
    buffers: dict[str, tuple[BufferSpan, ...]] = {}
    for prefix, count in counts.items():
        for role, size in (("k", 32), ("v", 48)):
            slot = size // 2 if "swa" in prefix else size
            rows = (PAGES, slot * PAGE) if head_major else (PAGES * PAGE, slot)
            buffers[f"{prefix}{role}"] = tuple(allocate(*rows) for _ in range(count))
            scales = count if scaled else 0
            buffers[f"{prefix}{role}_scale"] = tuple(
                allocate(PAGES, 4 * PAGE) for _ in range(scales)
            )
    return KVCacheDescription(
        family="swa",
        page_size=PAGE,
        buffers={role: spans for role, spans in buffers.items() if spans},
        layers=tuple(
            LayerFacts(layer=i, global_layer=start + i, kind=kind) for i, kind in enumerate(kinds)
        ),
        logical_pools=(
            LogicalPool(name="kv", page_size=PAGE),
            LogicalPool(name="swa", page_size=PAGE, window=40),
        ),
        facts={
            "kv_layout": "head_major" if head_major else "token_major",
            "kv_format": "fp4_e2m1_block16_e8m0" if scaled else "bf16",
            "kv_scaled": int(scaled),
            "swa_kv_format": "mxfp8_e4m3fn_block32_interleaved" if scaled else "fp8_e5m2",
            "attention_chunk_size": 0,
        },
    )


def layers_of(*kinds: str) -> Sequence[int]:
    return [layer for layer, kind in enumerate(KINDS) if kind in kinds]


def example(
    name: str,
    *,
    drafts: tuple[int, int] = (0, 0),
    head_major: bool = False,
    scaled: bool = False,
) -> CacheExample:
    """Return a cache of five layers, the stages of which have windows alone, and both kinds."""
    in_windows = [
        f"{draft}swa_{value}{scale}"
        for draft in ("", "draft_")
        for value in "kv"
        for scale in ("", "_scale")
    ]
    own = {"attention": ("k", "v"), "sliding": ("swa_k", "swa_v")}
    staged = partial(describe, head_major=head_major, scaled=scaled)
    return CacheExample(
        name=name,
        describe=partial(staged, drafts=drafts),
        pages=PAGES,
        pools=dict.fromkeys(in_windows, "swa"),
        role_layers={
            f"{role}{scale}": layers_of(kind)
            for kind, roles in own.items()
            for role in roles
            for scale in ("", "_scale")
        },
        stages=[
            partial(staged, start=0, end=2),
            partial(staged, start=2, end=4),
            partial(staged, start=4, end=5),
        ],
    )


@pytest.mark.supports(engine="any", level="kit", of="cache")
class TestSWA(ModelPluginTests):
    plugin = kvlinker_swa
    caches = (
        example("token_major"),
        example("head_major", head_major=True),
        example("scaled", scaled=True),
        example("full_drafts", drafts=(2, 0)),
        example("window_drafts", drafts=(0, 2)),
        example("all_at_once", drafts=(2, 2), head_major=True, scaled=True),
    )
