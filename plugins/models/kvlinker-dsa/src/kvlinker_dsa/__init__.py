"""DeepSeek sparse attention (V3.2, GLM-5): latent KV and the index keys that select it, moved together.

A restored page without its index keys is not an error anywhere: attention just never selects it.
"""

from __future__ import annotations

from kvlinker.description import IndexerKind, KVCacheDescription, LayerFacts
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError
from kvlinker.hookspecs import ModelConfig, ModelConfigRequest, PluginInfo, StrategyMatch, hookimpl
from kvlinker.layouts import (
    draft_count,
    folded_keys,
    pool_entry,
    pool_group,
    require_facts,
    require_paged_pools,
    require_roles,
    require_row_bytes,
    ride_along,
    role_spans,
    text_fact,
)
from kvlinker.pools import KV, DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker_dsa import planned
from kvlinker_dsa.formats import FACTS, FAMILY, INDEX_BYTES, INDEX_KPOOL, ROW_BYTES

__all__ = [
    "build_direct_linker_pool_group",
    "describe_model_config",
    "describe_plugin",
    "match_kv_cache",
]

LAYOUT = "dsa/1"
"""Goes into every key: raise it when the bytes of a page object change."""


@hookimpl
def describe_plugin() -> PluginInfo:
    """See `kvlinker.hookspecs`."""
    return PluginInfo(api_version=1, summary="DeepSeek sparse attention: latent KV and indexer")


@hookimpl
def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
    """Claim a DSA cache, indexers and drafts included; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the family is this one, and the cache is not laid out here; the text says why.
    """
    if description.family != FAMILY:
        return None
    _check(description)
    return StrategyMatch(
        buffers=frozenset(description.buffers), omitted=_indexes_left_out(description)
    )


@hookimpl
def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
    """Lay a DSA cache out as `kv` and `indexer`; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    _check(description)
    entries = [_kv(description)]
    # A pipeline stage may have only layers that use another stage's index.
    if indexer := _indexer(description):
        entries.append(indexer)
    return pool_group(description, entries, layout=LAYOUT)


@hookimpl
def describe_model_config(
    config: ModelConfig, request: ModelConfigRequest
) -> KVCacheDescription | None:
    """Describe the cache that a model would have; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the model has such a cache, and it is not laid out here; the text says why.
    """
    return planned.describe(config, request) if config.model_type in planned.MODEL_TYPES else None


def _kv(description: KVCacheDescription) -> DevicePoolEntry:
    target, drafts = (description.buffers.get(role, ()) for role in ("kv", "draft_kv"))
    return pool_entry(
        description,
        name="kv",
        indices_from_pool=KV,
        roles=("kv", "draft_kv") if drafts else ("kv",),
        components=[[*target, *drafts]],
        layer_mapping=ride_along({i: i for i in range(len(target))}, range(len(drafts))),
        rows_are_pages=False,
        value_format=text_fact(description, "kv_format"),
    )


def _indexer(description: KVCacheDescription) -> DevicePoolEntry | None:
    target, drafts = _live_indexes(description), _live_draft_indexes(description)
    if not target and not drafts:
        return None
    return pool_entry(
        description,
        name="indexer",
        indices_from_pool=KV,
        roles=("index_k", "draft_index_k") if drafts else ("index_k",),
        components=[[*target.values(), *drafts.values()]],
        layer_mapping=ride_along({layer: i for i, layer in enumerate(target)}, drafts),
        rows_are_pages=True,
        value_format=_index_keys(description)[1],
    )


def _index_keys(description: KVCacheDescription) -> tuple[int, str]:
    """Return how many index keys a page has, and what their values are."""
    index_format = text_fact(description, "index_format", known=INDEX_BYTES)
    return folded_keys(description, INDEX_KPOOL, index_format, unstated=1)


def _live_indexes(description: KVCacheDescription) -> dict[int, BufferSpan]:
    """Return the index buffers that are read, by layer."""
    spans = description.buffers["index_k"]
    owners = (facts for facts in description.layers if facts.indexer is IndexerKind.OWN)
    return {facts.layer: spans[facts.layer] for facts in owners}


def _live_draft_indexes(description: KVCacheDescription) -> dict[int, BufferSpan]:
    """Return the drafts' index buffers by the layer that each one rides on."""
    spans = description.buffers.get("draft_index_k", ())
    return {layer: span for layer, span in enumerate(spans) if span.rows}


def _indexes_left_out(description: KVCacheDescription) -> dict[str, str]:
    """Return why each index buffer that is not moved is not needed, by label."""
    spans = description.buffers["index_k"]
    left_out = {
        spans[facts.layer].label: _why_left_out(facts, spans[facts.layer])
        for facts in description.layers
        if facts.indexer is not IndexerKind.OWN
    }
    for layer, span in enumerate(description.buffers.get("draft_index_k", ())):
        if not span.rows:
            left_out[span.label] = f"draft layer {layer} keeps no index buffer"
    return left_out


def _why_left_out(facts: LayerFacts, span: BufferSpan) -> str:
    if facts.indexer is IndexerKind.NONE:
        return f"layer {facts.layer} has no indexer"
    state = "its own buffer is never read" if span.rows else "it keeps no buffer"
    return f"layer {facts.layer} selects by another layer's index; {state}"


# ---- checks: what is not refused here would be restored wrong ---------------------------------


def _check(description: KVCacheDescription) -> None:
    require_facts(description, known=FACTS)
    require_roles(description, required=("kv", "index_k"), optional=("draft_kv", "draft_index_k"))
    require_paged_pools(description, KV)
    drafts = draft_count(description, "draft_kv", "draft_index_k")
    row_bytes = ROW_BYTES[text_fact(description, "kv_format", known=ROW_BYTES)]
    role_spans(description, "kv", count=len(description.layers), row_bytes=row_bytes)
    role_spans(description, "draft_kv", count=drafts, per="draft layer", row_bytes=row_bytes)
    _check_index_owners(description)
    key_bytes = INDEX_BYTES[text_fact(description, "index_format", known=INDEX_BYTES)]
    indexes = (*_live_indexes(description).values(), *_live_draft_indexes(description).values())
    require_row_bytes(description, indexes, _index_keys(description)[0] * key_bytes)


def _check_index_owners(description: KVCacheDescription) -> None:
    spans = description.buffers["index_k"]
    if len(spans) != len(description.layers):
        msg = (
            f"family {FAMILY!r}: 'index_k' has {len(spans)} buffers for {len(description.layers)} layers; "
            f"describe one per layer, without rows where a layer keeps none"
        )
        raise ContractError(msg)
    for facts in description.layers:
        _check_index_owner(facts, spans[facts.layer])


def _check_index_owner(facts: LayerFacts, span: BufferSpan) -> None:
    where = f"family {FAMILY!r}: layer {facts.layer}"
    if facts.indexer is IndexerKind.OWN and not span.rows:
        msg = (
            f"{where} owns an indexer, but span {span.label!r} has no rows; describe its buffer, "
            f"or the layer as one that shares an index"
        )
        raise ContractError(msg)
    if facts.indexer is IndexerKind.NONE and span.rows:
        msg = (
            f"{where} has no indexer, but span {span.label!r} has {span.rows} rows; "
            f"say whether the layer owns it or shares another's"
        )
        raise ContractError(msg)
