"""An invented family, `example_blocks`: one buffer per layer, kept in blocks that are smaller than a page.

This is the smallest complete model plugin, and the template for new ones. The two hooks at the top are all that
kvlinker calls; they read the description and nothing else, so the same description always gives the same layout.
"""

from __future__ import annotations

from kvlinker.description import KVCacheDescription
from kvlinker.errors import ContractError
from kvlinker.hookspecs import PluginInfo, StrategyMatch, hookimpl
from kvlinker.layouts import (
    draft_count,
    integer_fact,
    pool_entry,
    pool_group,
    require_facts,
    require_paged_pools,
    require_roles,
    role_spans,
    text_fact,
)
from kvlinker.pools import KV, DevicePoolGroup

__all__ = ["build_direct_linker_pool_group", "describe_plugin", "match_kv_cache"]

FAMILY = "example_blocks"
"""The name that an engine adapter gives to such a cache. A name of your own keeps other plugins away."""
LAYOUT = "example_blocks/1"
"""Goes into every key. Raise it when the bytes of a page change, and pages that were stored before are misses."""


@hookimpl
def describe_plugin() -> PluginInfo:
    """See `kvlinker.hookspecs`."""
    # The number that this code was written for, not the installed one: they are compared when it loads.
    return PluginInfo(api_version=1, summary="an invented family, as a template for new plugins")


@hookimpl
def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
    """Claim the whole cache, or decline.

    Raises:
        KVLinkerError: the family is this one, and the cache is not laid out here; the text says why.
    """
    # None says "not mine". A refusal of one's own family is raised: people read it when nothing else matches.
    if description.family != FAMILY:
        return None
    _blocks_per_page(description)
    # Every role that was described, not only the ones used below: a match that drops a buffer is no match.
    return StrategyMatch(buffers=frozenset(description.buffers))


@hookimpl
def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
    """Lay the cache out as one pool whose rows are pages.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    blocks = _blocks_per_page(description)
    # The engine counts in blocks, the prefix tree in pages: regrouped, a row is a page, and page p is row p.
    spans = [span.group_rows(blocks) for span in description.buffers["blocks"]]
    entry = pool_entry(
        description,
        name="kv",
        indices_from_pool=KV,
        # On which ranks the bytes differ, and which rank writes them, is looked up under these roles.
        roles=["blocks"],
        # One component, because a layer has one buffer. K and V apart would be two.
        components=[spans],
        # Layer i is loaded before layer i runs, so it must name its own buffer.
        layer_mapping={layer: layer for layer in range(len(spans))},
        rows_are_pages=True,
        # Two formats may have one size: the format goes into the key, so that neither loads the other's bytes.
        value_format=text_fact(description, "kv_format"),
    )
    return pool_group(description, [entry], layout=LAYOUT)


def _blocks_per_page(description: KVCacheDescription) -> int:
    """Return the blocks in a page, after refusing everything that would restore other bytes than were stored."""
    require_roles(description, required=["blocks"])
    # What the engine states beyond this may change what the bytes mean.
    require_facts(description, known=["block_size", "kv_format"])
    require_paged_pools(description, KV)
    # An engine that states draft layers keeps KV for them; here is no buffer for it, so only none is fine.
    draft_count(description, "draft_blocks")
    role_spans(description, "blocks", count=len(description.layers))
    text_fact(description, "kv_format")
    block_size = integer_fact(description, "block_size")
    if block_size < 1 or description.page_size % block_size:
        msg = (
            f"family {FAMILY!r}: pages of {description.page_size} slots are not whole blocks of {block_size}; "
            f"make the engine's page size a multiple of its block size"
        )
        raise ContractError(msg)
    return description.page_size // block_size
