"""What a loaded plugin looks like to the rest of the core: typed calls, typed answers, typed errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.errors import (
    KVLinkerError,
    PluginContractError,
    PluginError,
    UnsupportedOperationError,
)
from kvlinker.hookspecs import DemoRequest, ModelConfig, ModelConfigRequest, StrategyMatch
from kvlinker.installed import PluginKind, PluginRecord
from kvlinker.pools import DevicePoolGroup
from kvlinker.store import Store
from kvlinker.store_tools import StoreTools

__all__ = ["EnginePlugin", "HookCall", "ModelPlugin", "Plugin", "StorePlugin", "one_line"]

_T = TypeVar("_T")


class HookCall(Protocol):
    """One plugin's implementation of one hook."""

    def __call__(self, **arguments: object) -> object:
        """Return what the implementation returned."""
        ...


def one_line(error: BaseException) -> str:
    """Return an error's type and text in one line; an error that cannot be shown is no second error."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - the text comes from a plugin
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Plugin:
    """A plugin that was loaded and follows the plugin API."""

    kind: ClassVar[PluginKind]

    def __init__(self, record: PluginRecord, hooks: Mapping[str, HookCall]) -> None:
        self.record = record
        self._hooks = hooks

    @property
    def name(self) -> str:
        """Public name."""
        return self.record.name

    def provides(self, hook: str) -> bool:
        """Return whether the plugin implements the hook."""
        return hook in self._hooks

    def _ask(self, hook: str, expected: type[_T], **arguments: object) -> _T | None:
        if not self.provides(hook):
            msg = f"{self.record}: does not implement {hook}; this plugin cannot do that"
            raise UnsupportedOperationError(msg)
        try:
            answer = self._hooks[hook](**arguments)
        except KVLinkerError:
            raise
        except (Exception, SystemExit) as error:
            # A plugin runs inside the engine: whatever it raises, the engine gets an error it can catch.
            msg = f"{self.record}: {hook} raised {one_line(error)}"
            raise PluginError(msg) from error
        if answer is None or isinstance(answer, expected):
            return answer
        msg = (
            f"{self.record}: {hook} returned {type(answer).__name__}, expected {expected.__name__}"
        )
        raise PluginContractError(msg)

    def _demand(self, hook: str, expected: type[_T], **arguments: object) -> _T:
        answer = self._ask(hook, expected, **arguments)
        if answer is None:
            msg = f"{self.record}: {hook} returned nothing, expected {expected.__name__}"
            raise PluginContractError(msg)
        return answer


class ModelPlugin(Plugin):
    """A strategy: it recognises a KV cache and lays it out, from the description alone."""

    kind = PluginKind.MODEL

    def match(self, description: KVCacheDescription) -> StrategyMatch | None:
        """Return the plugin's claim to the cache, or None.

        Raises:
            PluginError: the plugin raised, or answered with something else.
        """
        return self._ask("match_kv_cache", StrategyMatch, description=description)

    @property
    def can_build(self) -> bool:
        """Whether the plugin can lay a cache out, not only recognise it."""
        return self.provides("build_direct_linker_pool_group")

    def build(self, description: KVCacheDescription) -> DevicePoolGroup:
        """Return the group, as the plugin made it; `selection.build_group` checks it too.

        Raises:
            UnsupportedOperationError: the plugin only recognises caches.
            PluginError: the plugin raised, or answered with something else.
        """
        hook = "build_direct_linker_pool_group"
        return self._demand(hook, DevicePoolGroup, description=description)

    @property
    def reads_configs(self) -> bool:
        """Whether the plugin can tell a model's cache from the model's configuration."""
        return self.provides("describe_model_config")

    def describe_config(
        self, config: ModelConfig, request: ModelConfigRequest
    ) -> KVCacheDescription | None:
        """Return the cache that the model would have, or None if it is not this plugin's.

        Raises:
            UnsupportedOperationError: the plugin reads no configurations.
            PluginError: the plugin raised, or answered with something else.
        """
        hook = "describe_model_config"
        return self._ask(hook, KVCacheDescription, config=config, request=request)


class EnginePlugin(Plugin):
    """An engine adapter: it reports the facts of an engine's KV cache."""

    kind = PluginKind.ENGINE

    def describe(
        self, engine: str, kv_cache: object, request: DescribeRequest
    ) -> KVCacheDescription | None:
        """Return the facts of the cache, or None if it is not this adapter's.

        Raises:
            PluginError: the plugin raised, or answered with something else.
        """
        return self._ask(
            "describe_kv_cache",
            KVCacheDescription,
            engine=engine,
            kv_cache=kv_cache,
            request=request,
        )

    @property
    def has_demo(self) -> bool:
        """Whether the plugin can show the engine at work."""
        return self.provides("run_demo")

    def demo(self, request: DemoRequest) -> bool:
        """Show the engine at work, and return whether everything was right.

        Raises:
            UnsupportedOperationError: the plugin has no demo.
            PluginError: the plugin raised, or answered with something else.
        """
        return self._demand("run_demo", bool, request=request)


class StorePlugin(Plugin):
    """A kind of store that can be opened."""

    kind = PluginKind.STORE

    def open(self, config: Mapping[str, object]) -> Store:
        """Open a store with the plugin's own options.

        Raises:
            PluginError: the plugin raised, or answered with something else.
        """
        return self._demand("open_store", Store, config=config)  # type: ignore[type-abstract]  # for isinstance alone

    @property
    def has_tools(self) -> bool:
        """Whether the plugin can look after stores in folders."""
        return self.provides("open_store_tools")

    def tools(self, path: Path) -> StoreTools | None:
        """Return tools for the store in a folder, or None if it is not one of this plugin's.

        Raises:
            UnsupportedOperationError: the plugin has no tools.
            PluginError: the plugin raised, or answered with something else.
        """
        return self._ask("open_store_tools", StoreTools, path=path)  # type: ignore[type-abstract]  # for isinstance alone
