"""Models: small random ones whose KV caches have the geometry of the real ones.

A page of such a model has exactly the bytes of a production page, at the cost of a toy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvlinker.errors import ContractError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["TINY_MODEL_TYPES", "tiny_model"]

_Options = Mapping[str, int | list[int] | list[str]]

_COMMON: _Options = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
}
_GQA: _Options = {
    **_COMMON,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
# A window of 40 on pages of 16: three pages at a boundary, the oldest of which is seen in part.
_GEMMA3: _Options = {
    **_COMMON,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 40,
    "sliding_window_pattern": 3,
}
_GPT_OSS: _Options = {
    **_COMMON,
    "num_attention_heads": 16,
    "max_position_embeddings": 131_072,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
}
_MLA: _Options = {
    **_COMMON,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Fewer tokens than a short prompt has, so that the choice which the index makes is part of the output.
_DSA: _Options = {**_MLA, "index_topk": 48, "index_head_dim": 128, "index_n_heads": 4}
_V4: _Options = {
    **_COMMON,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 32,
    "sliding_window": 128,
    "num_hash_layers": 1,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    # Every kind of layer, two of those with most state, none of them in the first place or alone in its order.
    "compress_ratios": [0, 128, 4, 128, 4],
}
# States in the first, the middle and the last layer, and pages between them.
_STATES_AND_PAGES = [
    "linear_attention",
    "full_attention",
    "linear_attention",
    "full_attention",
    "linear_attention",
]
_QWEN3_NEXT: _Options = {
    **_COMMON,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 5,
    "layer_types": _STATES_AND_PAGES,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_KIMI_LINEAR: _Options = {
    **_COMMON,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "layer_types": _STATES_AND_PAGES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "linear_num_heads": 2,
    "linear_head_dim": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_JAMBA: _Options = {
    **_COMMON,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_LFM2: _Options = {
    **_COMMON,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "full_attn_idxs": [1, 3],
    "num_key_value_heads": 2,
}
_OPTIONS: Mapping[str, _Options] = {
    "llama": _GQA,
    "qwen3": _GQA,
    "gemma3_text": _GEMMA3,
    "gpt_oss": _GPT_OSS,
    "deepseek_v3": _MLA,
    "deepseek_v32": _DSA,
    # Layer 0 and 1 own an index, layer 2 shares that of layer 1, layer 3 owns one again.
    "glm_moe_dsa": {**_DSA, "num_hidden_layers": 4, "index_topk_freq": 2},
    "deepseek_v4": _V4,
    "qwen3_next": _QWEN3_NEXT,
    "kimi_linear": _KIMI_LINEAR,
    "jamba": _JAMBA,
    "lfm2": _LFM2,
}

_DECAY, _LOG_DECAY = "A_log", -3.0
"""Weight that says how fast a state fades, and its mean: with the initial one, a wrong state would be forgotten before
it is seen."""

TINY_MODEL_TYPES = tuple(_OPTIONS)
"""Model types that `tiny_model` makes."""


def tiny_model(
    model_type: str,
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    overrides: Mapping[str, int | list[int]] | None = None,
) -> PreTrainedModel:
    """Return a random model of the type, the same in every process.

    Args:
        model_type: one of `TINY_MODEL_TYPES`.
        dtype: of weights and activations; bfloat16 by default.
        seed: another one gives other weights.
        overrides: configuration values to set, such as `index_topk`.

    Raises:
        ContractError: the model type is not among `TINY_MODEL_TYPES`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

    if model_type not in _OPTIONS:
        msg = f"no tiny model of type {model_type!r}; choose one of {', '.join(TINY_MODEL_TYPES)}"
        raise ContractError(msg)
    config = AutoConfig.for_model(model_type, **{**_OPTIONS[model_type], **(overrides or {})})
    # Most of the initial weights are replaced below; the caller's random state is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: object = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=dtype or torch.bfloat16
        )
    if not isinstance(model, PreTrainedModel):
        msg = f"transformers built a {type(model).__name__} for {model_type!r}"
        raise ContractError(msg)
    _randomize(model, seed)
    model.eval()
    return model


def _randomize(model: PreTrainedModel, seed: int) -> None:
    """Draw every weight that KV depends on: a bias, a sink or a hash table of zeros would hide a wrong one."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            scale = _scale(name, parameter)
            if scale:
                values = torch.randn(parameter.shape, generator=generator) * scale
                parameter.copy_(values + (_LOG_DECAY if name.endswith(_DECAY) else 0.0))
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("tid2eid"):
                experts = int(model.config.to_dict()["n_routed_experts"])
                buffer.copy_(torch.randint(experts, buffer.shape, generator=generator))


def _scale(name: str, parameter: torch.Tensor) -> float:
    """Return the standard deviation that a parameter is drawn with, 0 to leave it as it is."""
    if name.endswith(("position_bias", "sinks", "base", _DECAY)):
        return 0.5
    if parameter.dim() > 1:
        return 1.0 / math.sqrt(parameter.shape[-1])
    return 0.0
