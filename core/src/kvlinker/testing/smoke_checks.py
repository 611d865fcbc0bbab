"""What can be asked of any installed plugin without knowing its engine, its model or its server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kvlinker.description import DescribeRequest, KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.discovery import load_plugins
from kvlinker.errors import KVLinkerError, PluginError
from kvlinker.installed import PluginKind, PluginRecord, PluginStatus, available, plugin_not_found
from kvlinker.plugins import one_line
from kvlinker.probing import probe_plugins
from kvlinker.registry import PluginRegistry
from kvlinker.selftest import self_test
from kvlinker.testing.cache_examples import Allocate, CacheExample
from kvlinker.testing.fresh_process import ask_afresh, heavy_imports
from kvlinker.testing.model_checks import STRANGE_FAMILY
from kvlinker.testing.verdicts import expect, fail

__all__ = ["SmokeCheck", "smoke_checks"]

_DEADLINE_S = 60.0
_STRANGE_OPTION = "kvlinker_kit_unknown"
_STRANGE_ENGINE = "kvlinker-kit-unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeCheck:
    """One thing that holds for a plugin."""

    name: str
    """Kind of the plugin, and what holds."""
    run: Callable[[], None]
    """Raises AssertionError where it does not hold."""


def smoke_checks(
    name: str, *, store_config: Mapping[str, object] | None = None
) -> tuple[SmokeCheck, ...]:
    """Return the checks of an installed plugin, of each kind that it is.

    Args:
        name: public name, or `distribution:name`.
        store_config: options of a store to open and to move one small object to and from; None to open none.

    Raises:
        PluginNotFoundError: no distribution provides it.
        KVLinkerError: options are given and the plugin is no store.
    """
    records = [record for record in available() if record.answers_to(name)]
    if not records:
        raise plugin_not_found(
            name, available(), kinds=tuple(PluginKind), asked="the plugin to be tested is"
        )
    checks: list[SmokeCheck] = []
    for record in records:
        checks.append(_check(record, "loads_in_a_process_of_its_own", _check_loads))
        checks.append(_check(record, "loads_no_engine_when_it_is_imported", _check_light))
        checks.extend(_of_kind(record, store_config))
    return tuple(checks)


def _check(record: PluginRecord, what: str, run: Callable[[PluginRecord], None]) -> SmokeCheck:
    return SmokeCheck(name=f"{record.kind.value}-{what}", run=partial(run, record))


def _of_kind(record: PluginRecord, store_config: Mapping[str, object] | None) -> list[SmokeCheck]:
    match record.kind:
        case PluginKind.MODEL:
            return [_check(record, "declines_an_unknown_family_and_touches_nothing", _check_model)]
        case PluginKind.ENGINE:
            return [_check(record, "declines_what_is_not_its_own", _check_engine)]
        case PluginKind.STORE:
            checks = [_check(record, "refuses_an_unknown_option", _check_options)]
            if store_config is not None:
                run = partial(_check_store, config=store_config)
                checks.append(_check(record, "takes_one_object_all_the_way", run))
            return checks


def _registry(record: PluginRecord) -> PluginRegistry:
    return load_plugins(allow=[record.qualified_name], kinds=[record.kind], strict=True)


def _check_loads(record: PluginRecord) -> None:
    """Fail unless the plugin loads where nothing else does."""
    probed = probe_plugins(_DEADLINE_S, allow=[record.qualified_name], environ={})
    for found in probed:
        if found.qualified_name == record.qualified_name and found.kind is record.kind:
            if found.status is not PluginStatus.LOADED:
                fail(f"{found} is {found.status.value}: {found.reason}")
            return
    fail(f"{record} is not there any more")


def _check_light(record: PluginRecord) -> None:
    """Fail if importing the plugin loads an engine, a tensor library or a store client."""
    if loaded := heavy_imports(record.module):
        fail(f"{record}: importing it loads {', '.join(loaded)}; import them inside its functions")


def _check_model(record: PluginRecord) -> None:
    """Fail unless a cache that nobody lays out is declined, from the description alone."""
    example = CacheExample(name="unknown", describe=_strange_cache, pages=4)
    if _registry(record).model(record.qualified_name).match(example.made_up()) is not None:
        fail(f"{record}: takes a cache of the family {STRANGE_FAMILY!r}, which it cannot know")
    if events := ask_afresh(record.module, [example]).events:
        fail(f"{record}: touches more than the description: {'; '.join(events[:3])}")


def _strange_cache(allocate: Allocate) -> KVCacheDescription:
    return KVCacheDescription(
        family=STRANGE_FAMILY,
        page_size=16,
        buffers={"anything": (allocate(64, 8),)},
        layers=(LayerFacts(layer=0, global_layer=0),),
        logical_pools=(LogicalPool(name="kv", page_size=16),),
    )


def _check_engine(record: PluginRecord) -> None:
    """Fail unless objects that are no KV cache, and other engines, are declined with None."""
    plugin = _registry(record).engine(record.qualified_name)
    request = DescribeRequest(page_size=16)
    for engine in (record.name, _STRANGE_ENGINE):
        try:
            answer = plugin.describe(engine, object(), request)
        except KVLinkerError as error:
            fail(f"{record}: raises for an object of {engine!r} that is no KV cache: {error}")
        expect(f"{record}, asked about an object of {engine!r} that is no KV cache,", answer, None)


def _check_options(record: PluginRecord) -> None:
    """Fail unless an option that no store has is refused by its name."""
    plugin = _registry(record).store(record.qualified_name)
    try:
        store = plugin.open({_STRANGE_OPTION: 1})
    except PluginError as error:
        fail(f"{error}; refuse an option with a ContractError that names it")
    except KVLinkerError as error:
        if _STRANGE_OPTION not in str(error):
            fail(
                f"{record}: refuses the unknown option {_STRANGE_OPTION!r} without naming it: {error}"
            )
        return
    store.close()
    fail(f"{record}: opens with the unknown option {_STRANGE_OPTION!r}; refuse what is misspelt")


def _check_store(record: PluginRecord, *, config: Mapping[str, object]) -> None:
    """Fail unless one object can be put, found, read and deleted, and closing is idempotent."""
    store = _registry(record).store(record.qualified_name).open(config)
    try:
        report = self_test(store)
        problems = [f"{step.name}: {step.problem}" for step in report.problems]
        expect(f"the self-test of {record}", problems, [])
    finally:
        store.close()
    try:
        store.close()
    except Exception as error:  # noqa: BLE001 - whatever it raises is a finding
        fail(f"{record}: closing twice raises {one_line(error)}")
