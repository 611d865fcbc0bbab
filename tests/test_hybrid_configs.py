"""States have the sizes that transformers' own models keep, told from the configurations that they save."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

import kvlinker_mamba
from kvlinker.model_config import ModelConfig, ModelConfigRequest
from kvlinker.testing.strategies import check_strategy

TINY: Mapping[str, object] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
EXPERTS: Mapping[str, object] = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_token": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
}
GDN: Mapping[str, object] = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
MAMBA2: Mapping[str, object] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
}
MODELS: Mapping[str, Mapping[str, object]] = {
    "qwen3_next": {**GDN, **EXPERTS},
    "qwen3_5_text": GDN,
    "jamba": {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 6,
    },
    "bamba": {**MAMBA2, "attn_layer_indices": [2]},
    "falcon_h1": {**MAMBA2, "head_dim": 8, "mamba_d_ssm": 48, "mamba_d_head": 6},
    "granitemoehybrid": {
        **MAMBA2,
        **EXPERTS,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
    },
    "nemotron_h": {
        **EXPERTS,
        "head_dim": 8,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "ssm_state_size": 6,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "kimi_linear": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 4,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
        },
    },
}
PROMPT = 8


def kept(model_type: str) -> tuple[dict[str, object], DynamicCache]:
    """Return the configuration that a tiny model saves, and its cache behind a prompt."""
    torch.set_num_threads(1)
    values = {**TINY, **MODELS[model_type]}
    if model_type == "nemotron_h":
        del values["num_hidden_layers"]
    config = AutoConfig.for_model(model_type, **values)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(1, PROMPT + 1)[None], cache=cache, use_cache=True)
    return config.to_dict(), cache


def state_bytes(cache: DynamicCache) -> int:
    return sum(
        tensor.nbytes
        for layer in cache.layers
        if isinstance(layer, LinearAttentionLayer)
        for states in (layer.conv_states, layer.recurrent_states)
        for tensor in states.values()
        if tensor is not None
    )


def page_bytes(cache: DynamicCache) -> int:
    return sum(
        tensor.nbytes
        for layer in cache.layers
        if isinstance(layer, DynamicLayer)
        for tensor in (layer.keys, layer.values)
        if tensor is not None
    )


@pytest.mark.parametrize("model_type", MODELS)
def test_states_and_pages_have_the_bytes_that_a_real_model_keeps(model_type: str) -> None:
    values, cache = kept(model_type)
    config = ModelConfig(values={**values, "model_type": model_type})
    # transformers keeps the newest token in a convolution's window too.
    kernel = 3 if model_type == "lfm2" else 4
    request = ModelConfigRequest(
        page_size=PROMPT, facts={"conv_window": kernel, "conv_format": "fp32"}
    )

    described = kvlinker_mamba.describe_model_config(config, request)

    assert described is not None
    entries = check_strategy(kvlinker_mamba, described).entry_map
    assert entries["mamba"].page_bytes == state_bytes(cache)
    assert entries["kv"].page_bytes == page_bytes(cache)
