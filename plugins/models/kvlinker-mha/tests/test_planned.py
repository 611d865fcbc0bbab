"""A configuration is described where every layer keeps every token, and refused where some keep a window."""

from __future__ import annotations

import pytest

import kvlinker_mha
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.model_config import MADE_UP_PAGES, ModelConfig, ModelConfigRequest
from kvlinker.testing.strategies import check_strategy


def config(**values: object) -> ModelConfig:
    sizes = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
    }
    return ModelConfig(values={**sizes, **values})


@pytest.mark.parametrize(
    ("values", "slot_bytes"),
    [
        ({}, 2 * 64 * 2),
        ({"head_dim": 128}, 2 * 128 * 2),
        ({"num_key_value_heads": None}, 8 * 64 * 2),
        ({"torch_dtype": "float32"}, 2 * 64 * 4),
    ],
)
def test_a_slot_is_the_heads_of_one_token(values: dict[str, object], slot_bytes: int) -> None:
    described = kvlinker_mha.describe_model_config(config(**values), ModelConfigRequest())

    assert described is not None
    group = check_strategy(kvlinker_mha, described)
    assert group.entry_map["kv"].page_bytes == 2 * 2 * 64 * slot_bytes


def test_a_head_major_page_is_one_row() -> None:
    request = ModelConfigRequest(page_size=16, facts={"kv_layout": "head_major"})

    described = kvlinker_mha.describe_model_config(config(), request)

    assert described is not None
    span = described.buffers["v"][1]
    assert (span.rows, span.row_bytes) == (MADE_UP_PAGES, 16 * 2 * 64 * 2)
    assert check_strategy(kvlinker_mha, described).entry_map["kv"].rows_are_pages


def test_draft_layers_keep_k_and_v_too() -> None:
    described = kvlinker_mha.describe_model_config(config(), ModelConfigRequest(draft_layers=1))

    assert described is not None
    assert {role: len(spans) for role, spans in described.buffers.items()} == {
        "k": 2,
        "v": 2,
        "draft_k": 1,
        "draft_v": 1,
    }


@pytest.mark.parametrize(
    "values",
    [
        {"sliding_window": 4096},
        {"sliding_window": 4096, "use_sliding_window": True, "max_position_embeddings": 8192},
    ],
)
def test_a_model_that_looks_through_a_window_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(UnsupportedKVCacheError, match=r"look back 4096 tokens \(sliding_window\)"):
        kvlinker_mha.describe_model_config(config(**values), ModelConfigRequest())


def test_a_model_with_other_layers_is_refused_by_their_names() -> None:
    kinds = ["full_attention", "linear_attention"]

    with pytest.raises(UnsupportedKVCacheError, match=r"layers of \['linear_attention'\]"):
        kvlinker_mha.describe_model_config(config(layer_types=kinds), ModelConfigRequest())


@pytest.mark.parametrize(
    "values",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 4096, "layer_types": ["full_attention", "full_attention"]},
        {"sliding_window": 4096, "max_position_embeddings": 4096},
    ],
)
def test_a_window_that_no_token_leaves_is_none(values: dict[str, object]) -> None:
    assert kvlinker_mha.describe_model_config(config(**values), ModelConfigRequest())


def test_scales_are_not_told_from_a_configuration() -> None:
    request = ModelConfigRequest(facts={"kv_scaled": 1})

    described = kvlinker_mha.describe_model_config(config(), request)

    assert described is not None
    with pytest.raises(ContractError, match="their scales are not described"):
        kvlinker_mha.match_kv_cache(described)


def sparse(**values: object) -> ModelConfig:
    stated = {"sparse_index_dim": 128, "sparse_attention_freq": [0, 1]}
    return config(model_type="minimax_m2", sparse_attention_config={**stated, **values})


@pytest.mark.parametrize(
    ("without_values", "page_bytes"),
    [([0, 1], {"indexer": 64 * 256}), (None, {"indexer": 64 * 256, "indexer_v": 64 * 256})],
)
def test_layers_that_select_what_they_attend_to_keep_index_keys(
    without_values: list[int] | None, page_bytes: dict[str, int]
) -> None:
    stated = sparse(sparse_disable_index_value=without_values)

    described = kvlinker_mha.describe_model_config(stated, ModelConfigRequest())

    assert described is not None
    entries = check_strategy(kvlinker_mha, described).entry_map
    pages = {name: entry.page_bytes for name, entry in entries.items()}
    assert pages == {"kv": 2 * 2 * 64 * 2 * 64 * 2, **page_bytes}
    assert dict(entries["indexer"].layer_mapping) == {1: (0,)}


def test_index_keys_may_be_of_another_format_than_the_model() -> None:
    request = ModelConfigRequest(facts={"index_format": "fp8_e4m3fn"})

    described = kvlinker_mha.describe_model_config(sparse(), request)

    assert described is not None
    assert check_strategy(kvlinker_mha, described).entry_map["indexer"].page_bytes == 64 * 128


@pytest.mark.parametrize(
    "values",
    [
        {"sparse_attention_freq": None},
        {"sparse_attention_freq": [1]},
        {"sparse_disable_index_value": [1]},
    ],
)
def test_an_index_that_is_not_told_of_each_layer_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ContractError, match="expected 2 each"):
        kvlinker_mha.describe_model_config(sparse(**values), ModelConfigRequest())


def test_other_models_are_declined() -> None:
    gemma = config(model_type="gemma3_text")

    assert kvlinker_mha.describe_model_config(gemma, ModelConfigRequest()) is None
