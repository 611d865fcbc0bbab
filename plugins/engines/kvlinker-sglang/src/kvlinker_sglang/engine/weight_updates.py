"""Weight updates: hooks, by SGLang's own registry, that tell a linker when the weights under it change.

SGLang flushes its prefix cache behind an update, and a flush alone does not say whether there was one. Weights that
come in several updates, or past SGLang into its memory, lie between the begin and the end of a session.
SGLang's checker of weights may write random ones over them, and flushes nothing.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_serving

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
_BEGIN_SESSION = "begin_weight_update"
_END_SESSION = "end_weight_update"
_CHECK = "check_weights"
_LOOKS = frozenset({"checksum", "compare", "snapshot"})
"""What SGLang's checker does that leaves weights as they are; `reset_tensors` makes random ones of them."""
_MARK = "__kvlinker_watches__"


@runtime_checkable
class WatchesWeights(Protocol):
    """A linker that wants to know."""

    weights: WeightsWatch

    def reset(self) -> None:
        """Take the namespace of the weights, and give up what is under way."""
        ...


class _Wrapper(Protocol):
    cache_linker: object


class _Cache(Protocol):
    linker: _Wrapper | None

    def total_size(self) -> tuple[int, int]: ...


class _Scheduler(Protocol):
    tree_cache: _Cache


class _Updater(Protocol):
    scheduler: _Scheduler | None

    def is_fully_idle(self, *, ignore_waiting: bool) -> bool: ...


class _Update(Protocol):
    weight_version: str | None


class _Check(Protocol):
    action: str


class _Answer(Protocol):
    success: bool


def watch_weight_updates() -> None:
    """Set hooks on SGLang's updates of weights, once in a process.

    Raises:
        UnsupportedOperationError: something else keeps the hooks from being set.
    """
    methods = vars(SchedulerWeightUpdaterManager)
    if _MARK in methods:
        return
    hooks = {
        **dict.fromkeys(_UPDATES, (_begin, HookType.BEFORE)),
        _CHECK: (_begin_reset, HookType.BEFORE),
        _FLUSH: (_name, HookType.BEFORE),
        _BEGIN_SESSION: (_begin_session, HookType.BEFORE),
        _END_SESSION: (_end_session, HookType.AFTER),
    }
    before = {name: methods[name] for name in hooks}
    for name, (hook, kind) in hooks.items():
        HookRegistry.register(f"{_CLASS}.{name}", hook, kind)
    HookRegistry.apply_hooks()
    if kept := sorted(name for name, method in before.items() if methods[name] is method):
        msg = (
            f"{_CLASS} cannot be watched for new weights: {', '.join(kept)} was hooked by another plugin before; "
            f"leave that plugin out with SGLANG_PLUGINS, or run SGLang without a linker"
        )
        raise UnsupportedOperationError(msg)
    setattr(SchedulerWeightUpdaterManager, _MARK, True)


def _begin(updater: _Updater, *_: object, **__: object) -> None:
    linker = _linker_of(updater)
    if linker is not None:
        linker.weights.begin_update()


def _begin_reset(updater: _Updater, recv_req: _Check) -> None:
    if recv_req.action not in _LOOKS:
        _begin(updater)


def _name(updater: _Updater, recv_req: _Update, success: object, *_: object) -> None:
    linker = _linker_of(updater)
    if linker is not None and success:
        linker.weights.name_update(recv_req.weight_version)


def _begin_session(updater: _Updater, *_: object, **__: object) -> None:
    linker = _linker_of(updater)
    # A second begin is refused by SGLang, and the session that is open goes on.
    if linker is not None and not linker.weights.in_session:
        linker.weights.begin_session()


def _end_session(answer: _Answer, updater: _Updater, *_: object, **__: object) -> None:
    linker = _linker_of(updater)
    if linker is None or not linker.weights.in_session or not answer.success:
        return
    linker.weights.end_session()
    if _holds_nothing(updater):
        linker.reset()


def _holds_nothing(updater: _Updater) -> bool:
    """Whether no KV of the weights before the session's end is left, or under way into the prefix cache."""
    scheduler = updater.scheduler
    return (
        scheduler is not None
        and not get_serving().enable_streaming_session  # keeps KV outside of the prefix cache
        and updater.is_fully_idle(ignore_waiting=True)
        and not any(scheduler.tree_cache.total_size())
    )


def _linker_of(updater: _Updater) -> WatchesWeights | None:
    wrapper = updater.scheduler.tree_cache.linker if updater.scheduler is not None else None
    linker = wrapper.cache_linker if wrapper is not None else None
    return linker if isinstance(linker, WatchesWeights) else None
