"""Tiny models with random weights, written as any model's folder is: enough layers and heads to be told apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    PreTrainedModel,
)

__all__ = ["MODELS", "SLIDING_WINDOW", "VOCABULARY", "make_model"]

VOCABULARY = 1024
"""Token ids from 3 on are plain ones."""
SLIDING_WINDOW = 64
"""Tokens that a sliding layer of the model `sliding` sees."""
SPREAD = 4.0
"""Random weights are this much larger than a trained model's start, so that greedy decoding has something to say."""


def llama() -> PreTrainedModel:
    """Return four layers of grouped-query attention, with 2 KV heads of 32."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
        )
    )


def sliding() -> PreTrainedModel:
    """Return four layers, of which the first and the third see a window."""
    return MellumForCausalLM(
        MellumConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            sliding_window=SLIDING_WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )


def latent() -> PreTrainedModel:
    """Return three layers of latent attention, with rows of 64 + 32."""
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=3,
        max_position_embeddings=2048,
        rope_parameters={  # without a scaling SGLang has no rotation for the CPU
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    )
    config.update({"moe_layer_freq": 1})  # as in the config.json of DeepSeek V2, and read by SGLang
    return DeepseekV2ForCausalLM(config)


MODELS: Mapping[str, Callable[[], PreTrainedModel]] = MappingProxyType(
    {"latent": latent, "llama": llama, "sliding": sliding}
)
"""Every model by the name of its attention."""


def make_model(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a model into a folder of its name, and return that; its weights are the seed's, whatever came before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[name]().bfloat16()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(SPREAD)
    target = folder / f"{name}-{seed}"
    model.save_pretrained(target)
    return target
