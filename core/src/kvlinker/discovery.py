"""Loads installed plugins, each under its own guard, into a registry that is passed around.

The only module that touches pluggy's plugin manager. Every plugin has a manager of its own, so that
no plugin can see, order or break the hooks of another. Nothing here is kept between calls: a process
that was forked or spawned loads anew and gets the same.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from traceback import TracebackException
from types import MappingProxyType, ModuleType
from typing import TypeAlias

import pluggy

from kvlinker import hookspecs
from kvlinker.admission import admit, is_strict
from kvlinker.errors import PluginContractError
from kvlinker.installed import PluginKind, PluginRecord, PluginStatus, available
from kvlinker.plugins import EnginePlugin, HookCall, ModelPlugin, Plugin, StorePlugin, one_line
from kvlinker.registry import FACADES, LoadOutcome, PluginRegistry, open_store
from kvlinker.spelling import nearest_names

__all__ = [
    "EnginePlugin",
    "ModelPlugin",
    "Plugin",
    "PluginKind",
    "PluginRecord",
    "PluginRegistry",
    "PluginStatus",
    "StorePlugin",
    "available",
    "inspect_plugin",
    "load_modules",
    "load_plugins",
    "open_store",
]

_logger = logging.getLogger(__name__)

_DESCRIBE = "describe_plugin"
_HOOKS: Mapping[PluginKind, tuple[str, ...]] = MappingProxyType(
    {
        PluginKind.MODEL: (
            "match_kv_cache",
            "build_direct_linker_pool_group",
            "describe_model_config",
        ),
        PluginKind.STORE: ("open_store", "open_store_tools"),
        PluginKind.ENGINE: ("describe_kv_cache", "run_demo"),
    }
)
"""Hooks of each kind; a plugin without the first one would never be asked anything."""
_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        spec.__name__: tuple(inspect.signature(spec).parameters)
        for spec in (
            hookspecs.describe_plugin,
            hookspecs.describe_kv_cache,
            hookspecs.match_kv_cache,
            hookspecs.build_direct_linker_pool_group,
            hookspecs.describe_model_config,
            hookspecs.open_store,
            hookspecs.open_store_tools,
            hookspecs.run_demo,
        )
    }
)


def load_plugins(
    *,
    allow: Iterable[str] | None = None,
    deny: Iterable[str] | None = None,
    strict: bool | None = None,
    environ: Mapping[str, str] | None = None,
    kinds: Collection[PluginKind] = tuple(PluginKind),
    allowed_by: str = "the argument 'allow'",
) -> PluginRegistry:
    """Load every installed plugin that may be loaded; a broken one is kept with its cause and hurts no other.

    Args:
        allow: names, or `distribution:name`, beside those of KVLINKER_PLUGINS; only what every list holds is imported.
        deny: names, or `distribution:name`, beside those of KVLINKER_DISABLED_PLUGINS; they win.
        strict: raise for a broken or doubly claimed plugin at once; KVLINKER_STRICT_PLUGINS by default.
        environ: where the variables are read; the process's environment by default.
        kinds: what to load; plugins of other kinds are not imported.
        allowed_by: what `allow` is called in messages, such as the option that it was read from.

    Raises:
        PluginNotFoundError: a list holds a name that no distribution provides.
        BrokenPluginError: strict, and a plugin cannot be loaded.
        DuplicatePluginError: strict, and two distributions claim one name.
    """
    variables = os.environ if environ is None else environ
    raises = is_strict(strict, variables)
    installed = available()
    admitted = admit(installed, allow=allow, deny=deny, environ=variables, allowed_by=allowed_by)
    listed = _listed_kinds(installed)
    registry = PluginRegistry(_outcome(_of_kinds(record, kinds), listed) for record in admitted)
    _report(registry.records)
    if raises:
        registry.check()
    return registry


def load_modules(
    *,
    models: Mapping[str, ModuleType] | None = None,
    stores: Mapping[str, ModuleType] | None = None,
    engines: Mapping[str, ModuleType] | None = None,
) -> PluginRegistry:
    """Make a registry of modules that are at hand, such as a plugin under test, and of nothing else.

    Args:
        models: public name to module.
        stores: likewise.
        engines: likewise.

    Raises:
        BrokenPluginError: a module does not follow the plugin API.
    """
    given = (
        (PluginKind.MODEL, models or {}),
        (PluginKind.STORE, stores or {}),
        (PluginKind.ENGINE, engines or {}),
    )
    modules = [(_module_record(k, n, m), m) for k, group in given for n, m in group.items()]
    listed = _listed_kinds([record for record, _ in modules])
    registry = PluginRegistry(_guarded(record, listed, module) for record, module in modules)
    registry.check()
    return registry


def inspect_plugin(record: PluginRecord) -> PluginRecord:
    """Load one installed plugin in this process and return what became of it."""
    return _outcome(record, _listed_kinds(available())).record


# ---- loading ----------------------------------------------------------------------------------

_Listed: TypeAlias = Mapping[tuple[str, str], frozenset[PluginKind]]
"""Distribution and module to the kinds that they are listed under."""


def _listed_kinds(records: Sequence[PluginRecord]) -> _Listed:
    listed: dict[tuple[str, str], frozenset[PluginKind]] = {}
    for record in records:
        key = (record.distribution, record.module)
        listed[key] = listed.get(key, frozenset()) | {record.kind}
    return listed


def _of_kinds(record: PluginRecord, kinds: Collection[PluginKind]) -> PluginRecord:
    if record.kind in kinds or record.status is PluginStatus.DISABLED:
        return record
    asked = ", ".join(kind.group for kind in PluginKind if kind in kinds)
    reason = f"only {asked or 'nothing'} was asked for"
    return replace(record, status=PluginStatus.DISABLED, reason=reason)


def _module_record(kind: PluginKind, name: str, module: ModuleType) -> PluginRecord:
    return PluginRecord(
        name=name,
        kind=kind,
        distribution=module.__name__,
        version="as a module",
        module=module.__name__,
    )


def _outcome(record: PluginRecord, listed: _Listed) -> LoadOutcome:
    if record.status is PluginStatus.DISABLED:
        return LoadOutcome(record=record)
    return _guarded(record, listed, None)


def _guarded(record: PluginRecord, listed: _Listed, module: ModuleType | None) -> LoadOutcome:
    try:
        return _adopt(record, listed, module or _imported(record))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - see below
        # Importing runs anything, sys.exit and pytest.exit included; one plugin must not end the engine.
        trace = TracebackException.from_exception(error)
        reason = (
            str(error)
            if isinstance(error, PluginContractError)
            else f"loading it raised {one_line(error)}"
        )
        broken = replace(
            record, status=PluginStatus.BROKEN, reason=reason, traceback="".join(trace.format())
        )
        return LoadOutcome(record=broken, cause=_without_frames(error))


def _without_frames(error: BaseException) -> BaseException:
    # Frames keep every local variable of a failed import alive, for as long as the registry lives.
    pending, seen = [error], set()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        current.__traceback__ = None
        pending.extend(e for e in (current.__cause__, current.__context__) if e is not None)
        if isinstance(current, BaseExceptionGroup):
            pending.extend(current.exceptions)
    return error


def _imported(record: PluginRecord) -> ModuleType:
    if not record.module.replace(".", "_").isidentifier():
        msg = f"its entry point must name a module, got {record.module!r}"
        raise PluginContractError(msg)
    return importlib.import_module(record.module)


def _adopt(record: PluginRecord, listed: _Listed, module: ModuleType) -> LoadOutcome:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.register(module, name=record.qualified_name)
    callers = {caller.name: caller for caller in manager.get_hookcallers(module) or ()}
    _check_marked(module, callers)
    described = _described(callers)
    _check_version(record, described)
    for caller in callers.values():
        _check_hook(caller)
    kinds = listed[record.distribution, record.module]
    _check_kinds(record, callers, kinds)
    manager.add_hookspecs(hookspecs)
    loaded = replace(
        record,
        status=PluginStatus.LOADED,
        summary=described.summary,
        api_version=described.api_version,
    )
    hooks = {name: _hook_call(caller) for name, caller in callers.items()}
    return LoadOutcome(record=loaded, plugin=FACADES[record.kind](loaded, hooks))


def _hook_call(caller: pluggy.HookCaller) -> HookCall:
    def call(**arguments: object) -> object:
        answers: list[object] = caller(**arguments)
        return answers[0] if answers else None

    return call


# ---- checks -----------------------------------------------------------------------------------


def _check_marked(module: ModuleType, callers: Collection[str]) -> None:
    package = module.__name__.partition(".")[0]
    for name in _PARAMETERS:
        value: object = vars(module).get(name)
        if name in callers or not inspect.isfunction(value):
            continue
        if value.__module__.partition(".")[0] == package:
            msg = f"{name} is not marked as a hook, so it would never be called; decorate it with @hookimpl"
            raise PluginContractError(msg)


def _described(callers: Mapping[str, pluggy.HookCaller]) -> hookspecs.PluginInfo:
    if _DESCRIBE not in callers:
        msg = f"it does not implement {_DESCRIBE}, so its API version is unknown"
        raise PluginContractError(msg)
    _check_hook(callers[_DESCRIBE])
    answer = _hook_call(callers[_DESCRIBE])()
    if not isinstance(answer, hookspecs.PluginInfo):
        msg = f"{_DESCRIBE} returned {type(answer).__name__}, expected PluginInfo"
        raise PluginContractError(msg)
    return answer


def _check_version(record: PluginRecord, described: hookspecs.PluginInfo) -> None:
    theirs, ours = described.api_version, hookspecs.API_VERSION
    if theirs == ours:
        return
    older = record.distribution if theirs < ours else "kvlinker"
    msg = f"it speaks plugin API {theirs}, this kvlinker speaks {ours}; try: pip install --upgrade {older}"
    raise PluginContractError(msg)


def _check_hook(caller: pluggy.HookCaller) -> None:
    implementations = caller.get_hookimpls()
    if caller.name not in _PARAMETERS:
        if not all(one.optionalhook for one in implementations):
            msg = f"there is no hook {caller.name!r}; {_closest(caller.name, _PARAMETERS)}"
            raise PluginContractError(msg)
        return
    if len(implementations) > 1:
        msg = f"{caller.name} is implemented {len(implementations)} times; keep one"
        raise PluginContractError(msg)
    for one in implementations:
        if one.wrapper or one.hookwrapper:
            msg = f"{caller.name} is a hook wrapper; a plugin answers for itself and wraps no other"
            raise PluginContractError(msg)
        _check_parameters(caller.name, inspect.signature(one.function))


def _check_parameters(hook: str, signature: inspect.Signature) -> None:
    allowed = _PARAMETERS[hook]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for name, parameter in signature.parameters.items():
        if parameter.kind not in positional or parameter.default is not inspect.Parameter.empty:
            msg = f"{hook} takes {parameter}, which is never filled; take plain arguments without defaults"
            raise PluginContractError(msg)
        if name not in allowed:
            msg = f"{hook} has no argument {name!r}; {_closest(name, allowed)}"
            raise PluginContractError(msg)


def _closest(name: str, choices: Collection[str]) -> str:
    close = " or ".join(map(repr, nearest_names(name, choices)))
    return f"did you mean {close}?" if close else f"known: {', '.join(choices) or 'none'}"


def _check_kinds(
    record: PluginRecord, callers: Collection[str], kinds: Collection[PluginKind]
) -> None:
    needed = _HOOKS[record.kind][0]
    if needed not in callers:
        msg = f"it is listed under {record.kind.group} and does not implement {needed}"
        raise PluginContractError(msg)
    for kind, hooks in _HOOKS.items():
        for hook in hooks:
            if hook in callers and kind not in kinds:
                msg = f"it implements {hook} and would never be asked; list {record.module} under {kind.group} too"
                raise PluginContractError(msg)


def _report(records: Iterable[PluginRecord]) -> None:
    for record in records:
        if record.status is PluginStatus.LOADED:
            _logger.info("loaded %s, API %s", record, record.api_version)
        elif record.status is not PluginStatus.DISABLED:
            _logger.warning("%s is %s: %s", record, record.status.value, record.reason)
