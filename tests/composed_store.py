"""Whatever a composition names, as a plugin that the kit for stores and its child processes can open."""

from __future__ import annotations

from collections.abc import Mapping

from kvlinker.discovery import PluginKind, load_plugins
from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.store import Store
from kvlinker.stores.composition import compose
from kvlinker.stores.option_values import OptionValues
from kvlinker.stores.policies import POLICIES, OpenStore
from kvlinker.testing.offered_twice import OfferedTwice

__all__ = ["describe_plugin", "open_composed", "open_store"]


@hookimpl
def describe_plugin() -> PluginInfo:
    return PluginInfo(api_version=1, summary="a composition of stores")


def open_composed(config: Mapping[str, object], *, inside: OpenStore | None = None) -> Store:
    """Open a composition `{NAME: OPTIONS}`.

    Args:
        config: of which an admitting store is offered everything twice, as the kit offers it once.
        inside: opens the store that a policy is around, where that is not to be opened as it is named.
    """
    ((name, options),) = config.items()
    assert isinstance(options, Mapping)
    if inside is not None:
        own = {key: value for key, value in options.items() if key != "store"}
        store = POLICIES[name].read(OptionValues(values=own, where=name))(inside)
    else:
        tree = compose(name, options)
        store = tree.open(load_plugins(kinds=(PluginKind.STORE,), allow=tree.plugins))
    return OfferedTwice(store) if name == "admission" else store


@hookimpl
def open_store(config: Mapping[str, object]) -> Store:
    return open_composed(config)
