"""Loads a plugin's module as the distribution under test would register it: under each kind that it has hooks of."""

from __future__ import annotations

from types import ModuleType

from kvlinker.discovery import load_modules
from kvlinker.registry import PluginRegistry
from kvlinker.testing.verdicts import fail

__all__ = ["load_under_test"]


def load_under_test(module: object, *, name: str) -> PluginRegistry:
    """Return a registry of one module alone, under a public name.

    Raises:
        AssertionError: it is no module.
        BrokenPluginError: it does not follow the plugin API.
    """
    if not isinstance(module, ModuleType):
        fail(f"`plugin` must be the module that the entry point names, got {type(module).__name__}")
    hooks, plugin = vars(module), {name: module}
    return load_modules(
        models=plugin if "match_kv_cache" in hooks else None,
        stores=plugin if "open_store" in hooks else None,
        engines=plugin if "describe_kv_cache" in hooks else None,
    )
