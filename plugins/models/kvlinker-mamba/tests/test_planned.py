"""A configuration is described where it tells every size, and refused where it does not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

import kvlinker_mamba
from kvlinker.description import Fact, KVCacheDescription
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.model_config import MADE_UP_PAGES, ModelConfig, ModelConfigRequest
from kvlinker.pools import DevicePoolGroup
from kvlinker.testing.strategies import check_strategy

HEADS: dict[str, object] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
}
MAMBA: dict[str, object] = {"mamba_expand": 2, "mamba_d_state": 6, "mamba_d_conv": 4}
MAMBA2: dict[str, object] = {**MAMBA, "mamba_n_groups": 3}
GDN: dict[str, object] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
KDA: dict[str, object] = {
    "kda_layers": [1, 3, 4],
    "full_attn_layers": [2],
    "num_heads": 2,
    "head_dim": 8,
    "short_conv_kernel_size": 4,
}
LATENT: dict[str, object] = {"kv_lora_rank": 16, "qk_rope_head_dim": 8}
NEMOTRON: dict[str, object] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 5,
    "n_groups": 2,
    "ssm_state_size": 6,
    "conv_kernel": 4,
}
A, M, B, P = "attention", "mamba", "attention_and_mamba", "mlp"


def config(model_type: str, **values: object) -> ModelConfig:
    return ModelConfig(values={"model_type": model_type, **HEADS, **values})


def described(
    read: ModelConfig, facts: Mapping[str, Fact] | None = None, *, drafts: int = 0
) -> KVCacheDescription:
    request = ModelConfigRequest(draft_layers=drafts, facts=facts or {})
    description = kvlinker_mamba.describe_model_config(read, request)
    assert description is not None
    return description


def laid_out(description: KVCacheDescription) -> DevicePoolGroup:
    return check_strategy(kvlinker_mamba, description)


@pytest.mark.parametrize(
    ("read", "kinds", "ssm", "conv"),
    [
        # 4 value heads of 12 x 8; 2 x 16 + 48 channels.
        (config("qwen3_next", **GDN), [M, M, M, A], 4 * 12 * 8, 80 * 3),
        (config("qwen3_5_text", **GDN, full_attention_interval=2), [M, A, M, A], 384, 240),
        # 2 heads of 8 x 8; q, k and v of 16 channels each.
        (
            config("kimi_linear", **LATENT, linear_attn_config=KDA),
            [M, A, M, M],
            2 * 8 * 8,
            48 * 3,
        ),
        # An inner width of 64, with 6 values of state; B and C of a group are as wide as the state.
        (
            config("jamba", **MAMBA, attn_layer_period=2, attn_layer_offset=0),
            [A, M, A, M],
            64 * 6,
            64 * 3,
        ),
        (config("bamba", **MAMBA2, attn_layer_indices=[2]), [M, M, A, M], 384, (64 + 36) * 3),
        (
            config("granitemoehybrid", **MAMBA2, layer_types=[M, A, M, M]),
            [M, A, M, M],
            384,
            300,
        ),
        (config("falcon_h1", **MAMBA2), [B] * 4, 384, 300),
        (config("falcon_h1", **MAMBA2, mamba_d_ssm=40), [B] * 4, 40 * 6, (40 + 36) * 3),
        (
            config("nemotron_h", **NEMOTRON, hybrid_override_pattern="M*-ME"),
            [M, A, P, M, P],
            40 * 6,
            (40 + 24) * 3,
        ),
        (
            config("nemotron_h", **NEMOTRON, layers_block_type=[M, "full_attention", "moe"]),
            [M, A, P],
            240,
            192,
        ),
        (
            config("nemotron_h", **NEMOTRON, layer_types=["linear_attention", "attention"] * 2),
            [M, A, M, A],
            240,
            192,
        ),
        (config("lfm2", conv_L_cache=3, full_attn_idxs=[1]), [M, A, M, M], 0, 32 * 2),
        (
            config("lfm2_moe", conv_L_cache=3, layer_types=["conv", "full_attention"] * 2),
            [M, A, M, A],
            0,
            64,
        ),
    ],
    ids=[
        "qwen3_next",
        "qwen3_5_text",
        "kimi_linear",
        "jamba",
        "bamba",
        "granitemoehybrid",
        "falcon_h1",
        "falcon_h1 of a stated width",
        "nemotron_h",
        "nemotron_h by names",
        "nemotron_h by layer types",
        "lfm2",
        "lfm2_moe",
    ],
)
def test_states_have_the_sizes_that_the_configuration_says(
    read: ModelConfig, kinds: list[str], ssm: int, conv: int
) -> None:
    description = described(read)

    assert [facts.kind for facts in description.layers] == kinds
    states = laid_out(description).entry_map["mamba"]
    count = kinds.count(M) + kinds.count(B)
    # fp32 recurrences, bf16 convolutions.
    assert states.page_bytes == count * (4 * ssm + 2 * conv)
    assert {span.rows for span in states.spans} == {MADE_UP_PAGES}


def test_pages_beside_states_are_those_of_heads_or_of_latents() -> None:
    heads = laid_out(described(config("qwen3_next", **GDN)))
    divided = laid_out(described(config("lfm2", conv_L_cache=3, full_attn_idxs=[0], head_dim=None)))
    latents = laid_out(described(config("kimi_linear", **LATENT, linear_attn_config=KDA)))

    assert heads.entry_map["kv"].page_bytes == 64 * 2 * (2 * 8) * 2
    assert divided.entry_map["kv"].page_bytes == 64 * 2 * (2 * 32 // 4) * 2
    assert latents.entry_map["kv"].page_bytes == 64 * (16 + 8) * 2


@pytest.mark.parametrize(
    ("values", "ssm_format"),
    [
        ({}, "fp32"),
        ({"mamba_ssm_dtype": "bfloat16"}, "bf16"),
        ({"mamba_ssm_cache_dtype": "float16"}, "fp16"),
    ],
)
def test_a_recurrence_is_kept_in_float32_unless_the_model_says_otherwise(
    values: dict[str, object], ssm_format: str
) -> None:
    assert described(config("qwen3_next", **GDN, **values)).facts["ssm_format"] == ssm_format


def test_formats_may_be_asked_for() -> None:
    facts: dict[str, Fact] = {
        "kv_layout": "head_major",
        "kv_format": "fp8_e4m3fn",
        "ssm_format": "bf16",
        "ssm_layout": "key_major",
        "conv_format": "fp32",
        "conv_layout": "window_major",
        "conv_window": 4,
    }
    description = described(config("qwen3_next", **GDN), facts)

    group = laid_out(description)

    assert {name: description.facts[name] for name in facts} == facts
    assert group.entry_map["kv"].rows_are_pages
    assert group.entry_map["mamba"].page_bytes == 3 * (2 * 384 + 4 * 320)


def test_q_k_and_v_may_be_kept_in_states_of_their_own() -> None:
    read = config("kimi_linear", **LATENT, linear_attn_config=KDA)

    together, apart = described(read), described(read, {"conv_states": 3})

    assert len(laid_out(apart).entry_map["mamba"].components) == 4
    assert (
        laid_out(apart).entry_map["mamba"].page_bytes
        == laid_out(together).entry_map["mamba"].page_bytes
    )


def test_a_kimi_configuration_may_be_flat() -> None:
    flat = {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }

    states = laid_out(described(config("kimi_linear", **LATENT, **flat))).entry_map["mamba"]

    assert states.page_bytes == 2 * (4 * 2 * 64 + 2 * 48 * 3)


def test_draft_layers_keep_pages_and_no_state() -> None:
    description = described(config("qwen3_next", **GDN), drafts=1)

    assert {role: len(spans) for role, spans in description.buffers.items()} == {
        "k": 1,
        "v": 1,
        "draft_k": 1,
        "draft_v": 1,
        "ssm_state": 3,
        "conv_state_0": 3,
    }
    assert laid_out(description).entry_map["kv"].layer_mapping == {0: (1,), 3: (0,)}


@pytest.mark.parametrize(
    ("read", "error", "message"),
    [
        (config("granitemoehybrid", **MAMBA2), ContractError, "layer_types must say which"),
        (
            config("granitemoehybrid", **MAMBA2, layer_types=["attention"] * 4),
            UnsupportedKVCacheError,
            "no layer keeps a state, so its cache is no hybrid",
        ),
        (
            config("bamba", **MAMBA2),
            UnsupportedKVCacheError,
            "no layer keeps pages of 'kv', which a prefix is known by",
        ),
        (
            config("qwen3_next", **GDN, layer_types=["sliding_attention"] * 4),
            UnsupportedKVCacheError,
            r"layers of \['sliding_attention'\] are not laid out here",
        ),
        (
            config("jamba", **MAMBA, attn_layer_period=2, attn_layer_offset=0, sliding_window=64),
            UnsupportedKVCacheError,
            "states a window .sliding_window 64.",
        ),
        (
            config("kimi_linear", **LATENT, linear_attn_config={**KDA, "kda_layers": [1, 3]}),
            ContractError,
            "must name each of 4 layers once",
        ),
        (config("qwen3_next"), ContractError, "linear_num_key_heads"),
    ],
    ids=["no layers", "no states", "no pages", "windows", "a window", "a layer short", "no sizes"],
)
def test_a_configuration_that_leaves_something_open_is_refused(
    read: ModelConfig, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        described(read)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"conv_window": 5}, "conv_window 5 is not laid out here; a kernel of 4 reads 3 before"),
        ({"conv_states": 2}, "conv_states 2 is not laid out here"),
        ({"ssm_format": "int8"}, "ssm_format 'int8' is not laid out here"),
        ({"kv_family": "mla"}, "kv_family 'mla' is not laid out here; known are 'mha'"),
    ],
)
def test_a_form_that_the_model_does_not_have_is_refused(
    facts: dict[str, Fact], message: str
) -> None:
    with pytest.raises(UnsupportedKVCacheError, match=message):
        described(config("qwen3_next", **GDN), facts)


@pytest.mark.parametrize("model_type", ["llama", "mamba2", "zamba2", "olmo_hybrid"])
def test_other_models_are_declined(model_type: str) -> None:
    request = ModelConfigRequest()

    assert kvlinker_mamba.describe_model_config(config(model_type), request) is None
