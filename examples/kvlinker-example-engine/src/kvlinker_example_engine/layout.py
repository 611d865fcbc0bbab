"""The strategy's half: how described tiles are laid out as a pool, whatever engine described them."""

from __future__ import annotations

from kvlinker.description import KVCacheDescription
from kvlinker.errors import ContractError
from kvlinker.layouts import (
    draft_count,
    pool_entry,
    pool_group,
    require_facts,
    require_paged_pools,
    require_roles,
    role_spans,
    text_fact,
)
from kvlinker.pools import KV, DevicePoolGroup

__all__ = ["FAMILY", "check_tiles", "lay_out_tiles"]

FAMILY = "example_tiles"
"""The name that the adapter gives to such a cache. A name of your own keeps other plugins away."""
LAYOUT = "example_tiles/1"
"""Goes into every key. Raise it when the bytes of a page change, and pages that were stored before are misses."""
ROLES = ("tiles", "scales")


def check_tiles(description: KVCacheDescription) -> None:
    """Refuse everything that would restore other bytes than were stored.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    require_roles(description, required=ROLES)
    require_facts(description, known=["tile_format"])
    require_paged_pools(description, KV)
    # An engine that states draft layers keeps KV for them; here is no buffer for it, so only none is fine.
    draft_count(description, "draft_tiles")
    for role in ROLES:
        role_spans(description, role, count=len(description.layers))
    text_fact(description, "tile_format")
    for span in description.buffers["tiles"]:
        if span.row_bytes % description.page_size:
            msg = (
                f"family {FAMILY!r}: span {span.label!r} has tiles of {span.row_bytes} B, which are no pages of "
                f"{description.page_size} slots"
            )
            raise ContractError(msg)


def lay_out_tiles(description: KVCacheDescription) -> DevicePoolGroup:
    """Return one pool of two components: a page is its tiles and its scales, in one object.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    check_tiles(description)
    entry = pool_entry(
        description,
        name="kv",
        indices_from_pool=KV,
        roles=ROLES,
        # Values without their scales are wrong text, so they share an object: both come back, or neither.
        components=[description.buffers[role] for role in ROLES],
        layer_mapping={layer: layer for layer in range(len(description.layers))},
        rows_are_pages=True,
        value_format=text_fact(description, "tile_format"),
    )
    return pool_group(description, [entry], layout=LAYOUT)
