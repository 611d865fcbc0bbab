"""Hybrids of full and sliding-window attention: K and V of every token in some layers, of the last ones in the others.

The window's pages are stored where a prefix may end, and only the last of them are restored.
"""

from __future__ import annotations

from kvlinker.description import KVCacheDescription
from kvlinker.entries import DevicePoolEntry
from kvlinker.hookspecs import ModelConfig, ModelConfigRequest, PluginInfo, StrategyMatch, hookimpl
from kvlinker.layouts import pool_entry, pool_group, ride_along
from kvlinker.pools import DevicePoolGroup
from kvlinker_swa import planned
from kvlinker_swa.checks import check
from kvlinker_swa.layers import FAMILY, KINDS, SCALES, VALUES, LayerKind

__all__ = [
    "build_direct_linker_pool_group",
    "describe_model_config",
    "describe_plugin",
    "match_kv_cache",
]

LAYOUT = "swa/1"
"""Goes into every key: raise it when the bytes of a page object change."""


@hookimpl
def describe_plugin() -> PluginInfo:
    """See `kvlinker.hookspecs`."""
    return PluginInfo(api_version=1, summary="full and sliding-window attention: K and V of both")


@hookimpl
def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
    """Claim a hybrid's cache, scales and drafts included; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the family is this one, and the cache is not laid out here; the text says why.
    """
    if description.family != FAMILY:
        return None
    check(description)
    return StrategyMatch(buffers=frozenset(description.buffers))


@hookimpl
def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
    """Lay a hybrid's cache out as `kv` and `swa`, each with its scales if it has some; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    check(description)
    entries = [entry for kind in KINDS for entry in _entries(description, kind)]
    return pool_group(description, entries, layout=LAYOUT)


@hookimpl
def describe_model_config(
    config: ModelConfig, request: ModelConfigRequest
) -> KVCacheDescription | None:
    """Describe the cache that a model would have; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the model has such a cache, and it is not laid out here; the text says why.
    """
    return planned.describe(config, request) if config.model_type in planned.MODELS else None


def _entries(description: KVCacheDescription, kind: LayerKind) -> list[DevicePoolEntry]:
    """Return the entries of one kind of layers; none where a stage has neither such layers nor such drafts."""
    if not any(map(description.buffers.get, _stored(kind, VALUES))):
        return []
    paged, value_format = kind.rows_are_pages(description), kind.value_format(description)
    values = _entry(
        description, kind, VALUES, name=kind.pool, rows_are_pages=paged, value_format=value_format
    )
    if not kind.is_scaled(description):
        return [values]
    # An entry of its own: a page of scales is one row, whatever the rows of the values are.
    scales = _entry(
        description,
        kind,
        SCALES,
        name=f"{kind.pool}_scale",
        rows_are_pages=True,
        value_format=f"{value_format}_scale",
    )
    return [values, scales]


def _stored(kind: LayerKind, names: tuple[str, ...]) -> tuple[str, ...]:
    return (*kind.roles(names), *kind.draft_roles(names))


def _entry(
    description: KVCacheDescription,
    kind: LayerKind,
    names: tuple[str, ...],
    *,
    name: str,
    rows_are_pages: bool,
    value_format: str,
) -> DevicePoolEntry:
    """Return an entry with one component for K and one for V, drafts behind the target in both."""
    target, drafts = (
        [description.buffers.get(role, ()) for role in roles]
        for roles in (kind.roles(names), kind.draft_roles(names))
    )
    positions = {layer: at for at, layer in enumerate(kind.layers(description))}
    return pool_entry(
        description,
        name=name,
        indices_from_pool=kind.pool,
        roles=[role for role in _stored(kind, names) if description.buffers.get(role)],
        components=[[*own, *riding] for own, riding in zip(target, drafts, strict=True)],
        layer_mapping=ride_along(positions, range(len(drafts[0]))),
        rows_are_pages=rows_are_pages,
        value_format=value_format,
    )
