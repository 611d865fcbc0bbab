"""A plugin of SGLang: latent attention on a CPU keeps to the path that the backend `torch_native` can compute."""

from __future__ import annotations

from importlib import import_module

__all__ = ["register"]


def register() -> None:
    """Let `torch_native` attend to latents as they are stored; other paths unfold them with kernels for GPUs."""
    handlers = import_module("sglang.srt.models.deepseek_common.attention_backend_handler")
    methods = import_module("sglang.srt.models.deepseek_common.attention_forward_methods")
    absorbed = methods.AttnForwardMethod.MLA
    handlers.AttentionBackendRegistry.register("torch_native", lambda *_: absorbed)
