"""Describing: every buffer the pools keep, as facts and spans over their own memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

import kvlinker_transformers
from kvlinker.description import DescribeRequest, IndexerKind, KVCacheDescription
from kvlinker.errors import ContractError
from kvlinker_transformers.engine.allocation import pools_for_config
from kvlinker_transformers.models import TINY_MODEL_TYPES, tiny_model
from kvlinker_transformers.pools import PagedPools

MakeModel = Callable[..., PreTrainedModel]


def describe(pools: PagedPools) -> KVCacheDescription:
    request = DescribeRequest(page_size=pools.page_size)
    description = kvlinker_transformers.describe_kv_cache("transformers", pools, request)
    assert description is not None
    return description


@pytest.mark.parametrize(
    ("model_type", "family", "roles"),
    [
        ("llama", "mha", {"k": 3, "v": 3}),
        ("qwen3", "mha", {"k": 3, "v": 3}),
        ("gemma3_text", "swa", {"k": 1, "v": 1, "swa_k": 4, "swa_v": 4}),
        ("gpt_oss", "swa", {"k": 2, "v": 2, "swa_k": 2, "swa_v": 2}),
        ("deepseek_v3", "mla", {"latent": 3}),
        ("deepseek_v32", "dsa", {"kv": 3, "index_k": 3}),
        ("glm_moe_dsa", "dsa", {"kv": 4, "index_k": 4}),
        (
            "deepseek_v4",
            "deepseek_v4",
            {
                "swa_kv": 5,
                "c4_kv": 2,
                "c4_indexer": 2,
                "c4_state": 2,
                "c4_indexer_state": 2,
                "c128_kv": 2,
            },
        ),
        ("qwen3_next", "mamba", {"k": 2, "v": 2, "ssm_state": 3, "conv_state_0": 3}),
        ("kimi_linear", "mamba", {"latent": 2, "ssm_state": 3, "conv_state_0": 3}),
        ("jamba", "mamba", {"k": 2, "v": 2, "ssm_state": 3, "conv_state_0": 3}),
        ("lfm2", "mamba", {"k": 2, "v": 2, "conv_state_0": 3}),
    ],
)
def test_every_role_has_one_span_for_each_of_its_layers(
    make_model: MakeModel, model_type: str, family: str, roles: dict[str, int]
) -> None:
    description = describe(pools_for_config(make_model(model_type).config, pages=4))

    assert description.family == family
    assert {role: len(spans) for role, spans in description.buffers.items()} == roles


@pytest.mark.parametrize("model_type", TINY_MODEL_TYPES)
def test_b92_spans_lie_over_the_pools_own_memory(make_model: MakeModel, model_type: str) -> None:
    pools = pools_for_config(make_model(model_type).config, pages=4)

    spans = describe(pools).buffers

    for role, tensors in pools.tensors().items():
        for span, tensor in zip(spans[role], tensors, strict=True):
            assert span.rows == len(tensor)
            assert not span.rows or span.base_ptr == tensor.data_ptr()


def test_v4_without_layers_of_a_ratio_has_no_roles_for_them(make_model: MakeModel) -> None:
    model = make_model("deepseek_v4")
    config = type(model.config)(
        **{**model.config.to_dict(), "layer_types": ["sliding_attention"] * 5}
    )

    description = describe(pools_for_config(config, pages=4))

    assert set(description.buffers) == {"swa_kv"}


def test_hybrids_state_their_window_and_which_layers_look_through_it(
    make_model: MakeModel,
) -> None:
    description = describe(pools_for_config(make_model("gemma3_text").config, pages=4))

    assert [facts.kind for facts in description.layers] == [
        "sliding",
        "sliding",
        "attention",
        "sliding",
        "sliding",
    ]
    assert [(pool.name, pool.window) for pool in description.logical_pools] == [
        ("kv", None),
        ("swa", 40),
    ]


@pytest.mark.parametrize(
    ("model_type", "facts"),
    [
        (
            "qwen3_next",
            {
                "kv_family": "mha",
                "kv_layout": "token_major",
                "kv_format": "bf16",
                "kv_scaled": 0,
                "ssm_format": "fp32",
                "ssm_layout": "key_major",
                "conv_states": 1,
                "conv_format": "bf16",
                "conv_layout": "channel_major",
                "conv_window": 4,
            },
        ),
        (
            "kimi_linear",
            {
                "kv_family": "mla",
                "kv_format": "bf16",
                "ssm_format": "fp32",
                "ssm_layout": "key_major",
                "conv_states": 1,
                "conv_format": "bf16",
                "conv_layout": "channel_major",
                "conv_window": 4,
            },
        ),
        (
            "jamba",
            {
                "kv_family": "mha",
                "kv_layout": "token_major",
                "kv_format": "bf16",
                "kv_scaled": 0,
                "ssm_format": "fp32",
                "ssm_layout": "value_major",
                "conv_states": 1,
                "conv_format": "bf16",
                "conv_layout": "channel_major",
                "conv_window": 4,
            },
        ),
        (
            "lfm2",
            {
                "kv_family": "mha",
                "kv_layout": "token_major",
                "kv_format": "bf16",
                "kv_scaled": 0,
                "ssm_format": "none",
                "conv_states": 1,
                "conv_format": "bf16",
                "conv_layout": "channel_major",
                "conv_window": 3,
            },
        ),
    ],
)
def test_models_with_states_say_what_lies_in_a_slot_and_what_in_a_page(
    make_model: MakeModel, model_type: str, facts: dict[str, object]
) -> None:
    description = describe(pools_for_config(make_model(model_type).config, pages=4))

    assert description.facts == facts
    kinds = [layer.kind for layer in description.layers]
    assert kinds == ["mamba", "attention", "mamba", "attention", "mamba"]
    assert [(pool.name, pool.kind.value) for pool in description.logical_pools] == [
        ("kv", "paged"),
        ("mamba", "slot"),
    ]


def test_latents_of_another_size_than_usual_say_so() -> None:
    model = tiny_model("kimi_linear", overrides={"kv_lora_rank": 256})

    description = describe(pools_for_config(model.config, pages=4))

    assert description.facts["latent_values"] == 256 + 64


def test_latents_are_every_ranks_and_the_states_beside_them_are_not(
    make_model: MakeModel,
) -> None:
    description = describe(pools_for_config(make_model("kimi_linear").config, pages=4))

    replicas = {role for role in description.buffers if description.replication.is_replicated(role)}
    assert replicas == {"latent"}


def test_a_shared_index_is_stated_as_such(make_model: MakeModel) -> None:
    description = describe(pools_for_config(make_model("glm_moe_dsa").config, pages=4))

    own, shared = IndexerKind.OWN, IndexerKind.SHARED
    assert [facts.indexer for facts in description.layers] == [own, own, shared, own]
    assert [span.rows for span in description.buffers["index_k"]] == [4, 4, 0, 4]


def test_another_engines_cache_is_not_described(make_model: MakeModel) -> None:
    pools = pools_for_config(make_model("llama").config, pages=4)
    request = DescribeRequest(page_size=16)

    assert kvlinker_transformers.describe_kv_cache("transformers", object(), request) is None
    assert kvlinker_transformers.describe_kv_cache("sglang", pools, request) is None


def test_another_page_size_than_the_pools_is_refused(make_model: MakeModel) -> None:
    pools = pools_for_config(make_model("llama").config, pages=4)

    with pytest.raises(ContractError, match=r"mha pools have pages of 16 slots.*asks for 64"):
        kvlinker_transformers.describe_kv_cache(
            "transformers", pools, DescribeRequest(page_size=64)
        )


def test_b107_the_plugin_module_and_all_it_needs_import_without_torch() -> None:
    program = (
        "import sys, kvlinker_transformers, kvlinker_transformers.models, kvlinker_transformers.page_keys; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"
