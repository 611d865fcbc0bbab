"""The model that answers: a Llama of random weights, with the KV geometry of real ones and next to no vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["KV_BYTES_PER_TOKEN", "LAYERS", "VOCABULARY", "Model", "make_model"]

LAYERS = 12
KV_HEADS, HEAD_SIZE = 8, 128
VOCABULARY = 1024
KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_SIZE * 2
"""Keys and values of all layers, in bf16."""
SPREAD = 4.0
"""Weights are this much larger than a trained model's start, so that greedy decoding has something to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's folder, and how large it is."""

    folder: Path
    parameters: int
    embeddings: int
    """Parameters among them that only know tokens: the embedding and the head."""

    def __str__(self) -> str:
        millions = f"{self.parameters / 1e6:.0f} million random parameters"
        return (
            f"Llama of {millions}, {self.embeddings / 1e6:.0f} million of them embeddings; {LAYERS} layers with "
            f"{KV_HEADS} KV heads of {HEAD_SIZE} in bf16, {KV_BYTES_PER_TOKEN:,} B of KV a token"
        )


def make_model(folder: Path) -> Model:
    """Write the model into a folder; its weights are the same ones each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=KV_HEADS * HEAD_SIZE,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).bfloat16()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(SPREAD)
    model.save_pretrained(folder)
    return Model(
        folder=folder,
        parameters=sum(weights.numel() for weights in model.parameters()),
        embeddings=2 * VOCABULARY * config.hidden_size,
    )
