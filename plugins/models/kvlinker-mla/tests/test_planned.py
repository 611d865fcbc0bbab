"""A configuration of a model with latent attention gives one buffer for each layer."""

from __future__ import annotations

import pytest

import kvlinker_mla
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.model_config import ModelConfig, ModelConfigRequest
from kvlinker.testing.strategies import check_strategy


def config(**values: object) -> ModelConfig:
    sizes = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    return ModelConfig(values={**sizes, **values})


@pytest.mark.parametrize(
    ("kv_format", "row_bytes"),
    [("bf16", 1152), ("fp32", 2304), ("fp8_e4m3fn", 576), ("fp8_packed_656", 656)],
)
def test_a_slot_is_a_latent_and_a_rope(kv_format: str, row_bytes: int) -> None:
    request = ModelConfigRequest(facts={"kv_format": kv_format})

    described = kvlinker_mla.describe_model_config(config(), request)

    assert described is not None
    assert "latent_values" not in described.facts
    group = check_strategy(kvlinker_mla, described)
    assert group.entry_map["kv"].page_bytes == 2 * 64 * row_bytes


def test_another_number_of_values_is_stated() -> None:
    described = kvlinker_mla.describe_model_config(config(kv_lora_rank=256), ModelConfigRequest())

    assert described is not None
    assert described.facts["latent_values"] == 320
    assert check_strategy(kvlinker_mla, described).entry_map["kv"].page_bytes == 2 * 64 * 640


def test_the_packed_format_has_one_size() -> None:
    request = ModelConfigRequest(facts={"kv_format": "fp8_packed_656"})

    with pytest.raises(ContractError, match="holds 576 values, got latent_values 320"):
        kvlinker_mla.describe_model_config(config(kv_lora_rank=256), request)


def test_an_unknown_format_is_refused() -> None:
    request = ModelConfigRequest(facts={"kv_format": "int4"})

    with pytest.raises(UnsupportedKVCacheError, match="kv_format 'int4' is not laid out here"):
        kvlinker_mla.describe_model_config(config(), request)


def test_a_model_with_an_index_is_declined() -> None:
    sparse = config(model_type="deepseek_v32", index_head_dim=128)

    assert kvlinker_mla.describe_model_config(sparse, ModelConfigRequest()) is None
