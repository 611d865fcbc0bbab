"""DSA caches keep what every model plugin promises."""

from __future__ import annotations

from collections.abc import Collection

import pytest

import kvlinker_dsa
from kvlinker.description import Fact, IndexerKind, KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.spans import BufferSpan
from kvlinker.testing.cache_examples import Allocate
from kvlinker.testing.models import CacheExample, ModelPluginTests

PAGE, PAGES, LAYERS = 16, 6, 4
OWN, SHARED = IndexerKind.OWN, IndexerKind.SHARED


def example(
    name: str,
    *,
    owners: Collection[int] = range(LAYERS),
    dead: bool = False,
    drafts: int = 0,
    kpool: int = 1,
) -> CacheExample:
    """Return a cache in bf16; layers that are no owners keep no index buffer, or a dead one."""
    index_row = PAGE // kpool * 132
    folded: dict[str, Fact] = {} if kpool == 1 else {"index_kpool": kpool}

    def describe(allocate: Allocate) -> KVCacheDescription:
        def kv(count: int) -> tuple[BufferSpan, ...]:
            return tuple(allocate(PAGES * PAGE, 1152) for _ in range(count))

        def index(layer: int) -> BufferSpan:
            return allocate(PAGES if dead or layer in owners else 0, index_row)

        buffers = {"kv": kv(LAYERS), "index_k": tuple(map(index, range(LAYERS)))}
        if drafts:
            indexes = tuple(allocate(PAGES, index_row) for _ in range(drafts))
            buffers |= {"draft_kv": kv(drafts), "draft_index_k": indexes}
        return KVCacheDescription(
            family="dsa",
            page_size=PAGE,
            buffers=buffers,
            layers=tuple(
                LayerFacts(layer=i, global_layer=i, indexer=OWN if i in owners else SHARED)
                for i in range(LAYERS)
            ),
            logical_pools=(LogicalPool(name="kv", page_size=PAGE),),
            facts={"kv_format": "bf16", "index_format": "fp8_e4m3fn_fp32_scale", **folded},
        )

    unread = {f"index_k[{i}]" for i in range(LAYERS) if dead and i not in owners}
    return CacheExample(name=name, describe=describe, pages=PAGES, omitted=frozenset(unread))


@pytest.mark.supports(engine="any", level="kit", of="cache")
class TestDSA(ModelPluginTests):
    plugin = kvlinker_dsa
    caches = (
        example("every_layer_owns_an_index"),
        example("shared_indexes", owners=[0, 3]),
        example("dead_indexes", owners=[0, 2], dead=True),
        example("drafts", drafts=2),
        example("folded", kpool=4, drafts=1),
        example("drafts_over_shared_indexes", owners=[1], drafts=3),
    )
