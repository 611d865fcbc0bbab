"""Compress ratios 1 and 2 of DeepSeek V4.1: some layers keep KV and index keys, and later ones read theirs.

Where SGLang replays the windows of late layers (--enable-decoder-swa-bounded-replay), it computes the last 128 tokens
of every prompt anew and looks at no windows of those layers before them: in their stored windows nobody reads. Servers
that do and servers that do not have keys of their own, since the argument is a part of the namespace.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.errors import UnsupportedKVCacheError
from kvlinker_sglang.describe.buffers import HeldTensors
from kvlinker_sglang.describe.classes import class_name
from kvlinker_sglang.describe.deepseek_v4_parts import (
    V4Layer,
    V4Pool,
    indexer_pool_of,
    indexes_of,
    state_pool_of,
)

__all__ = [
    "SHARED_INDEXER_FORMAT",
    "SHARED_RATIOS",
    "check_shared",
    "shared_indexes_of",
    "sources_of",
]

SHARED_RATIOS = (1, 2)
SHARED_INDEXER_FORMAT = "fp4_fused_rne_rows64"
"""Two values a byte, rounded to the nearest even one; in a row the values of 64 keys, and then their scales."""
_KEYS_IN_A_ROW = 64


def sources_of(pool: V4Pool, ratio: int) -> Sequence[int]:
    """Return the global layers that keep KV of a ratio, in the order of their buffers."""
    return pool.sources_by_ratio.get(ratio, ())


def check_shared(pool: V4Pool, stage: Sequence[tuple[int, V4Layer]]) -> None:
    """Refuse layers of these ratios that keep more than KV and index keys, or in another order.

    What is open in a pair of ratio 2 belongs to a request; a page's end is even, and nothing is open there.

    Args:
        pool: whose layers.
        stage: its layers, with their global numbers.

    Raises:
        UnsupportedKVCacheError: a layer's buffer is not where it is looked for, or a state outlives a request.
    """
    for number, layer in stage:
        ratio = layer.compress_ratio
        if ratio not in SHARED_RATIOS:
            continue
        before = [source for source in sources_of(pool, ratio) if source <= number]
        if not before or layer.compress_layer_id != len(before) - 1:
            msg = (
                f"{class_name(pool)} looks for the KV of layer {number} of ratio {ratio} at position "
                f"{layer.compress_layer_id}, and layers {list(before)} keep some before it; use a version of SGLang "
                f"that kvlinker-sglang was tested with"
            )
            raise UnsupportedKVCacheError(msg)
        _check_states(pool, number)


def _check_states(pool: V4Pool, number: int) -> None:
    held, of_index = (
        pool.compress_state_pools[number],
        pool.indexer_compress_state_pools[number],
    )
    if of_index is not None or not (held is None or state_pool_of(held, number).request_scoped):
        msg = (
            f"{class_name(pool)} keeps a state of layer {number} that outlives a request, and described are ratios "
            f"{SHARED_RATIOS} without; use a version of SGLang that kvlinker-sglang was tested with"
        )
        raise UnsupportedKVCacheError(msg)


def shared_indexes_of(pool: V4Pool, ratio: int) -> HeldTensors:
    """Return what reads the index keys of a ratio, some rows for each page of slots.

    Raises:
        UnsupportedKVCacheError: they are of another class, or kept in another way.
    """
    part = indexer_pool_of(pool, ratio)
    if (
        part.index_k_with_scale_buffer is None
        or part.page_size != _KEYS_IN_A_ROW
        or pool.page_size % (ratio * _KEYS_IN_A_ROW)
        or not part.use_fp4_indexer
        or not part.index_k_rne
        or part.index_k_page8
        or part.uses_aiter_fp4_layout
    ):
        msg = (
            f"the index keys of ratio {ratio} of a {class_name(pool)} are in rows of {part.page_size} for pages of "
            f"{pool.page_size} slots, or not of CUDA's fp4 layout; described are rows of {_KEYS_IN_A_ROW}, rounded to "
            f"even; run on CUDA, in pages of 256 slots"
        )
        raise UnsupportedKVCacheError(msg)
    return indexes_of(part)
