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


def test_other_models_are_declined() -> None:
    gemma = config(model_type="gemma3_text")

    assert kvlinker_mha.describe_model_config(gemma, ModelConfigRequest()) is None
