"""Writes the KV caches of well-known models as descriptions that `kvlinker explain` reads.

Geometries come from each model's config.json; row formats are those of the engine that serves it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from kvlinker.description import (
    Fact,
    IndexerKind,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
    PoolKind,
)
from kvlinker.description_json import description_to_json
from kvlinker.spans import BufferSpan, MemoryKind, MemoryRegion

PAGES = 1024
"""Pages of the described pools; what a page costs does not depend on it."""
_FAR_APART = 1 << 36


class Addresses:
    """Made-up device addresses: a description in JSON form keeps none."""

    def __init__(self) -> None:
        self._starts = count(_FAR_APART, _FAR_APART)

    def spans(self, number: int, rows: int, row_bytes: int) -> tuple[BufferSpan, ...]:
        """Return spans of dense rows, each in an allocation of its own."""
        return tuple(self._span(rows, row_bytes) for _ in range(number))

    def _span(self, rows: int, row_bytes: int) -> BufferSpan:
        if not rows:
            return BufferSpan(base_ptr=0, rows=0, row_bytes=row_bytes, row_stride=row_bytes)
        base, size = next(self._starts), rows * row_bytes
        region = MemoryRegion(
            base_ptr=base, size_bytes=size, device="cuda:0", kind=MemoryKind.DEVICE
        )
        return BufferSpan(
            base_ptr=base, rows=rows, row_bytes=row_bytes, row_stride=row_bytes, region=region
        )


def describe(
    family: str,
    page_size: int,
    layers: Sequence[LayerFacts],
    buffers: Mapping[str, tuple[BufferSpan, ...]],
    facts: Mapping[str, Fact],
    *more_pools: LogicalPool,
) -> KVCacheDescription:
    """Return a description with the logical pool `kv` and the given ones."""
    return KVCacheDescription(
        family=family,
        page_size=page_size,
        buffers=buffers,
        layers=tuple(layers),
        logical_pools=(LogicalPool(name="kv", page_size=page_size), *more_pools),
        facts=facts,
    )


def plain_layers(number: int) -> list[LayerFacts]:
    """Return layers of plain attention."""
    return [LayerFacts(layer=layer, global_layer=layer) for layer in range(number)]


def grouped_query(layers: int, heads: int, head_dim: int) -> KVCacheDescription:
    """Return a GQA cache in bf16, pages of 64 tokens."""
    addresses, rows, row_bytes = Addresses(), PAGES * 64, heads * head_dim * 2
    buffers = {role: addresses.spans(layers, rows, row_bytes) for role in ("k", "v")}
    facts: dict[str, Fact] = {"kv_layout": "token_major", "kv_format": "bf16", "kv_scaled": 0}
    return describe("mha", 64, plain_layers(layers), buffers, facts)


def hybrid(kinds: Sequence[str], heads: int, head_dim: int, window: int) -> KVCacheDescription:
    """Return a cache of full and sliding-window layers in bf16, pages of 64 tokens."""
    addresses, rows, row_bytes = Addresses(), PAGES * 64, heads * head_dim * 2
    layers = [
        LayerFacts(layer=layer, global_layer=layer, kind=kind) for layer, kind in enumerate(kinds)
    ]
    buffers = {
        f"{prefix}{role}": addresses.spans(list(kinds).count(kind), rows, row_bytes)
        for prefix, kind in (("", "attention"), ("swa_", "sliding"))
        for role in ("k", "v")
    }
    facts: dict[str, Fact] = {"kv_layout": "token_major", "kv_format": "bf16", "kv_scaled": 0}
    windows = LogicalPool(name="swa", page_size=64, window=window)
    return describe("swa", 64, layers, buffers, facts, windows)


def gated_delta_net(kinds: Sequence[str], heads: int, head_dim: int) -> KVCacheDescription:
    """Return a cache of GQA layers in bf16, pages of 64 tokens, and layers of Gated DeltaNet.

    A state has 32 heads of 128 values and 128 keys, and windows of three tokens of 8192 channels.
    """
    addresses, slots = Addresses(), 256
    pages, states = list(kinds).count("attention"), list(kinds).count("mamba")
    layers = [
        LayerFacts(layer=layer, global_layer=layer, kind=kind) for layer, kind in enumerate(kinds)
    ]
    buffers = {
        role: addresses.spans(pages, PAGES * 64, heads * head_dim * 2) for role in ("k", "v")
    }
    buffers["ssm_state"] = addresses.spans(states, slots, 32 * 128 * 128 * 4)
    buffers["conv_state_0"] = addresses.spans(states, slots, 8192 * 3 * 2)
    facts: dict[str, Fact] = {
        "kv_family": "mha",
        "kv_layout": "token_major",
        "kv_format": "bf16",
        "kv_scaled": 0,
        "ssm_format": "fp32",
        "ssm_layout": "value_major",
        "conv_states": 1,
        "conv_format": "bf16",
        "conv_layout": "channel_major",
        "conv_window": 3,
    }
    slot_pool = LogicalPool(name="mamba", page_size=1, kind=PoolKind.SLOT)
    return describe("mamba", 64, layers, buffers, facts, slot_pool)


def latent(layers: int) -> KVCacheDescription:
    """Return an MLA cache in bf16: latent 512 and rope 64, pages of 64 tokens."""
    buffers = {"latent": Addresses().spans(layers, PAGES * 64, 576 * 2)}
    return describe("mla", 64, plain_layers(layers), buffers, {"kv_format": "bf16"})


def sparse(layers: int, owners: frozenset[int]) -> KVCacheDescription:
    """Return a DSA cache in bf16: an MLA latent, and index keys of 128 in the layers that own some."""
    addresses = Addresses()
    facts = [
        LayerFacts(
            layer=layer,
            global_layer=layer,
            indexer=IndexerKind.OWN if layer in owners else IndexerKind.SHARED,
        )
        for layer in range(layers)
    ]
    index = [
        addresses.spans(1, PAGES if layer in owners else 0, 64 * 132)[0] for layer in range(layers)
    ]
    buffers = {"kv": addresses.spans(layers, PAGES * 64, 576 * 2), "index_k": tuple(index)}
    formats: dict[str, Fact] = {"kv_format": "bf16", "index_format": "fp8_e4m3fn_fp32_scale"}
    return describe("dsa", 64, facts, buffers, formats)


def deepseek_v4(ratios: Sequence[int]) -> KVCacheDescription:
    """Return a DeepSeek V4 cache in fp8, pages of 256 tokens, states in rings of 8 rows."""
    addresses, ring = Addresses(), 8
    c4, c128 = list(ratios).count(4), list(ratios).count(128)
    layers = [
        LayerFacts(
            layer=layer,
            global_layer=layer,
            compress_ratio=ratio,
            indexer=IndexerKind.OWN if ratio == 4 else IndexerKind.NONE,  # noqa: PLR2004  # the ratio's name is its value
        )
        for layer, ratio in enumerate(ratios)
    ]
    buffers = {
        "swa_kv": addresses.spans(len(layers), PAGES, 149_760),
        "c4_kv": addresses.spans(c4, PAGES, 37_440),
        "c4_indexer": addresses.spans(c4, PAGES, 64 * 132),
        "c4_state": addresses.spans(c4, PAGES * ring, 4 * 512 * 4),
        "c4_indexer_state": addresses.spans(c4, PAGES * ring, 4 * 128 * 4),
        "c128_kv": addresses.spans(c128, PAGES, 1_728),
    }
    facts: dict[str, Fact] = {
        "kv_format": "fp8_e4m3fn_ue8m0",
        "indexer_format": "fp8_fused",
        "state_ring_rows": ring,
        "state_format": "fp32",
        "swa_page_size": 256,
        "swa_physical_page_size": 256,
        "unified_kv": 0,
        "hisparse": 0,
        "c128_state_persistent": 0,
    }
    window = LogicalPool(name="swa", page_size=256, window=128)
    return describe("deepseek_v4", 256, layers, buffers, facts, window)


def descriptions() -> dict[str, KVCacheDescription]:
    """Return every example by its file's name."""
    every_fourth = frozenset({0, 1, *range(2, 78, 4)})
    return {
        "llama-3.1-8b": grouped_query(32, heads=8, head_dim=128),
        "gpt-oss-120b": hybrid(["sliding", "attention"] * 18, heads=8, head_dim=64, window=128),
        "qwen3-next-80b-a3b": gated_delta_net(
            ["mamba", "mamba", "mamba", "attention"] * 12, heads=2, head_dim=256
        ),
        "deepseek-v3": latent(61),
        "deepseek-v3.2": sparse(61, frozenset(range(61))),
        "glm-5.2": sparse(78, every_fourth),
        "deepseek-v4-flash": deepseek_v4([0, 0, *[4, 128] * 20, 4]),
        "deepseek-v4-pro": deepseek_v4([128, 128, *[4, 128] * 29, 4]),
    }


def main(folder: Path) -> None:
    """Write every example into a folder."""
    for name, description in descriptions().items():
        text = description_to_json(description)
        (folder / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
