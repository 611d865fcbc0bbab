"""Groups over real pools have the bytes that follow from the models' published configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from described_pools import DESCRIBED
from pool_groups import group_of
from real_pools import V4_FLASH, V4_PRO, heads_pool, latent_pool, sparse_pool, v4_pool

from kvlinker.testing.engines import PoolExample

FP8 = torch.float8_e4m3fn
GLM_5_2_SHARED = tuple(layer for layer in range(78) if layer not in {0, 1, 2} and (layer - 2) % 4)
"""Layers of GLM-5.2 without an indexer: 0, 1, 2 and then every fourth have one."""
BY_NAME = {example.name: example for example in DESCRIBED}


@pytest.mark.parametrize(
    ("make", "page_size", "token_bytes"),
    [
        pytest.param(partial(sparse_pool, layers=61), 64, 78_324, id="deepseek-v3.2"),
        pytest.param(
            partial(sparse_pool, layers=61, dtype=FP8, row_values=656),
            64,
            48_068,
            id="deepseek-v3.2-fp8",
        ),
        pytest.param(
            partial(sparse_pool, layers=61, dtype=FP8), 64, 43_188, id="deepseek-v3.2-raw_fp8"
        ),
        pytest.param(partial(sparse_pool, layers=78), 64, 100_152, id="glm-5"),
        pytest.param(
            partial(sparse_pool, layers=78, dtype=FP8, row_values=656), 64, 61_464, id="glm-5-fp8"
        ),
        pytest.param(
            partial(sparse_pool, layers=78, without_index=GLM_5_2_SHARED), 64, 92_628, id="glm-5.2"
        ),
        pytest.param(
            partial(
                sparse_pool, layers=78, dtype=FP8, row_values=656, without_index=GLM_5_2_SHARED
            ),
            64,
            53_940,
            id="glm-5.2-fp8",
        ),
        pytest.param(partial(latent_pool, layers=61), 16, 70_272, id="deepseek-v3"),
        pytest.param(
            partial(heads_pool, layers=32, heads=8, head_dim=128), 16, 131_072, id="llama-3.1-8b"
        ),
        pytest.param(
            partial(heads_pool, layers=32, heads=8, head_dim=128, head_major=True),
            16,
            131_072,
            id="llama-3.1-8b-head_major",
        ),
        pytest.param(
            partial(heads_pool, layers=36, heads=8, head_dim=128), 16, 147_456, id="qwen3-8b"
        ),
        pytest.param(
            partial(heads_pool, layers=30, heads=3, head_dim=64), 16, 23_040, id="smollm2-135m"
        ),
    ],
)
def test_a_token_has_the_bytes_of_its_model(
    make: Callable[..., object], page_size: int, token_bytes: int
) -> None:
    example = PoolExample(name="model", make=partial(make, pages=2), page_size=page_size)

    assert sum(group_of(example).page_bytes.values()) == page_size * token_bytes


@pytest.mark.parametrize(
    ("ratios", "page_bytes"),
    [
        pytest.param(
            V4_FLASH,
            {
                "swa": 6_439_680,
                "deepseek_v4_c4": 786_240,
                "deepseek_v4_c4_indexer": 177_408,
                "deepseek_v4_c128": 34_560,
                "deepseek_v4_c4_state": 1_376_256,
                "deepseek_v4_c4_indexer_state": 344_064,
            },
            id="flash",
        ),
        pytest.param(
            V4_PRO,
            {
                "swa": 9_135_360,
                "deepseek_v4_c4": 1_123_200,
                "deepseek_v4_c4_indexer": 253_440,
                "deepseek_v4_c128": 53_568,
                "deepseek_v4_c4_state": 1_966_080,
                "deepseek_v4_c4_indexer_state": 491_520,
            },
            id="pro",
        ),
    ],
)
def test_a_page_of_deepseek_v4_has_the_bytes_of_its_model(
    ratios: tuple[int, ...], page_bytes: Mapping[str, int]
) -> None:
    example = PoolExample(name="v4", make=partial(v4_pool, ratios, pages=1), page_size=256)

    assert group_of(example).page_bytes == page_bytes


@pytest.mark.parametrize(
    ("name", "page_bytes"),
    [
        ("mha-fp8", {"kv": 16 * 3 * 2 * 2 * 64}),
        ("mha-fp4", {"kv": 16 * 3 * 2 * 2 * 32, "kv_scale": 16 * 3 * 2 * 2 * 4}),
        ("mha-fp4_by_method", {"kv": 16 * 3 * 2 * 2 * 32, "kv_scale": 16 * 3 * 2 * 2 * 4}),
        ("mha-mxfp8", {"kv": 128 * 3 * 2 * 2 * 64, "kv_scale": 128 * 3 * 2 * 2 * 2}),
        ("mha-unequal", {"kv": 16 * 3 * 2 * (64 + 32) * 2}),
        ("mha-draft_beside", {"kv": 16 * 2 * (3 * 2 + 1 * 4) * 64 * 2}),
        ("swa", {"kv": 16 * 2 * 2 * 2 * 64 * 2, "swa": 16 * 2 * 2 * 2 * 64 * 2}),
        ("swa-drafts_packed", {"kv": 16 * 3 * 2 * 2 * 64 * 2, "swa": 16 * 3 * 2 * 2 * 64 * 2}),
        ("mla-fp8", {"kv": 16 * 3 * 576}),
        ("mla-drafts_packed", {"kv": 16 * 4 * 1152}),
        ("mla-fp4", {"kv": 16 * 3 * 288, "kv_scale": 16 * 3 * 36}),
        ("mla-fp4_drafts", {"kv": 16 * 5 * 288, "kv_scale": 16 * 5 * 36}),
        ("dsa-drafts_packed", {"kv": 64 * 5 * 1152, "indexer": 5 * 8448}),
        ("dsa-dead_indexer", {"kv": 64 * 3 * 1152, "indexer": 2 * 8448}),
        ("v4-windows_alone", {"swa": 2 * 149_760}),
    ],
)
def test_formats_and_drafts_have_the_bytes_of_their_values(
    name: str, page_bytes: Mapping[str, int]
) -> None:
    assert group_of(BY_NAME[name]).page_bytes == page_bytes


def test_fp4_index_keys_take_half_the_bytes_and_their_scales() -> None:
    pages = group_of(BY_NAME["v4-fp4"]).page_bytes

    assert pages["deepseek_v4_c4_indexer"] == 2 * 4352


def test_states_in_bf16_take_half_the_bytes() -> None:
    pages, halved = (group_of(BY_NAME[name]).page_bytes for name in ("v4", "v4-bf16_states"))

    for name in ("deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state"):
        assert 2 * halved[name] == pages[name]
