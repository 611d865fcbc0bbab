"""Tiny LoRA adapters with random weights for the model `llama`, written as any adapter's folder is."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

__all__ = ["write_adapter"]

LAYERS = 4
HIDDEN = 128
RANK = 8
OUTPUTS = {"q_proj": 128, "v_proj": 64}
"""Projections that are adapted, each with the values it returns."""
SPREAD = 0.3
"""As large as it takes for an adapter to change what is answered."""


def write_adapter(folder: Path, *, seed: int) -> Path:
    """Write an adapter into a folder, in the place of one that is there, and return that."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, outputs in OUTPUTS.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (RANK, HIDDEN)), ("B", (outputs, RANK))):
                values = torch.randn(shape, generator=generator) * SPREAD
                weights[f"{module}.lora_{part}.weight"] = values.bfloat16()
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(OUTPUTS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
