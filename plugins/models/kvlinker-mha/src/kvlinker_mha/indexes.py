"""Index keys by which some layers select what they attend to, beside their K and V (block-sparse attention).

A restored page without its index keys is not an error anywhere: it is selected by whatever lies in its place.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvlinker.description import IndexerKind, KVCacheDescription
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.layouts import integer_fact, pool_entry, require_row_bytes, text_fact
from kvlinker.pools import KV
from kvlinker.spans import BufferSpan
from kvlinker_mha.formats import (
    FAMILY,
    INDEX_BITS,
    INDEX_BLOCKS,
    INDEX_FACTS,
    INDEX_KEYS,
    INDEX_SCALES,
    INDEX_VALUES,
    ROWS_ARE_PAGES,
)

__all__ = ["check_indexes", "index_entries", "index_facts", "index_roles", "indexes_left_out"]

_ROLES = (INDEX_KEYS, INDEX_SCALES, INDEX_VALUES)


def index_facts(description: KVCacheDescription) -> tuple[str, ...]:
    """Return the names of the facts that are read of index keys; none where nothing is said of some."""
    return INDEX_FACTS if _has_index(description) else ()


def index_roles(description: KVCacheDescription) -> tuple[str, ...]:
    """Return the roles that index keys need; none where nothing is said of some.

    Raises:
        KVLinkerError: how they are kept is not stated, or is not laid out here.
    """
    if not _has_index(description):
        return ()
    needed = [INDEX_KEYS]
    if _format(description) in INDEX_BLOCKS:
        needed.append(INDEX_SCALES)
    if integer_fact(description, "index_has_values", known=(0, 1)):
        needed.append(INDEX_VALUES)
    return tuple(needed)


def index_entries(description: KVCacheDescription) -> list[DevicePoolEntry]:
    """Return an entry for the index keys, and one each for their scales and their values, where layers have some."""
    if not _has_index(description):
        return []
    index_format = _format(description)
    made = [
        _entry(description, INDEX_KEYS, "indexer", index_format),
        _entry(description, INDEX_SCALES, "indexer_scale", f"{index_format}_scale"),
        _entry(description, INDEX_VALUES, "indexer_v", index_format),
    ]
    return [entry for entry in made if entry is not None]


def indexes_left_out(description: KVCacheDescription) -> dict[str, str]:
    """Return why each index buffer that is not moved is not needed, by label."""
    return {
        span.label: f"layer {layer} keeps none: it has no indexer, or reads no values by it"
        for role in _ROLES
        for layer, span in enumerate(description.buffers.get(role, ()))
        if not span.rows
    }


def check_indexes(description: KVCacheDescription) -> None:
    """Refuse index buffers that are not those of the layers that are said to have an indexer.

    Raises:
        KVLinkerError: one is missing, is too many, or is not of the stated format; the text says which.
    """
    if shared := [
        facts.layer for facts in description.layers if facts.indexer is IndexerKind.SHARED
    ]:
        msg = (
            f"family {FAMILY!r}: layers {shared} select by another layer's index, which is not laid out here; "
            f"install a plugin that does"
        )
        raise UnsupportedKVCacheError(msg)
    for role in _ROLES:
        if role in description.buffers:
            _check_owners(description, role)
    if _has_index(description):
        _check_rows(description)


def _entry(
    description: KVCacheDescription, role: str, name: str, value_format: str
) -> DevicePoolEntry | None:
    """Return the entry of a role's buffers, a row for each page; None where no layer has any."""
    spans = _kept(description, role)
    if not spans:
        return None
    return pool_entry(
        description,
        name=name,
        indices_from_pool=KV,
        roles=(role,),
        components=[list(spans.values())],
        layer_mapping={layer: at for at, layer in enumerate(spans)},
        rows_are_pages=True,
        value_format=value_format,
    )


def _has_index(description: KVCacheDescription) -> bool:
    """Return whether something is said of index keys, for layers of another pipeline stage, too."""
    stated = any(name in description.facts for name in INDEX_FACTS)
    return stated or bool(_indexed_layers(description))


def _indexed_layers(description: KVCacheDescription) -> list[int]:
    return [facts.layer for facts in description.layers if facts.indexer is IndexerKind.OWN]


def _format(description: KVCacheDescription) -> str:
    return text_fact(description, "index_format", known=INDEX_BITS)


def _kept(description: KVCacheDescription, role: str) -> Mapping[int, BufferSpan]:
    """Return the buffers of a role that have rows, by layer."""
    spans = description.buffers.get(role, ())
    return {layer: span for layer, span in enumerate(spans) if span.rows}


# ---- checks: what is not refused here would be restored wrong ---------------------------------


def _check_owners(description: KVCacheDescription, role: str) -> None:
    """Refuse buffers of other layers than those with an indexer; values are kept by some of them."""
    found, owners = len(description.buffers[role]), set(_indexed_layers(description))
    if found != len(description.layers):
        msg = (
            f"family {FAMILY!r}: {role!r} has {found} buffers for {len(description.layers)} layers; "
            f"describe one per layer, without rows where a layer keeps none"
        )
        raise ContractError(msg)
    kept = set(_kept(description, role))
    if kept - owners or (role != INDEX_VALUES and kept != owners):
        msg = (
            f"family {FAMILY!r}: layers {sorted(owners)} are said to have an indexer, and {role!r} has rows for "
            f"{sorted(kept)}; describe the indexer of each layer and its buffer alike"
        )
        raise ContractError(msg)


def _check_rows(description: KVCacheDescription) -> None:
    """Refuse rows that are no page of index keys, or of their values and scales, in the stated format."""
    index_format, values = _format(description), integer_fact(description, "index_values")
    if values < 1:
        msg = f"family {FAMILY!r}: fact 'index_values' is {values}; state how many values an index key has"
        raise ContractError(msg)
    in_a_page = description.page_size * values
    for role in (INDEX_KEYS, INDEX_VALUES):
        row_bytes = in_a_page * INDEX_BITS[index_format] // 8
        require_row_bytes(description, _kept(description, role).values(), row_bytes)
    scales = _kept(description, INDEX_SCALES)
    if index_format in INDEX_BLOCKS:
        row_bytes = in_a_page // INDEX_BLOCKS[index_format]
        require_row_bytes(description, scales.values(), row_bytes)
    for role in _ROLES:
        _check_pages(description, role)
    if INDEX_VALUES in description.buffers and index_format in INDEX_BLOCKS:
        msg = (
            f"family {FAMILY!r}: {INDEX_VALUES!r} is described beside index keys as {index_format!r}, of which no "
            f"scales of values are known; install a plugin that lays them out"
        )
        raise UnsupportedKVCacheError(msg)


def _check_pages(description: KVCacheDescription, role: str) -> None:
    """Refuse index buffers with other pages than their layer's K: a page would get another one's keys."""
    paged = ROWS_ARE_PAGES[text_fact(description, "kv_layout", known=ROWS_ARE_PAGES)]
    for layer, span in _kept(description, role).items():
        beside = description.buffers["k"][layer]
        pages = beside.rows // (1 if paged else description.page_size)
        if span.rows != pages:
            msg = (
                f"family {FAMILY!r}: span {span.label!r} has {span.rows} rows, expected {pages}, one per page of "
                f"{beside.label!r}; describe it page by page"
            )
            raise ContractError(msg)
