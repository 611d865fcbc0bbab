"""Weights: a digest of everything that decides what KV a model computes, and the namespace made from it."""

from __future__ import annotations

import json
from hashlib import blake2b

import torch
from transformers import PreTrainedModel

from kvlinker.keys import KeyNamespace

__all__ = ["PRODUCER", "model_namespace", "weights_version"]

PRODUCER = "kvlinker-transformers"
"""Values of this engine: RoPE as transformers orders it, index keys not rotated."""

_NOT_VALUES = frozenset({"_name_or_path", "architectures", "dtype", "transformers_version"})
"""What a configuration says of itself and not of the values."""


def weights_version(model: PreTrainedModel) -> str:
    """Return a digest of a model's weights, buffers and configuration, the same in every process."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_VALUES}
    digest = blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def model_namespace(
    model: PreTrainedModel,
    *,
    model_id: str | None = None,
    tenant: str | None = None,
    secret: bytes = b"",
) -> KeyNamespace:
    """Return the namespace of what a model computes now.

    Args:
        model: read once, from its first weight to its last.
        model_id: name of the model; its type by default, for a path would differ from machine to machine.
        tenant: whose text it is, where tenants must not share pages.
        secret: keys the digests, so that object names cannot be guessed from text.
    """
    return KeyNamespace(
        model_id=model_id or model.config.model_type,
        producer=PRODUCER,
        weights_version=weights_version(model),
        value_format=str(model.dtype),
        tenant=tenant,
        secret=secret,
    )
