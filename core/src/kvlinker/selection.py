"""Selects the one strategy that takes a whole KV cache, builds its group and checks what was built.

Every usable plugin is asked. Order of installation or registration changes nothing: two that match and
do not specialize one another are an error, and so is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kvlinker.coverage import claim_problem, group_problem
from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.errors import (
    AmbiguousStrategyError,
    KVLinkerError,
    PluginContractError,
    PluginError,
    UnsupportedKVCacheError,
    UnsupportedOperationError,
)
from kvlinker.hookspecs import StrategyMatch
from kvlinker.installed import PluginKind, PluginRecord, PluginStatus, install_hint
from kvlinker.plugins import ModelPlugin
from kvlinker.pools import DevicePoolGroup
from kvlinker.registry import PluginRegistry

__all__ = [
    "Outcome",
    "Selection",
    "Verdict",
    "build_group",
    "describe_cache",
    "judge",
    "resolve_hybrid_device_pool_group",
    "select_strategy",
]


class Outcome(Enum):
    """What a plugin made of a description."""

    SELECTED = "selected"
    TIED = "tied"
    """It takes the whole cache, and so does another one."""
    STEPPED_BACK = "stepped back"
    """It takes the whole cache, and one that specializes it does too."""
    INCOMPLETE = "incomplete"
    """Its claim leaves something out, or names what is not there."""
    DECLINED = "declined"
    REFUSED = "refused"
    """It knows the family, and this cache is not one that it lays out."""
    FAILED = "failed"
    """It raised something else, or answered with what is no answer."""
    UNUSABLE = "unusable"
    """It is broken, disabled or doubly claimed, and was not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one plugin made of a description, and why."""

    record: PluginRecord
    outcome: Outcome
    reason: str
    match: StrategyMatch | None = None
    error: KVLinkerError | None = None
    """What the plugin raised."""

    def __str__(self) -> str:
        return (
            f"{self.record.name} ({self.record.distribution} {self.record.version}): {self.reason}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The one strategy that takes the whole cache, and its claim."""

    plugin: ModelPlugin
    match: StrategyMatch

    @property
    def name(self) -> str:
        """Public name of the strategy."""
        return self.plugin.name


def select_strategy(
    description: KVCacheDescription, registry: PluginRegistry, *, strategy: str | None = None
) -> Selection:
    """Return the one strategy that takes the whole cache.

    Args:
        description: what the engine adapter reported.
        registry: the plugins to ask.
        strategy: a plugin's name, or `distribution:name`, that settles a tie; its claim must be whole all the same.

    Raises:
        UnsupportedKVCacheError: no plugin takes it, or the named one does not; the text has every plugin's reason.
        AmbiguousStrategyError: several take it, and none specializes the others.
        UnsupportedOperationError: the one that takes it cannot lay it out.
        PluginError: the named plugin is absent, disabled, broken or doubly claimed.
    """
    verdicts = judge(description, registry, strategy=strategy)
    winners = [verdict for verdict in verdicts if verdict.outcome is Outcome.SELECTED]
    tied = [verdict for verdict in verdicts if verdict.outcome is Outcome.TIED]
    if tied:
        raise _ambiguous(tied, description)
    if not winners or winners[0].match is None:
        raise _unsupported(verdicts, description, registry, asked=strategy)
    plugin = registry.model(winners[0].record.qualified_name)
    if not plugin.can_build:
        msg = (
            f"{plugin.record}: recognises this KV cache (family {description.family!r}) and does not implement "
            f"build_direct_linker_pool_group; it cannot be linked until the plugin does"
        )
        raise UnsupportedOperationError(msg)
    return Selection(plugin=plugin, match=winners[0].match)


def judge(
    description: KVCacheDescription, registry: PluginRegistry, *, strategy: str | None = None
) -> tuple[Verdict, ...]:
    """Return what every model plugin makes of the description, by name and distribution.

    Args:
        description: what the engine adapter reported.
        registry: the plugins to ask.
        strategy: ask this one alone.

    Raises:
        PluginError: the named plugin is absent, disabled, broken or doubly claimed.
    """
    if strategy is not None:
        return _settled((_verdict(registry.model(strategy), description),))
    plugins = {plugin.record: plugin for plugin in registry.models()}
    records = [record for record in registry.records if record.kind is PluginKind.MODEL]
    return _settled(
        tuple(
            _verdict(plugins[record], description) if record in plugins else _unusable(record)
            for record in records
        )
    )


def build_group(selection: Selection, description: KVCacheDescription) -> DevicePoolGroup:
    """Return the group that the strategy lays out, compared with the description byte range by byte range.

    Raises:
        PluginContractError: the group forgets, repeats or alters a span, or has other pages, layers or ranks.
        PluginError: the plugin raised.
        KVLinkerError: whatever the plugin refuses with.
    """
    group = selection.plugin.build(description)
    if problem := group_problem(group, selection.match, description):
        msg = f"{selection.plugin.record}: {problem}"
        raise PluginContractError(msg)
    return group


def describe_cache(
    engine: str, kv_cache: object, request: DescribeRequest, *, registry: PluginRegistry
) -> KVCacheDescription:
    """Return the description of the one engine adapter that knows the cache.

    Raises:
        UnsupportedKVCacheError: no adapter knows it; the text has every adapter's reason.
        AmbiguousStrategyError: several adapters describe it.
        PluginContractError: the description has another page size than was asked for.
    """
    answers: dict[PluginRecord, KVCacheDescription | None] = {}
    failures: dict[PluginRecord, KVLinkerError] = {}
    for plugin in registry.engines():
        try:
            answers[plugin.record] = plugin.describe(engine, kv_cache, request)
        except KVLinkerError as error:
            failures[plugin.record] = error
    described = [(record, answer) for record, answer in answers.items() if answer is not None]
    if len(described) > 1:
        names = ", ".join(str(record) for record, _ in described)
        msg = f"several adapters describe this KV cache: {names}; disable all but one with KVLINKER_DISABLED_PLUGINS"
        raise AmbiguousStrategyError(msg)
    if not described:
        raise _undescribed(engine, kv_cache, registry, failures)
    return _of_page_size(*described[0], request.page_size)


def resolve_hybrid_device_pool_group(
    engine: str,
    kv_cache: object,
    request: DescribeRequest,
    *,
    registry: PluginRegistry,
    strategy: str | None = None,
) -> DevicePoolGroup:
    """Go the whole way from an engine's KV cache to a checked group: describe, select, build, check.

    Args:
        engine: the engine's name, such as `sglang`.
        kv_cache: the engine's own pool object.
        request: page size and what else only the caller knows.
        registry: from `load_plugins`.
        strategy: a plugin's name that settles a tie.

    Raises:
        KVLinkerError: as `describe_cache`, `select_strategy` and `build_group` do.
    """
    description = describe_cache(engine, kv_cache, request, registry=registry)
    return build_group(select_strategy(description, registry, strategy=strategy), description)


# ---- verdicts ---------------------------------------------------------------------------------


def _verdict(plugin: ModelPlugin, description: KVCacheDescription) -> Verdict:
    record = plugin.record
    try:
        match = plugin.match(description)
    except KVLinkerError as error:
        return _raised(record, error)
    if match is None:
        return Verdict(record=record, outcome=Outcome.DECLINED, reason="declined")
    if problem := claim_problem(match, description):
        return Verdict(record=record, outcome=Outcome.INCOMPLETE, reason=problem, match=match)
    return Verdict(record=record, outcome=Outcome.TIED, reason="takes the whole cache", match=match)


def _raised(record: PluginRecord, error: KVLinkerError) -> Verdict:
    if isinstance(error, PluginError):
        outcome, reason = Outcome.FAILED, str(error).removeprefix(f"{record}: ")
    else:
        outcome, reason = Outcome.REFUSED, f"refuses it: {error}"
    return Verdict(record=record, outcome=outcome, reason=reason, error=error)


def _unusable(record: PluginRecord) -> Verdict:
    reason = f"{record.status.value}: {record.reason}"
    return Verdict(record=record, outcome=Outcome.UNUSABLE, reason=reason)


def _settled(verdicts: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
    claims = {
        v.record.name: v.match.specializes
        for v in verdicts
        if v.match is not None and v.outcome is Outcome.TIED
    }
    reach = {name: _reachable(name, claims) for name in claims}
    above = {
        name: sorted(other for other in claims if name in reach[other] and other not in reach[name])
        for name in claims
    }
    left = [name for name in claims if not above[name]]
    return tuple(
        _placed(verdict, above[verdict.record.name], alone=len(left) == 1)
        if verdict.outcome is Outcome.TIED
        else verdict
        for verdict in verdicts
    )


def _reachable(start: str, claims: Mapping[str, frozenset[str]]) -> frozenset[str]:
    # Names that did not match are not followed: a plugin that is not here cannot make another step back.
    found: set[str] = set()
    pending = [start]
    while pending:
        fresh = (claims[pending.pop()] & claims.keys()) - found
        found |= fresh
        pending.extend(fresh)
    return frozenset(found)


def _placed(verdict: Verdict, above: Sequence[str], *, alone: bool) -> Verdict:
    if above:
        reason = f"matched, and steps back for {', '.join(above)}"
        return replace(verdict, outcome=Outcome.STEPPED_BACK, reason=reason)
    return replace(verdict, outcome=Outcome.SELECTED) if alone else verdict


# ---- refusals ---------------------------------------------------------------------------------


def _unsupported(
    verdicts: Sequence[Verdict],
    description: KVCacheDescription,
    registry: PluginRegistry,
    *,
    asked: str | None,
) -> UnsupportedKVCacheError:
    roles = ", ".join(sorted(description.buffers))
    who = "no plugin takes" if asked is None else f"the strategy {asked!r} does not take"
    lines = [f"{who} this KV cache (family {description.family!r}, buffers {roles})"]
    lines += [f"  {verdict}" for verdict in verdicts] or ["  no model plugin is installed"]
    lines += _hint(PluginKind.MODEL, description.family, registry)
    error = UnsupportedKVCacheError("\n".join(lines))
    error.__cause__ = next((verdict.error for verdict in verdicts if verdict.error), None)
    return error


def _ambiguous(tied: Sequence[Verdict], description: KVCacheDescription) -> AmbiguousStrategyError:
    names = ", ".join(str(verdict) for verdict in tied)
    first = tied[0].record.name
    msg = (
        f"several plugins take this KV cache (family {description.family!r}): {names}; choose one, such as "
        f"strategy={first!r}, or let one name the other in StrategyMatch.specializes (a cycle settles nothing)"
    )
    return AmbiguousStrategyError(msg)


def _undescribed(
    engine: str,
    kv_cache: object,
    registry: PluginRegistry,
    failures: Mapping[PluginRecord, KVLinkerError],
) -> UnsupportedKVCacheError:
    what = f"{type(kv_cache).__module__}.{type(kv_cache).__qualname__}"
    lines = [f"no engine adapter describes this KV cache of {engine!r} ({what})"]
    adapters = (record for record in registry.records if record.kind is PluginKind.ENGINE)
    lines += [f"  {_undescribed_by(record, failures.get(record))}" for record in adapters]
    lines += _hint(PluginKind.ENGINE, engine, registry)
    error = UnsupportedKVCacheError("\n".join(lines))
    error.__cause__ = next(iter(failures.values()), None)
    return error


def _undescribed_by(record: PluginRecord, error: KVLinkerError | None) -> Verdict:
    if error is not None:
        return _raised(record, error)
    if record.status is PluginStatus.LOADED:
        return Verdict(record=record, outcome=Outcome.DECLINED, reason="declined")
    return _unusable(record)


def _hint(kind: PluginKind, name: str, registry: PluginRegistry) -> list[str]:
    installed = any(record.kind is kind and record.name == name for record in registry.records)
    hint = install_hint(kind, name)
    return [f"try: {hint}"] if hint and not installed else []


def _of_page_size(
    record: PluginRecord, description: KVCacheDescription, page_size: int
) -> KVCacheDescription:
    if description.page_size != page_size:
        msg = f"{record}: described pages of {description.page_size} slots, but the engine's tree has {page_size}"
        raise PluginContractError(msg)
    return description
