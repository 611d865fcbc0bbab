"""How much of a prefix a store holds, and how the distance of stored boundaries changes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvlinker.explanation import Explanation, PoolExplanation
from kvlinker.integers import as_integer

__all__ = ["USUAL_INTERVALS", "StoredPrefix", "stored_prefixes"]

USUAL_INTERVALS = (1, 2, 4, 8, 16, 32, 64)
"""Distances of boundaries, in pages, that are worth a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrefix:
    """What a long prefix costs when every so many pages end in a restorable boundary."""

    interval_pages: int
    """Pages of the prefix tree from one boundary to the next."""
    interval_tokens: int
    """At most so many tokens, less one, are computed anew behind the last boundary that fits."""
    page_bytes: int
    """Bytes of an interval that every prefix through it needs."""
    boundary_bytes: int
    """Bytes of an interval that only prefixes that end with it need: windows and states."""

    @property
    def interval_bytes(self) -> int:
        """Bytes of an interval; a store's headers come on top."""
        return self.page_bytes + self.boundary_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token, boundaries spread over all of them."""
        return self.interval_bytes / self.interval_tokens

    def tokens_in(self, store_bytes: int) -> int:
        """Return the tokens of whole intervals that fit into so many bytes."""
        return store_bytes // self.interval_bytes * self.interval_tokens


def stored_prefixes(
    explanation: Explanation, *, page_size: int, intervals: Iterable[int] = USUAL_INTERVALS
) -> tuple[StoredPrefix, ...]:
    """Return what a prefix costs for each distance of boundaries.

    Args:
        explanation: of a cache that a strategy takes.
        page_size: slots in a page of the prefix tree.
        intervals: distances in pages, each at least 1.

    Raises:
        ContractError: a distance is no integer of at least 1.
    """
    return tuple(_prefix(explanation, page_size, interval) for interval in intervals)


def _prefix(explanation: Explanation, page_size: int, interval: int) -> StoredPrefix:
    pages = as_integer(interval, "an interval of boundaries, in pages,", at_least=1)
    tokens = pages * page_size
    return StoredPrefix(
        interval_pages=pages,
        interval_tokens=tokens,
        page_bytes=sum(
            tokens * pool.page_bytes // pool.page_size for pool in explanation.pools if pool.grows
        ),
        boundary_bytes=sum(_boundary_bytes(pool, tokens) for pool in explanation.pools),
    )


def _boundary_bytes(pool: PoolExplanation, tokens: int) -> int:
    """Return the bytes of what one boundary adds; windows that overlap the one before are stored once."""
    if pool.holds_states:
        return pool.page_bytes
    return min(pool.boundary_pages, max(1, tokens // pool.page_size)) * pool.page_bytes
