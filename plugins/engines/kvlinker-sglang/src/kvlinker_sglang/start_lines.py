"""Start lines: what a worker says when it begins, for whoever sized the store."""

from __future__ import annotations

from kvlinker.capacity import stored_prefixes
from kvlinker.errors import KVLinkerError
from kvlinker.explanation import Explanation
from kvlinker.store import Store

__all__ = ["start_lines"]


def start_lines(found: Explanation, store: Store, plugin: str) -> tuple[str, str]:
    """Return a line for how pages are laid out and one for how many tokens the store has room for.

    Args:
        found: what the strategy makes of the worker's pools.
        store: an open store; one that does not say what it holds is named with its error.
        plugin: name of the store's plugin.
    """
    return _layout(found, plugin), _room(found, store)


def _layout(found: Explanation, plugin: str) -> str:
    pools = ", ".join(f"{pool.name} {pool.page_bytes} B a page" for pool in found.pools)
    return (
        f"strategy {found.winner} ({pools}), store {plugin}, {found.bytes_per_token:.0f} bytes per token "
        f"and {found.bytes_per_boundary} more per boundary"
    )


def _room(found: Explanation, store: Store) -> str:
    try:
        stats = store.stats()
    except KVLinkerError as error:
        return f"the store does not say what it holds: {error}"
    held = f"{stats.objects} objects, {stats.used_bytes} B"
    if stats.capacity_bytes is None:
        return f"the store holds {held}, and names no capacity"
    tokens = _tokens(found, stats.capacity_bytes)
    return f"the store holds {held} of {stats.capacity_bytes} B: {tokens}, before headers and index"


def _tokens(found: Explanation, capacity: int) -> str:
    """Return an upper bound: a store also keeps a header with each object, and an index of them."""
    page_size = max(pool.page_size for pool in found.pools)
    (each,) = stored_prefixes(found, page_size=page_size, intervals=[1])
    least = each.tokens_in(capacity)
    if not (each.boundary_bytes and each.page_bytes):
        return f"at most {least} tokens"
    most = capacity // each.page_bytes * page_size
    return f"at most {most} tokens in long prefixes, {least} if every page ends one"
