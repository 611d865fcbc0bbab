"""Range limits cut requests into calls that a store with a bound on ranges takes."""

from __future__ import annotations

import numpy as np

from kvlinker.errors import ContractError
from kvlinker.plans import PreparedPages

__all__ = ["page_groups"]


def page_groups(pages: PreparedPages, spans: int, limit: int | None) -> list[range]:
    """Return page numbers in groups, in order, so that a plan of a group has at most `limit` ranges.

    Args:
        pages: of one entry.
        spans: how many of its spans one call touches.
        limit: ranges in a call; None without a bound.

    Raises:
        ContractError: a single page has more ranges.
    """
    count = pages.num_pages
    if limit is None or not count:
        return [range(count)]
    ranges = int(np.bincount(pages.page, minlength=1).max()) * spans
    if ranges > limit:
        msg = (
            f"pool {pages.pool!r}: one page has {ranges} ranges, and the store takes {limit} in a call; "
            f"use pages that are not scattered, or another store"
        )
        raise ContractError(msg)
    step = limit // ranges
    return [range(first, min(first + step, count)) for first in range(0, count, step)]
