"""A plugin of SGLang: LoRA adapters are kept in plain memory where no accelerator could pin any.

SGLang 0.5.23 asks for pinned memory in all that serves an adapter, `torch_native` included; torch refuses it on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module

__all__ = ["register"]

_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager.__init__"


def register() -> None:
    """Pin nothing from the moment on at which a server begins to serve adapters."""
    hooks = import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(_MANAGER, _pin_nothing, hooks.HookType.BEFORE)


def _pin_nothing(*_: object, **__: object) -> None:
    torch = import_module("torch")
    if torch.accelerator.is_available():
        return
    setattr(torch, "tensor", _unpinned(torch.tensor))  # noqa: B010  # torch is a module to type checkers
    setattr(torch, "zeros", _unpinned(torch.zeros))  # noqa: B010  # as above
    torch.Tensor.pin_memory = _itself


def _unpinned(make: Callable[..., object]) -> Callable[..., object]:
    @wraps(make)
    def made(*arguments: object, pin_memory: bool = False, **options: object) -> object:
        del pin_memory
        return make(*arguments, **options)

    return made


def _itself(tensor: object) -> object:
    return tensor
