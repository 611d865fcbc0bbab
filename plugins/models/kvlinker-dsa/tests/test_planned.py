"""A configuration of a model with sparse attention says which layers own an index, in each of its ways."""

from __future__ import annotations

import pytest

import kvlinker_dsa
from kvlinker.description import IndexerKind
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.model_config import ModelConfig, ModelConfigRequest
from kvlinker.testing.strategies import check_strategy


def config(**values: object) -> ModelConfig:
    sizes = {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 4,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
    }
    return ModelConfig(values={**sizes, **values})


def owners(asked: ModelConfig) -> list[int]:
    """Return the layers with an index of their own, as described."""
    described = kvlinker_dsa.describe_model_config(asked, ModelConfigRequest())
    assert described is not None
    check_strategy(kvlinker_dsa, described)
    rows = [layer for layer, span in enumerate(described.buffers["index_k"]) if span.rows]
    assert rows == [la.layer for la in described.layers if la.indexer is IndexerKind.OWN]
    return rows


@pytest.mark.parametrize(
    ("values", "owning"),
    [
        ({}, [0, 1, 2, 3]),
        ({"indexer_types": ["full", "shared", "shared", "full"]}, [0, 3]),
        ({"index_topk_pattern": "FSFS"}, [0, 2]),
        ({"index_topk_pattern": ["full", "full", "shared", "full"]}, [0, 1, 3]),
        ({"index_topk_freq": 2}, [0, 1, 3]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [0, 2]),
    ],
)
def test_a_layer_owns_an_index_as_the_configuration_says(
    values: dict[str, object], owning: list[int]
) -> None:
    assert owners(config(**values)) == owning


def test_every_fourth_layer_of_glm_5_2_owns_an_index_after_the_first_three() -> None:
    found = owners(config(num_hidden_layers=78, index_topk_freq=4, index_skip_topk_offset=3))

    assert found == [0, 1, *range(2, 78, 4)]
    assert len(found) == 21


@pytest.mark.parametrize(
    "values",
    [
        {"index_topk_pattern": "FSF"},
        {"index_topk_pattern": "FSXF"},
        {"indexer_types": ["full", "half", "full", "full"]},
    ],
)
def test_kinds_that_do_not_fit_the_layers_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ContractError, match="expected full or shared for each of 4 layers"):
        kvlinker_dsa.describe_model_config(config(**values), ModelConfigRequest())


@pytest.mark.parametrize("name", ["kv_lora_rank", "qk_rope_head_dim", "index_head_dim"])
def test_sizes_that_are_not_laid_out_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedKVCacheError, match=f"{name} 32 is not laid out here"):
        kvlinker_dsa.describe_model_config(config(**{name: 32}), ModelConfigRequest())


def test_drafts_have_a_latent_and_an_index() -> None:
    described = kvlinker_dsa.describe_model_config(config(), ModelConfigRequest(draft_layers=1))

    assert described is not None
    entries = check_strategy(kvlinker_dsa, described).entry_map
    assert entries["kv"].page_bytes == 5 * 64 * 1152
    assert entries["indexer"].page_bytes == 5 * 64 * 132


def test_models_without_an_index_are_declined() -> None:
    plain = config(model_type="deepseek_v3")

    assert kvlinker_dsa.describe_model_config(plain, ModelConfigRequest()) is None
