"""Ratios 1 and 2 of DeepSeek V4.1: what layers share is described once, and nothing of a page is open at its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from pool_groups import group_of
from real_pools import V4_SHARED, v4_pool
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend
from sglang.srt.server_args import ServerArgs

import kvlinker_sglang
from kvlinker.description import DescribeRequest, IndexerKind, KVCacheDescription
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.testing.engines import PoolExample
from kvlinker_sglang.server_arguments import ServerArgument, value_arguments

Refused = Callable[..., AbstractContextManager[None]]
PAGE, REQUEST, SOURCE, READER = 256, 1, 1, 2
"""SOURCE and READER are layers of ratio 2."""
shared_pool = partial(v4_pool, V4_SHARED[0], sources=V4_SHARED[1])


def describe(pool: object) -> KVCacheDescription:
    found = kvlinker_sglang.describe_kv_cache("sglang", pool, DescribeRequest(page_size=PAGE))
    assert found is not None
    return found


# ---- what is described ------------------------------------------------------------------------


def test_a_layer_reads_the_buffer_that_is_described_for_the_one_that_keeps_it() -> None:
    pool = shared_pool()

    description = describe(pool)

    kinds = [facts.indexer for facts in description.layers]
    own, shared, none = IndexerKind.OWN, IndexerKind.SHARED, IndexerKind.NONE
    assert kinds == [none, own, shared, own, shared, own, own]
    read = [
        pool.get_extra_key_buffer(layer).data_ptr()  # type: ignore[attr-defined]  # a real pool
        for layer in (SOURCE, READER, 3, 4, 5)
    ]
    of_two = [span.base_ptr for span in description.buffers["c2_kv"]]
    (of_one,) = (span.base_ptr for span in description.buffers["c1_kv"])
    assert read == [of_two[0], of_two[0], of_one, of_one, of_two[1]]


def test_a_page_has_the_bytes_of_its_entries_and_index_keys() -> None:
    example = PoolExample(name="shared", make=shared_pool, page_size=PAGE)

    assert group_of(example).page_bytes == {
        "swa": 7 * 149_760,
        "deepseek_v4_c4": 37_440,
        "deepseek_v4_c4_indexer": 8_448,
        "deepseek_v4_c1": 149_760,
        "deepseek_v4_c1_indexer": 256 * (64 + 4),
        "deepseek_v4_c2": 2 * 74_880,
        "deepseek_v4_c2_indexer": 2 * 128 * (64 + 4),
        "deepseek_v4_c4_state": 65_536,
        "deepseek_v4_c4_indexer_state": 16_384,
    }


# ---- half pairs -------------------------------------------------------------------------------


def partners(start: int, count: int) -> torch.Tensor:
    """Let SGLang find with what each token of [start, start + count) makes a pair, in a process that knows no other.

    A token's value is its position: float32 [count].
    """
    pool = shared_pool()
    ring = pool.compress_state_pools[SOURCE].kv_score_buffer.kv_score  # type: ignore[attr-defined]  # a real pool
    ring.fill_(float("nan"))
    positions = torch.arange(start, start + count)
    values = positions.float()[:, None].expand(-1, ring.shape[1] // 2).contiguous()
    found: torch.Tensor
    found, _ = DeepseekV4AttnBackend._low_ratio_pair_partners(  # noqa: SLF001  # where SGLang reads its half pairs
        SimpleNamespace(token_to_kv_pool=pool),
        layer_id=SOURCE,
        kv=values,
        score=values,
        req=torch.full((count,), REQUEST),
        pos=positions,
        pad=torch.zeros(count, dtype=torch.bool),
    )
    return found[:, 0]


@pytest.mark.parametrize("count", [2, 7, PAGE])
def test_behind_a_page_every_pair_is_of_tokens_that_are_computed_there(count: int) -> None:
    found = partners(PAGE, count)

    # The odd token of a pair takes the even one before it; what the even one finds is never kept.
    assert found[1::2].tolist() == list(range(PAGE, PAGE + count - 1, 2))


def test_within_a_pair_a_request_needs_what_only_its_own_process_knows() -> None:
    assert bool(partners(PAGE + 1, 4)[0].isnan())


def test_servers_that_replay_late_windows_and_servers_that_do_not_share_no_page() -> None:
    name = "enable_decoder_swa_bounded_replay"
    group = namespace_of(ServerArgs)[name]

    texts = [
        value_arguments({name: ServerArgument(group=group, value=replays)})
        for replays in (False, True)
    ]

    assert texts == [{name: "false"}, {name: "true"}]


# ---- what is kept in another way --------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("page_size", 32),
        ("index_k_with_scale_buffer", None),
        ("use_fp4_indexer", False),
        ("index_k_rne", False),
        ("index_k_page8", True),
        ("uses_aiter_fp4_layout", True),
    ],
)
def test_shared_index_keys_that_are_kept_otherwise_are_refused(
    ratio: int, attribute: str, value: object
) -> None:
    pool = shared_pool()
    setattr(pool.index_pools[ratio], attribute, value)  # type: ignore[attr-defined]  # a real pool

    with pytest.raises(UnsupportedKVCacheError, match=f"index keys of ratio {ratio} of .* rows of"):
        describe(pool)


def test_a_layer_that_looks_elsewhere_is_refused() -> None:
    pool = shared_pool()
    layers = pool.layer_mapping  # type: ignore[attr-defined]  # a real pool
    layers[READER] = layers[READER]._replace(compress_layer_id=1)

    with pytest.raises(
        UnsupportedKVCacheError, match=r"layer 2 of ratio 2 at position 1, .* \[1\]"
    ):
        describe(pool)


def test_a_layer_before_all_that_keep_kv_is_refused() -> None:
    pool = shared_pool()
    pool.sources_by_ratio[1] = [4]  # type: ignore[attr-defined]  # a real pool

    with pytest.raises(UnsupportedKVCacheError, match=r"layer 3 of ratio 1 .* layers \[\] keep"):
        describe(pool)


@pytest.mark.parametrize("held", ["compress_state_pools", "indexer_compress_state_pools"])
@pytest.mark.parametrize("layer", [SOURCE, 3])
def test_a_state_that_outlives_a_request_is_refused(held: str, layer: int) -> None:
    pool = shared_pool()
    states = vars(pool)[held]
    # The state of the layer of ratio 4, which follows the pages of windows.
    states[layer] = states[6]

    with pytest.raises(UnsupportedKVCacheError, match=f"a state of layer {layer} that outlives"):
        describe(pool)


@pytest.mark.refuses(engine="sglang")
@pytest.mark.parametrize("kv_layout", ["v41", "v41_new"])
def test_the_layouts_of_v4_1_are_refused(refused: Refused, kv_layout: str) -> None:
    with refused(
        f"DeepSeekV4TokenToKVPool, KV layout {kv_layout}", match="SGLANG_DSV4_KV_LAYOUT=v4"
    ):
        describe(shared_pool(kv_layout=kv_layout))
