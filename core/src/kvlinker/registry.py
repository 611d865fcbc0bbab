"""The registry: the plugins of one process, by name, and why the others cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from kvlinker.errors import BrokenPluginError, DisabledPluginError, DuplicatePluginError
from kvlinker.installed import PluginKind, PluginRecord, PluginStatus, plugin_not_found
from kvlinker.plugins import EnginePlugin, ModelPlugin, Plugin, StorePlugin
from kvlinker.store import Store

__all__ = ["FACADES", "LoadOutcome", "PluginRegistry", "open_store"]

_P = TypeVar("_P", bound=Plugin)

FACADES: Mapping[PluginKind, type[Plugin]] = MappingProxyType(
    {facade.kind: facade for facade in (ModelPlugin, StorePlugin, EnginePlugin)}
)
"""What a loaded plugin of each kind is called through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutcome:
    """A record, and the plugin or the reason why there is none."""

    record: PluginRecord
    plugin: Plugin | None = None
    cause: BaseException | None = None
    """What loading raised, without its frames."""


class PluginRegistry:
    """The plugins of one process: the loaded ones to call, and all others with the reason why not."""

    def __init__(self, outcomes: Iterable[LoadOutcome]) -> None:
        ordered = sorted(outcomes, key=lambda outcome: outcome.record.order())
        self._outcomes = tuple(_marked(tuple(ordered)))

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """Everything that is installed, whatever became of it."""
        return tuple(outcome.record for outcome in self._outcomes)

    def models(self) -> tuple[ModelPlugin, ...]:
        """Return the strategies that take part in a selection."""
        return self._loaded(ModelPlugin)

    def stores(self) -> tuple[StorePlugin, ...]:
        """Return the stores that can be opened, by name only: opening one may open a port."""
        return self._loaded(StorePlugin)

    def engines(self) -> tuple[EnginePlugin, ...]:
        """Return the adapters that are asked to describe a cache."""
        return self._loaded(EnginePlugin)

    def get(self, kind: PluginKind, name: str) -> Plugin:
        """Return a plugin by name, or by `distribution:name` where two distributions claim the name.

        Raises:
            PluginNotFoundError: no distribution provides it; the text has the closest match and what to install.
            DisabledPluginError: a list keeps it from loading.
            DuplicatePluginError: several distributions provide it; the text names them.
            BrokenPluginError: it is installed, and loading it failed; the cause is chained.
        """
        return self._find(FACADES[kind], name)

    def model(self, name: str) -> ModelPlugin:
        """Return a strategy by name; raises as `get` does."""
        return self._find(ModelPlugin, name)

    def store(self, name: str) -> StorePlugin:
        """Return a store plugin by name; raises as `get` does."""
        return self._find(StorePlugin, name)

    def engine(self, name: str) -> EnginePlugin:
        """Return an engine adapter by name; raises as `get` does."""
        return self._find(EnginePlugin, name)

    def check(self) -> None:
        """Raise for the first plugin that is broken or doubly claimed; what strict loading does.

        Raises:
            BrokenPluginError: loading it failed; the cause is chained.
            DuplicatePluginError: several distributions provide it.
        """
        for outcome in self._outcomes:
            if outcome.record.status is PluginStatus.BROKEN:
                raise _broken_error(outcome)
            if outcome.record.status is PluginStatus.DUPLICATE:
                raise _duplicate_error(_rivals(outcome.record, self._outcomes))

    def _loaded(self, facade: type[_P]) -> tuple[_P, ...]:
        return tuple(
            outcome.plugin
            for outcome in self._outcomes
            if isinstance(outcome.plugin, facade) and outcome.record.status is PluginStatus.LOADED
        )

    def _find(self, facade: type[_P], name: str) -> _P:
        kind = facade.kind
        found = [o for o in self._outcomes if o.record.kind is kind and o.record.answers_to(name)]
        usable = [o for o in found if o.record.status is not PluginStatus.DISABLED]
        if not found:
            asked = f"the {kind.value} plugin asked for is"
            raise plugin_not_found(name, self.records, kinds=(kind,), asked=asked)
        if not usable:
            msg = f"{found[0].record} is disabled: {found[0].record.reason}"
            raise DisabledPluginError(msg)
        if len(usable) > 1:
            raise _duplicate_error([outcome.record for outcome in usable])
        if isinstance(usable[0].plugin, facade):
            return usable[0].plugin
        raise _broken_error(usable[0])


def _marked(outcomes: tuple[LoadOutcome, ...]) -> Iterable[LoadOutcome]:
    for outcome in outcomes:
        rivals = _rivals(outcome.record, outcomes)
        if outcome.record.status is PluginStatus.LOADED and len(rivals) > 1:
            record = replace(
                outcome.record,
                status=PluginStatus.DUPLICATE,
                reason=str(_duplicate_error(rivals)),
            )
            yield replace(outcome, record=record)
        else:
            yield outcome


def _rivals(record: PluginRecord, outcomes: Iterable[LoadOutcome]) -> tuple[PluginRecord, ...]:
    return tuple(
        outcome.record
        for outcome in outcomes
        if (outcome.record.kind, outcome.record.name) == (record.kind, record.name)
        and outcome.record.status is not PluginStatus.DISABLED
    )


def _duplicate_error(rivals: Sequence[PluginRecord]) -> DuplicatePluginError:
    owners = ", ".join(f"{r.distribution} {r.version} ({r.module})" for r in rivals)
    names = sorted({repr(record.qualified_name) for record in rivals})
    advice = (
        f"ask for {' or '.join(names)}, or list the other one in KVLINKER_DISABLED_PLUGINS"
        if len(names) > 1
        else "its entry points must give the name once"
    )
    msg = f"{rivals[0].kind.value} plugin {rivals[0].name!r} is claimed by {owners}; {advice}"
    return DuplicatePluginError(msg)


def _broken_error(outcome: LoadOutcome) -> BrokenPluginError:
    error = BrokenPluginError(f"{outcome.record} is broken: {outcome.record.reason}")
    error.__cause__ = outcome.cause
    if outcome.record.traceback:
        error.add_note(f"when it was loaded:\n{outcome.record.traceback}")
    return error


def open_store(registry: PluginRegistry, name: str, config: Mapping[str, object]) -> Store:
    """Open the store that is named; no store is ever chosen or opened otherwise, since one may open a port.

    Raises:
        PluginError: the plugin is absent, disabled, broken or doubly claimed, raised, or returned no store.
        KVLinkerError: whatever the store refuses with.
    """
    return registry.store(name).open(config)
