"""How lanterns are stored: lamps page by page, wicks slot by slot."""

from __future__ import annotations

from kvlinker.description import KVCacheDescription
from kvlinker.layouts import (
    draft_count,
    pool_entry,
    pool_group,
    require_facts,
    require_paged_pools,
    require_roles,
    require_row_bytes,
    role_spans,
    text_fact,
)
from kvlinker.pools import KV, DevicePoolGroup

__all__ = ["FAMILY", "check_lanterns", "lay_out_lanterns"]

FAMILY = "lantern"
LAYOUT = "lantern/1"
WICK_BYTES = 12


def check_lanterns(description: KVCacheDescription) -> None:
    """Refuse what would come back otherwise than it was stored.

    Raises:
        KVLinkerError: the text says what does not fit.
    """
    require_roles(description, required=("lamps", "wicks"))
    require_facts(description, known=["lamp_format"])
    require_paged_pools(description, KV)
    draft_count(description, "draft_lamps")
    text_fact(description, "lamp_format", known=["lantern8"])
    layers = len(description.layers)
    lamps = role_spans(description, "lamps", count=layers)
    require_row_bytes(description, lamps, lamps[0].row_bytes)
    role_spans(description, "wicks", count=layers, row_bytes=WICK_BYTES)


def lay_out_lanterns(description: KVCacheDescription) -> DevicePoolGroup:
    """Return two entries that both follow the pages of the tree.

    Raises:
        KVLinkerError: the cache is not laid out here.
    """
    check_lanterns(description)
    entries = [
        pool_entry(
            description,
            name=name,
            indices_from_pool=KV,
            roles=(role,),
            components=[description.buffers[role]],
            layer_mapping={layer: layer for layer in range(len(description.layers))},
            rows_are_pages=rows_are_pages,
            value_format=value_format,
        )
        for name, role, rows_are_pages, value_format in (
            ("kv", "lamps", True, text_fact(description, "lamp_format")),
            ("wicks", "wicks", False, "fp32"),
        )
    ]
    return pool_group(description, entries, layout=LAYOUT)
