"""Weight updates: hooks, by SGLang's own registry, that tell a linker when the weights under it change.

SGLang flushes its prefix cache behind an update, and a flush alone does not say whether there was one.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvlinker.errors import UnsupportedOperationError
from kvlinker_sglang.weights import WeightsWatch

__all__ = ["WatchesWeights", "watch_weight_updates"]

_CLASS = f"{SchedulerWeightUpdaterManager.__module__}.{SchedulerWeightUpdaterManager.__qualname__}"
_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)
_FLUSH = "flush_cache_after_weight_update"
_MARK = "__kvlinker_watches__"


@runtime_checkable
class WatchesWeights(Protocol):
    """A linker that wants to know."""

    weights: WeightsWatch


class _Wrapper(Protocol):
    cache_linker: object


class _Cache(Protocol):
    linker: _Wrapper | None


class _Scheduler(Protocol):
    tree_cache: _Cache


class _Updater(Protocol):
    scheduler: _Scheduler | None


class _Update(Protocol):
    weight_version: str | None


def watch_weight_updates() -> None:
    """Set hooks on SGLang's updates of weights, once in a process.

    Raises:
        UnsupportedOperationError: something else keeps the hooks from being set.
    """
    methods = vars(SchedulerWeightUpdaterManager)
    if _MARK in methods:
        return
    before = {name: methods[name] for name in (*_UPDATES, _FLUSH)}
    for name in _UPDATES:
        HookRegistry.register(f"{_CLASS}.{name}", _begin, HookType.BEFORE)
    HookRegistry.register(f"{_CLASS}.{_FLUSH}", _name, HookType.BEFORE)
    HookRegistry.apply_hooks()
    if kept := sorted(name for name, method in before.items() if methods[name] is method):
        msg = (
            f"{_CLASS} cannot be watched for new weights: {', '.join(kept)} was hooked by another plugin before; "
            f"leave that plugin out with SGLANG_PLUGINS, or run SGLang without a linker"
        )
        raise UnsupportedOperationError(msg)
    setattr(SchedulerWeightUpdaterManager, _MARK, True)


def _begin(updater: _Updater, *_: object, **__: object) -> None:
    watch = _watch_of(updater)
    if watch is not None:
        watch.begin_update()


def _name(updater: _Updater, recv_req: _Update, success: object, *_: object) -> None:
    watch = _watch_of(updater)
    if watch is not None and success:
        watch.name_update(recv_req.weight_version)


def _watch_of(updater: _Updater) -> WeightsWatch | None:
    wrapper = updater.scheduler.tree_cache.linker if updater.scheduler is not None else None
    linker = wrapper.cache_linker if wrapper is not None else None
    return linker.weights if isinstance(linker, WatchesWeights) else None
