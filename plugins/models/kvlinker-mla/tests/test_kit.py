"""MLA caches keep what every model plugin promises."""

from __future__ import annotations

import pytest

import kvlinker_mla
from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.spans import BufferSpan
from kvlinker.testing.cache_examples import Allocate
from kvlinker.testing.models import CacheExample, ModelPluginTests

PAGE, PAGES, LAYERS = 16, 6, 3


def example(
    name: str, row_bytes: int, *, drafts: int = 0, scale_bytes: int | None = None
) -> CacheExample:
    """Return a cache whose name begins with its format; a slot has so many bytes, and scales elsewhere."""

    def describe(allocate: Allocate) -> KVCacheDescription:
        buffers: dict[str, tuple[BufferSpan, ...]] = {}
        for prefix, count in (("", LAYERS), ("draft_", drafts)):
            latents = tuple(allocate(PAGES * PAGE, row_bytes) for _ in range(count))
            buffers[f"{prefix}latent"] = latents
            if scale_bytes is not None:
                scales = tuple(allocate(PAGES, PAGE * scale_bytes) for _ in range(count))
                buffers[f"{prefix}latent_scale"] = scales
        return KVCacheDescription(
            family="mla",
            page_size=PAGE,
            buffers={role: spans for role, spans in buffers.items() if spans},
            layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(LAYERS)),
            logical_pools=(LogicalPool(name="kv", page_size=PAGE),),
            facts={"kv_format": name.partition("-")[0]},
        )

    return CacheExample(name=name, describe=describe, pages=PAGES)


@pytest.mark.supports(engine="any", level="kit", of="cache")
class TestMLA(ModelPluginTests):
    plugin = kvlinker_mla
    caches = (
        example("bf16", 1152),
        example("fp8_e4m3fn", 576),
        example("fp8_packed_656", 656),
        example("bf16-drafts", 1152, drafts=2),
        example("fp4_e2m1_block16_e8m0", 288, scale_bytes=36),
        example("fp4_e2m1_block16_e8m0-drafts", 288, scale_bytes=36, drafts=2),
    )
