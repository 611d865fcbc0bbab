"""MiniMax M3's pools of the real SGLang, small and on the CPU, and examples of those that are described."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from real_pools import heads_pool, publish_configuration
from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from sglang.srt.mem_cache.minimax_m3_nvfp4_pool import MiniMaxM3Nvfp4KVPool

from kvlinker.testing.engines import PoolExample

__all__ = ["MINIMAX", "minimax_pool", "nvfp4_pool"]


def minimax_pool(
    *,
    dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype | None = None,
    dense: Sequence[int] = (0,),
    sparse: Sequence[int] = (1, 2, 3),
    with_values: Sequence[int] = (2,),
    start: int = 0,
    end: int = 4,
    page_size: int = 16,
    pages: int = 16,
    head_major: bool = False,
    hisparse: bool = False,
) -> object:
    """Return a `MiniMaxSparseKVPool`.

    Args:
        dtype: of K and V.
        index_dtype: of the index keys; as K and V by default.
        dense: global layers without an index.
        sparse: global layers with one.
        with_values: those of them whose index attends to values.
        start: first global layer of the pipeline stage.
        end: global layer behind its last.
        page_size: slots in a page.
        pages: that requests may use.
        head_major: keep heads before slots.
        hisparse: keep K and V of the layers with an index where HiSparse wants them.
    """
    publish_configuration()

    with envs.SGLANG_USE_HND_KVCACHE.override(head_major):
        return MiniMaxSparseKVPool(
            size=pages * page_size,
            page_size=page_size,
            dtype=dtype,
            head_num=2,
            head_dim=64,
            idx_head_dim=32,
            dense_layer_ids=list(dense),
            sparse_layer_ids=list(sparse),
            device="cpu",
            disable_value_sparse_layer_ids=[layer for layer in sparse if layer not in with_values],
            index_dtype=index_dtype,
            start_layer=start,
            end_layer=end,
            enable_hisparse=hisparse,
        )


def nvfp4_pool(*, layers: int = 3, start: int = 0, pages: int = 12) -> object:
    """Return a `MiniMaxM3Nvfp4KVPool` in its pages of 128 slots, of some pipeline stage."""
    publish_configuration()

    return MiniMaxM3Nvfp4KVPool(
        size=pages * 128,
        page_size=128,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=128,
        idx_head_dim=128,
        dense_layer_ids=[],
        sparse_layer_ids=list(range(start + layers)),
        disable_value_sparse_layer_ids=list(range(start + layers)),
        device="cpu",
        index_dtype=torch.bfloat16,
        start_layer=start,
        end_layer=start + layers,
    )


_ADDRESSES = {"*data_*": "addresses and rows of the buffers, which every process makes for itself"}
_UNIT_SCALE = {"*global_scale": "one: nvfp4 values of this pool have scales of their blocks alone"}


def _example(
    name: str,
    make: Callable[[], object],
    *,
    page_size: int = 16,
    excused: Mapping[str, str] = _ADDRESSES,
    draft: Callable[[], object] | None = None,
) -> PoolExample:
    return PoolExample(
        name=name,
        make=make,
        page_size=page_size,
        excused=excused,
        extras=lambda: {} if draft is None else {"sidecar_draft_device_pools": (draft(),)},
    )


_FP8 = torch.float8_e4m3fn

MINIMAX = (
    _example("minimax", minimax_pool),
    _example("minimax-keys_alone", partial(minimax_pool, with_values=())),
    _example("minimax-values_everywhere", partial(minimax_pool, with_values=(1, 2, 3))),
    _example("minimax-fp8", partial(minimax_pool, dtype=_FP8, index_dtype=torch.bfloat16)),
    _example("minimax-fp8_index", partial(minimax_pool, dtype=_FP8)),
    _example("minimax-second_stage", partial(minimax_pool, start=2)),
    _example("minimax-no_index", partial(minimax_pool, end=1)),
    _example("minimax-draft", minimax_pool, draft=partial(heads_pool, layers=1, heads=4)),
    _example("minimax-nvfp4", nvfp4_pool, page_size=128, excused=_UNIT_SCALE),
    _example(
        "minimax-nvfp4_second_stage",
        partial(nvfp4_pool, start=2),
        page_size=128,
        excused=_UNIT_SCALE,
    ),
    _example(
        "minimax-nvfp4_draft",
        nvfp4_pool,
        page_size=128,
        excused=_UNIT_SCALE | _ADDRESSES,
        draft=partial(heads_pool, layers=1, page_size=128, pages=12),
    ),
)
"""By name of the test cases."""
