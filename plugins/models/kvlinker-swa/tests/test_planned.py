"""A configuration is described where some layers look through a window and some do not, and refused elsewhere."""

from __future__ import annotations

import pytest

import kvlinker_swa
from kvlinker.description import KVCacheDescription
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.model_config import MADE_UP_PAGES, ModelConfig, ModelConfigRequest
from kvlinker.testing.strategies import check_strategy
from kvlinker_swa.planned import MODELS

F, S = "full_attention", "sliding_attention"


def config(model_type: str = "gpt_oss", /, **values: object) -> ModelConfig:
    sizes = {
        "model_type": model_type,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "head_dim": 64,
        "sliding_window": 128,
    }
    return ModelConfig(values={**sizes, **values})


def described(asked: ModelConfig, request: ModelConfigRequest | None = None) -> KVCacheDescription:
    found = kvlinker_swa.describe_model_config(asked, request or ModelConfigRequest())
    assert found is not None
    return found


def kinds(asked: ModelConfig) -> list[str]:
    return [facts.kind for facts in described(asked).layers]


def page_bytes(description: KVCacheDescription) -> dict[str, int]:
    group = check_strategy(kvlinker_swa, description)
    return {entry.name: entry.page_bytes for entry in group.entries}


def test_each_kind_of_layer_costs_its_heads() -> None:
    description = described(config(layer_types=[S, S, F, S]))

    assert page_bytes(description) == {"kv": 64 * 2 * 2 * 128, "swa": 3 * 64 * 2 * 2 * 128}
    assert [(pool.name, pool.window) for pool in description.logical_pools] == [
        ("kv", None),
        ("swa", 128),
    ]


@pytest.mark.parametrize(
    ("model_type", "layers", "full"),
    [
        ("gemma2", 4, [1, 3]),
        ("gemma3_text", 13, [5, 11]),
        ("gpt_oss", 4, [1, 3]),
        ("cohere2", 8, [3, 7]),
        ("olmo3", 8, [3, 7]),
    ],
)
def test_a_configuration_that_names_no_layers_has_its_models_pattern(
    model_type: str, layers: int, full: list[int]
) -> None:
    found = kinds(config(model_type, num_hidden_layers=layers))

    assert [layer for layer, kind in enumerate(found) if kind == "attention"] == full
    assert set(found) == {"attention", "sliding"}


def test_the_pattern_may_be_stated_and_layer_types_go_before_it() -> None:
    assert kinds(config("gemma3_text", sliding_window_pattern=2)) == ["sliding", "attention"] * 2
    stated = config("gemma3_text", sliding_window_pattern=2, layer_types=[F, S, S, F])
    assert kinds(stated) == ["attention", "sliding", "sliding", "attention"]


@pytest.mark.parametrize(
    ("model_type", "slot_bytes"),
    [
        ("gemma2", 4 * 256 * 2),
        ("gemma3_text", 4 * 256 * 2),
        ("gpt_oss", 8 * 64 * 2),
        ("mellum", 4 * 128 * 2),
        # No size of their own: as many KV heads as query heads, of the hidden size divided among them.
        ("cohere2", 8 * 64 * 2),
        ("olmo3", 8 * 64 * 2),
    ],
)
def test_sizes_that_a_configuration_leaves_out_are_those_of_its_model_type(
    model_type: str, slot_bytes: int
) -> None:
    asked = config(model_type, num_key_value_heads=None, head_dim=None, layer_types=[S, F, S, F])

    assert page_bytes(described(asked)) == {
        "kv": 2 * 64 * 2 * slot_bytes,
        "swa": 2 * 64 * 2 * slot_bytes,
    }


def test_a_head_major_page_is_one_row() -> None:
    request = ModelConfigRequest(page_size=16, facts={"kv_layout": "head_major"})

    description = described(config(), request)

    span = description.buffers["swa_v"][1]
    assert (span.rows, span.row_bytes) == (MADE_UP_PAGES, 16 * 2 * 64 * 2)
    assert all(entry.rows_are_pages for entry in check_strategy(kvlinker_swa, description).entries)


def test_formats_may_be_asked_for() -> None:
    request = ModelConfigRequest(facts={"kv_format": "fp8_e4m3fn"})

    assert page_bytes(described(config(), request))["kv"] == 2 * 64 * 2 * 2 * 64


@pytest.mark.parametrize(
    ("model_type", "values", "roles"),
    [
        ("gpt_oss", {}, {"draft_k": 2, "draft_v": 2}),
        ("mellum", {}, {"draft_swa_k": 2, "draft_swa_v": 2}),
        (
            "mellum",
            {"mtp_layer_types": [F, S]},
            {"draft_k": 1, "draft_v": 1, "draft_swa_k": 1, "draft_swa_v": 1},
        ),
    ],
)
def test_draft_layers_are_of_a_kind_too(
    model_type: str, values: dict[str, object], roles: dict[str, int]
) -> None:
    asked = config(model_type, layer_types=[S, F, S, F], **values)

    description = described(asked, ModelConfigRequest(draft_layers=2))

    check_strategy(kvlinker_swa, description)
    counts = {role: len(spans) for role, spans in description.buffers.items()}
    assert {role: count for role, count in counts.items() if "draft" in role} == roles


@pytest.mark.parametrize("values", [{"layer_types": [F] * 4}, {"sliding_window": None}])
def test_a_model_without_windows_is_declined_with_the_reason(values: dict[str, object]) -> None:
    with pytest.raises(UnsupportedKVCacheError, match="no layer of it looks through a window"):
        described(config(**values))


def test_a_model_of_windows_alone_is_declined_with_the_reason() -> None:
    with pytest.raises(UnsupportedKVCacheError, match="every layer of it looks through a window"):
        described(config(layer_types=[S] * 4))


@pytest.mark.parametrize(
    ("values", "drafts"),
    [
        ({"layer_types": [F, S, "chunked_attention", S]}, 0),
        ({"mtp_layer_types": ["chunked_attention"]}, 1),
    ],
)
def test_other_layers_are_refused_by_their_names(values: dict[str, object], drafts: int) -> None:
    request = ModelConfigRequest(draft_layers=drafts)

    with pytest.raises(UnsupportedKVCacheError, match="layers of 'chunked_attention' are not"):
        described(config(**values), request)


def test_a_model_whose_layers_have_no_pattern_must_name_them() -> None:
    with pytest.raises(ContractError, match="layer_types must say which layers look through"):
        described(config("mellum"))


def test_scales_are_not_told_from_a_configuration() -> None:
    description = described(config(), ModelConfigRequest(facts={"kv_scaled": 1}))

    with pytest.raises(ContractError, match="their scales are not described"):
        kvlinker_swa.match_kv_cache(description)


def test_other_models_are_declined() -> None:
    for model_type in ("llama", "llama4_text", "gemma3", "deepseek_v4"):
        asked = config(model_type)

        assert model_type not in MODELS
        assert kvlinker_swa.describe_model_config(asked, ModelConfigRequest()) is None
