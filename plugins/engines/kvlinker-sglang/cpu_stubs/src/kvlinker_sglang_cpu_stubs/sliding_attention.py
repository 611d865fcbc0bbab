"""A plugin of SGLang: `torch_native` reads the KV of window layers from where it wrote it.

SGLang 0.5.23 writes it to the slots of the window pool and reads it from slots of the full pool with the same numbers.
As long as both pools are empty these are the same, so that a first request comes out right and later ones do not.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

__all__ = ["register"]

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_TABLE = 5
"""Position of the table of slots, behind the backend itself, queries, output, keys and values."""


class _Pool(Protocol):
    def translate_loc_from_full_to_swa(self, slots: object) -> object: ...


class _Backend(Protocol):
    use_sliding_window_kv_pool: bool
    token_to_kv_pool: _Pool


def register() -> None:
    """Translate the slots of window layers before they are read."""
    hooks = import_module("sglang.srt.plugins.hook_registry")
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        hooks.HookRegistry.register(f"{_BACKEND}.{name}", _translated, hooks.HookType.BEFORE)


def _translated(
    backend: _Backend, *arguments: object, **options: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    given = (backend, *arguments)
    if backend.use_sliding_window_kv_pool and options.get("sliding_window_size") is not None:
        table = backend.token_to_kv_pool.translate_loc_from_full_to_swa(given[_TABLE])
        given = (*given[:_TABLE], table, *given[_TABLE + 1 :])
    return given, options
