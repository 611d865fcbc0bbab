"""New weights for a running server: from a folder, or as tensors in several updates of one session."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer

from engine_frame.client import Client

__all__ = ["begin_session", "end_session", "halves_of", "send_tensors", "take_folder"]

Tensors = Mapping[str, torch.Tensor]


def take_folder(client: Client, folder: Path, *, name: str | None = None) -> None:
    """Let a server take the weights of a folder, under a name where the caller gives them one."""
    named = {} if name is None else {"weight_version": name}
    _succeed(client, "update_weights_from_disk", {"model_path": str(folder), **named})


def begin_session(client: Client) -> None:
    """Say that weights will come in several updates."""
    _succeed(client, "begin_weight_update", {})


def end_session(client: Client) -> None:
    """Say that all of them are there."""
    _succeed(client, "end_weight_update", {})


def halves_of(folder: Path) -> tuple[Tensors, Tensors]:
    """Return the weights of a model, those of its first layers apart."""
    weights = load_file(folder / "model.safetensors")
    first = {name for name in weights if ".layers.0." in name or ".layers.1." in name}
    return (
        {name: tensor for name, tensor in weights.items() if name in first},
        {name: tensor for name, tensor in weights.items() if name not in first},
    )


def send_tensors(client: Client, tensors: Tensors, *, name: str | None = None) -> None:
    """Let a server take weights from this process, whose tensors it maps."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        payload = MultiprocessingSerializer.serialize(list(tensors.items()), output_str=True)
        named = {} if name is None else {"weight_version": name}
        body = {"serialized_named_tensors": [payload], **named}
        _succeed(client, "update_weights_from_tensor", body)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


def _succeed(client: Client, path: str, body: Mapping[str, object]) -> None:
    said = json.loads(client.post(path, body))
    assert said["success"], said
