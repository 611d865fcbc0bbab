"""A configuration of DeepSeek V4 gives the parts that each layer's compress ratio calls for."""

from __future__ import annotations

import pytest

import kvlinker_deepseek_v4
from kvlinker.description import Fact
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.model_config import ModelConfig, ModelConfigRequest
from kvlinker.testing.strategies import check_strategy


def config(**values: object) -> ModelConfig:
    sizes = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 4,
        "head_dim": 512,
        "index_head_dim": 128,
        "sliding_window": 128,
        "compress_ratios": [0, 4, 128, 4],
    }
    return ModelConfig(values={**sizes, **values})


def page_bytes(asked: ModelConfig, request: ModelConfigRequest) -> dict[str, int]:
    described = kvlinker_deepseek_v4.describe_model_config(asked, request)
    assert described is not None
    group = check_strategy(kvlinker_deepseek_v4, described)
    return {entry.name: entry.page_bytes for entry in group.entries}


KINDS = [
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"compress_ratios": [0, 4, 128, 4, 0]},  # the last one is a draft layer's
        {"compress_ratios": None, "layer_types": KINDS},
    ],
)
def test_each_layer_has_the_parts_of_its_ratio(values: dict[str, object]) -> None:
    assert page_bytes(config(**values), ModelConfigRequest()) == {
        "swa": 4 * 149_760,
        "deepseek_v4_c4": 2 * 37_440,
        "deepseek_v4_c4_indexer": 2 * 8_448,
        "deepseek_v4_c128": 1_728,
        "deepseek_v4_c4_state": 2 * 65_536,
        "deepseek_v4_c4_indexer_state": 2 * 16_384,
    }


def test_formats_may_be_asked_for() -> None:
    facts: dict[str, Fact] = {
        "indexer_format": "fp4_split",
        "state_format": "bf16",
        "state_ring_rows": 16,
    }

    sizes = page_bytes(config(), ModelConfigRequest(draft_layers=1, facts=facts))

    assert sizes["swa"] == 5 * 149_760
    assert sizes["deepseek_v4_c4_indexer"] == 2 * 4096
    assert sizes["deepseek_v4_c4_indexer_scale"] == 2 * 256
    assert sizes["deepseek_v4_c4_state"] == 2 * 65_536


def test_the_window_is_the_models() -> None:
    described = kvlinker_deepseek_v4.describe_model_config(config(), ModelConfigRequest())

    assert described is not None
    assert [(pool.name, pool.window) for pool in described.logical_pools] == [
        ("kv", None),
        ("swa", 128),
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"compress_ratios": [0, 4]},
        {"compress_ratios": None},
        {"compress_ratios": None, "layer_types": ["full_attention"] * 4},
    ],
)
def test_a_layer_without_a_ratio_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ContractError, match="must say one for each"):
        kvlinker_deepseek_v4.describe_model_config(config(**values), ModelConfigRequest())


def test_ratios_that_are_not_laid_out_are_refused() -> None:
    asked = config(compress_ratios=[0, 1, 2, 4])

    with pytest.raises(UnsupportedKVCacheError, match="compress ratio 1"):
        kvlinker_deepseek_v4.describe_model_config(asked, ModelConfigRequest())


def test_ways_of_keeping_the_cache_that_are_not_laid_out_are_refused_when_matched() -> None:
    request = ModelConfigRequest(facts={"hisparse": 1})

    described = kvlinker_deepseek_v4.describe_model_config(config(), request)

    assert described is not None
    with pytest.raises(UnsupportedKVCacheError, match="HiSparse"):
        kvlinker_deepseek_v4.match_kv_cache(described)


def test_other_models_are_declined() -> None:
    other = config(model_type="deepseek_v3")

    assert kvlinker_deepseek_v4.describe_model_config(other, ModelConfigRequest()) is None
