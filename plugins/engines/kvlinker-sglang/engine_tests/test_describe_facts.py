"""What descriptions say of real pools: whose bytes they are, whose slots, and where they lie now."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from described_pools import DESCRIBED
from pool_groups import group_of
from real_pools import heads_pool, latent_pool, publish_configuration, sparse_pool, v4_pool
from real_pools_scaled import fp4_heads_pool
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.runtime_context import get_parallel
from transformers import PretrainedConfig

import kvlinker_sglang
from kvlinker.description import DescribeRequest, IndexerKind, KVCacheDescription, RankAxis
from kvlinker.errors import StalePoolError
from kvlinker.testing.engines import PoolExample
from kvlinker_sglang.describe.sparse import shared_index_layers

BY_NAME = {example.name: example for example in DESCRIBED}


def describe(pool: object, page_size: int) -> KVCacheDescription:
    request = DescribeRequest(page_size=page_size)
    description = kvlinker_sglang.describe_kv_cache("sglang", pool, request)
    assert description is not None
    return description


# ---- ranks ------------------------------------------------------------------------------------


def test_g6_k3_heads_are_sharded_over_the_ranks() -> None:
    pool = heads_pool()

    with get_parallel().override(tp_size=2, attn_tp_size=2, attn_tp_rank=1, moe_tp_size=2):
        description = describe(pool, 16)

    axis = RankAxis(name="tp", rank=1, size=2)
    assert description.replication.axes_of("k") == description.replication.axes_of("v") == (axis,)
    assert description.replication.is_writer("k")


@pytest.mark.parametrize(
    ("make", "page_size"), [(latent_pool, 16), (sparse_pool, 64), (v4_pool, 256)]
)
def test_g6_k3_latents_are_every_ranks_and_the_first_one_writes_them(
    make: Callable[[], object], page_size: int
) -> None:
    pool = make()

    replications = []
    for rank in (0, 1):
        with get_parallel().override(tp_size=2, attn_tp_size=2, attn_tp_rank=rank, moe_tp_size=2):
            replications.append(describe(pool, page_size).replication)

    roles = describe(pool, page_size).buffers
    for role in roles:
        assert all(replication.is_replicated(role) for replication in replications)
        assert [replication.is_writer(role) for replication in replications] == [True, False]


def test_one_rank_alone_has_no_axes() -> None:
    assert describe(heads_pool(), 16).replication.axes == ()


@pytest.mark.parametrize("make", [heads_pool, latent_pool])
def test_k3_a_pipeline_stage_is_named_by_its_layers(make: Callable[..., object]) -> None:
    assert describe(make(start_layer=7), 16).layer_range == (7, 10)


def test_k3_a_stage_of_deepseek_v4_has_the_layers_that_it_keeps() -> None:
    description = describe(v4_pool((0, 4, 128, 4, 0), start=1, end=4), 256)

    assert description.layer_range == (1, 4)
    assert [facts.compress_ratio for facts in description.layers] == [4, 128, 4]


# ---- layers -----------------------------------------------------------------------------------


def test_layers_without_an_index_of_their_own_are_found_in_the_models_configuration() -> None:
    publish_configuration()
    config = PretrainedConfig.from_dict(
        {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "index_topk": 2048,
            "index_head_dim": 128,
            "indexer_types": ["full", "full", "shared", "full", "shared", "shared"],
        }
    )

    assert shared_index_layers(config, start=0, end=6) == (2, 4, 5)
    assert shared_index_layers(config, start=3, end=5) == (4,)


@pytest.mark.parametrize("name", ["dsa-absent_indexer", "dsa-dead_indexer"])
def test_a_layer_with_anothers_index_is_stated_as_such_and_left_out(name: str) -> None:
    made = group_of(BY_NAME[name])

    kinds = [facts.indexer for facts in made.description.layers]
    assert kinds == [IndexerKind.OWN, IndexerKind.SHARED, IndexerKind.OWN]
    assert sorted(made.group.entry_map["indexer"].layer_mapping) == [0, 2]


# ---- slots ------------------------------------------------------------------------------------


def test_windows_are_described_under_the_slots_that_the_tree_hands_over() -> None:
    made = group_of(BY_NAME["swa"])
    allocator = SWATokenToKVPoolAllocator(
        size=256,
        size_swa=128,
        page_size=16,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache=made.target,
        need_sort=False,
    )
    full = torch.arange(48, 64)
    swa = allocator.swa_attn_allocator.alloc(16)
    allocator.set_full_to_swa_mapping(full, swa)

    # The tree keeps a node's window slots as this translates them, and hands them over in transfers for `swa`.
    translated = allocator.translate_loc_from_full_to_swa(full)
    pages = made.group.entry_map["swa"].translate_indices(translated)

    assert pages.tolist() == swa.tolist() != full.tolist()
    assert made.description.index_maps == {}


def test_slots_that_fill_no_page_have_no_row_of_scales() -> None:
    example = PoolExample(
        name="tail", make=partial(fp4_heads_pool, more_slots=5), page_size=16, excused={}
    )

    made = group_of(example)

    # 16 pages, and the one that SGLang keeps for padding; scales of 2 heads of 64 values each.
    (span, *_) = made.description.buffers["k_scale"]
    assert (span.rows, span.row_bytes) == (17, 16 * 2 * 64 // 16)
    assert span.base_ptr == made.target.k_scale_buffer[0].data_ptr()  # type: ignore[attr-defined]  # a real pool
    assert [span.rows for span in made.description.buffers["k"]] == [17 * 16 + 5] * 3


# ---- life time --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [example.name for example in DESCRIBED])
def test_c10_a_group_over_the_pools_own_buffers_verifies(name: str) -> None:
    made = group_of(BY_NAME[name])

    made.group.verify()

    assert made.group.regions


def test_w22_a_buffer_that_the_pool_replaced_makes_the_group_stale() -> None:
    made = group_of(BY_NAME["mha"])
    made.target.k_buffer[1] = torch.zeros_like(made.target.k_buffer[1])  # type: ignore[attr-defined]  # a real pool

    with pytest.raises(StalePoolError, match=r"k\[1\]"):
        made.group.verify()


def test_w23_buffers_that_the_pool_dropped_make_the_group_stale() -> None:
    made = group_of(BY_NAME["mla"])
    del made.target.kv_buffer  # type: ignore[attr-defined]  # a real pool, which SGLang clears so

    with pytest.raises(StalePoolError, match=r"latent\[0\].* to nowhere"):
        made.group.verify()


def test_w22_a_state_that_the_pool_replaced_makes_the_group_stale() -> None:
    made = group_of(BY_NAME["v4"])
    rows = made.target.compress_state_pools[1].kv_score_buffer  # type: ignore[attr-defined]  # a real pool
    rows.kv_score = rows.kv_score.clone()

    with pytest.raises(StalePoolError, match=r"c4_state\[0\]"):
        made.group.verify()
