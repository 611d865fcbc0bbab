"""Compressed sparse attention (Qwen4): a hybrid's pages and states, and the folded index keys that select the pages.

Some neighbouring tokens share an index key. A page has whole groups of them, so that nothing is unfolded at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import kvlinker_mamba
from kvlinker.description import KVCacheDescription
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError
from kvlinker.hookspecs import PluginInfo, StrategyMatch, hookimpl
from kvlinker.layouts import (
    integer_fact,
    pool_entry,
    pool_group,
    ride_along,
    role_spans,
    text_fact,
)
from kvlinker.pools import KV, DevicePoolGroup

__all__ = ["build_direct_linker_pool_group", "describe_plugin", "match_kv_cache"]

FAMILY = "qsa"
LAYOUT = f"qsa/1 over {kvlinker_mamba.LAYOUT}"
"""Goes into every key: raise its number when the bytes of a page object change."""
INDEX_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp8_e4m3fn": 1})
"""Formats of index keys to the bytes of a value; fp8 ones have no scales."""
_FORMAT, _VALUES, _RATIO = "index_format", "index_values", "index_ratio"
_INDEX, _DRAFT_INDEX = "index_k", "draft_index_k"
_KEEPS_PAGES = ("attention", "attention_and_mamba")


@hookimpl
def describe_plugin() -> PluginInfo:
    """See `kvlinker.hookspecs`."""
    return PluginInfo(
        api_version=1, summary="Compressed sparse attention: pages, folded index keys and states"
    )


@hookimpl
def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
    """Claim a cache, index keys, side states and drafts included; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the family is this one, and the cache is not laid out here; the text says why.
    """
    if description.family != FAMILY:
        return None
    _entries(description)
    hybrid = kvlinker_mamba.match_kv_cache(_hybrid(description))
    return StrategyMatch(
        buffers=frozenset(description.buffers), omitted={} if hybrid is None else hybrid.omitted
    )


@hookimpl
def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
    """Lay a cache out as a hybrid's pools and `indexer`; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    return pool_group(description, _entries(description), layout=LAYOUT)


def _entries(description: KVCacheDescription) -> list[DevicePoolEntry]:
    hybrid = _hybrid(description)
    entries = list(kvlinker_mamba.build_direct_linker_pool_group(hybrid).entries)
    indexer = _indexer(description)
    return entries if indexer is None else [*entries, indexer]


def _hybrid(description: KVCacheDescription) -> KVCacheDescription:
    """Return the cache without its index keys, which is a hybrid's of K and V.

    Raises:
        UnsupportedKVCacheError: its pages are of another kind, such as latents.
    """
    text_fact(description, "kv_family", known=("mha",))
    return replace(
        description,
        family="mamba",
        buffers={
            role: spans
            for role, spans in description.buffers.items()
            if role not in (_INDEX, _DRAFT_INDEX)
        },
        facts={
            name: value
            for name, value in description.facts.items()
            if name not in (_FORMAT, _VALUES, _RATIO)
        },
    )


def _indexer(description: KVCacheDescription) -> DevicePoolEntry | None:
    """Return the entry of the index keys, a row for each page; None for a stage without attention and drafts."""
    layers = [facts.layer for facts in description.layers if facts.kind in _KEEPS_PAGES]
    drafts = len(description.buffers.get("draft_k", ()))
    row_bytes, value_format = _page_of_keys(description)
    own = role_spans(
        description, _INDEX, count=len(layers), per="layer of attention", row_bytes=row_bytes
    )
    riding = role_spans(
        description, _DRAFT_INDEX, count=drafts, per="draft layer", row_bytes=row_bytes
    )
    if not own and not riding:
        return None
    roles = (*((_INDEX,) if own else ()), *((_DRAFT_INDEX,) if riding else ()))
    return pool_entry(
        description,
        name="indexer",
        indices_from_pool=KV,
        roles=roles,
        components=[[*own, *riding]],
        layer_mapping=ride_along({layer: i for i, layer in enumerate(layers)}, range(drafts)),
        rows_are_pages=True,
        value_format=value_format,
    )


def _page_of_keys(description: KVCacheDescription) -> tuple[int, str]:
    """Return the bytes of a page's index keys, and what they are.

    Raises:
        ContractError: a page has no whole number of groups.
    """
    index_format = text_fact(description, _FORMAT, known=INDEX_BYTES)
    values, ratio = (integer_fact(description, name) for name in (_VALUES, _RATIO))
    if values < 1 or ratio < 1 or description.page_size % ratio:
        msg = (
            f"family {FAMILY!r}: {_VALUES} {values} and {_RATIO} {ratio} do not fit a page of "
            f"{description.page_size} slots; a page must have whole groups, or its last one is unfolded at its end"
        )
        raise ContractError(msg)
    keys = description.page_size // ratio
    return keys * values * INDEX_BYTES[index_format], f"{index_format}, a key for {ratio} tokens"
