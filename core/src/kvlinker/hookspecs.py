"""The plugin API: what a plugin may implement, and the version that it must state.

A plugin is a module with functions marked `@hookimpl`, named in an entry point of `kvlinker.models`,
`kvlinker.stores` or `kvlinker.engines`. `describe_plugin` is always needed; a model plugin needs
`match_kv_cache`, a store plugin `open_store`, an engine plugin `describe_kv_cache`. The others are optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import pluggy

from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.errors import ContractError
from kvlinker.model_config import ModelConfig, ModelConfigRequest
from kvlinker.pools import DevicePoolGroup
from kvlinker.store import Store
from kvlinker.store_tools import StoreTools

__all__ = [
    "API_VERSION",
    "PROJECT",
    "DemoRequest",
    "ModelConfig",
    "ModelConfigRequest",
    "PluginInfo",
    "StrategyMatch",
    "build_direct_linker_pool_group",
    "describe_kv_cache",
    "describe_model_config",
    "describe_plugin",
    "hookimpl",
    "match_kv_cache",
    "open_store",
    "open_store_tools",
    "run_demo",
]

API_VERSION = 1
"""Raised when a hook changes so that an older plugin would no longer do the right thing."""
PROJECT = "kvlinker"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginInfo:
    """What a plugin says of itself."""

    api_version: int
    """The API_VERSION that the plugin was written for, as a literal: an imported one would always agree."""
    summary: str
    """One line for people."""

    def __post_init__(self) -> None:
        if isinstance(self.api_version, bool) or not isinstance(self.api_version, int):
            msg = f"api_version must be an integer such as {API_VERSION}, got {self.api_version!r}"
            raise ContractError(msg)
        if not isinstance(self.summary, str) or len(self.summary.splitlines()) != 1:
            msg = f"summary must be one line of text, got {self.summary!r}"
            raise ContractError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyMatch:
    """A model plugin's claim to a KV cache."""

    buffers: frozenset[str]
    """Every role of the description, claimed."""
    omitted: Mapping[str, str] = field(default_factory=dict)
    """Span label to the reason why the span is neither stored nor restored."""
    specializes: frozenset[str] = frozenset()
    """Plugins that step back where this one matches too; a name that is not installed changes nothing."""

    def __post_init__(self) -> None:
        for name, value in (("buffers", self.buffers), ("specializes", self.specializes)):
            if isinstance(value, str):
                msg = f"{name} must be a set of names, got the text {value!r}; write {{{value!r}}}"
                raise ContractError(msg)
            object.__setattr__(self, name, frozenset(value))
        object.__setattr__(self, "omitted", MappingProxyType(dict(self.omitted)))
        if blank := [label for label, reason in self.omitted.items() if not reason.strip()]:
            msg = f"span {blank[0]!r} is omitted without a reason; say why its bytes are not needed"
            raise ContractError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    """How an engine is to show itself."""

    folder: Path
    """Exists, is empty, and takes whatever the demo stores."""
    quick: bool = False
    """Show one small model alone."""


# What follows is the form of each hook: pluggy calls what plugins implement, and nobody calls these.


@hookspec
def describe_plugin() -> PluginInfo:
    """Return the plugin's API version and a summary of one line; called before any other hook."""
    raise NotImplementedError


@hookspec
def describe_kv_cache(
    engine: str, kv_cache: object, request: DescribeRequest
) -> KVCacheDescription | None:
    """Return the facts of an engine's KV cache, or None if it is not this adapter's; exactly one may answer."""
    raise NotImplementedError


@hookspec
def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
    """Return a claim to the whole cache, or None; a pure function of the description."""
    raise NotImplementedError


@hookspec
def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
    """Lay the cache out; called for the selected plugin alone."""
    raise NotImplementedError


@hookspec
def describe_model_config(
    config: ModelConfig, request: ModelConfigRequest
) -> KVCacheDescription | None:
    """Return the cache that a model would have, over made-up addresses, or None if it is not this plugin's."""
    raise NotImplementedError


@hookspec
def open_store(config: Mapping[str, object]) -> Store:
    """Open the plugin's store; unknown options are refused with the closest match."""
    raise NotImplementedError


@hookspec
def open_store_tools(path: Path) -> StoreTools | None:
    """Return tools for the store that lies in a folder, or None if it is not this plugin's; locks nothing yet."""
    raise NotImplementedError


@hookspec
def run_demo(request: DemoRequest) -> bool:
    """Show the engine continuing, in a new process, what another process stored; return whether all of it was right.

    Writes to standard output for people, and files into the request's folder alone.
    """
    raise NotImplementedError
