"""Boundaries: which prefix lengths every pool can restore, found with as few probes as possible.

The set is sparse: a pool of trailing windows has one only where a window was stored, and the minimum
of per-pool maxima may be a length that no pool can restore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvlinker.errors import ContractError
from kvlinker.transfers import HitPolicy

__all__ = [
    "BoundaryResult",
    "PoolNeed",
    "common_boundaries",
    "needed_pages",
    "restorable_boundaries",
]

_FIRST_PROBE = 128
"""Pages in the first probe of a prefix: a cold miss then costs one small question."""
_PROBE_GROWTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNeed:
    """What one pool must hold for a boundary."""

    pool: str
    policy: HitPolicy
    window: int = 0
    """Pages of the pool in a trailing window."""
    multiple: int = 1
    """Tree pages in one page of the pool."""

    def __post_init__(self) -> None:
        if self.multiple < 1 or (self.policy is HitPolicy.TRAILING_PAGES and self.window < 1):
            msg = (
                f"pool {self.pool!r}: a trailing window needs at least one page and a multiple of "
                f"at least 1, got {self.window} and {self.multiple}"
            )
            raise ContractError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryResult:
    """The boundaries, and which pool ended the search where."""

    boundaries: tuple[int, ...]
    """Restorable prefix lengths in tree pages, ascending, each at least 1."""
    limited_by: str | None
    """Pool that is the reason why the longest boundary is not the whole question."""
    lacks: int | None = None
    """First page that the limiting pool lacks, in its own numbers, where it needs all pages."""
    is_hole: bool = False
    """Whether pages behind that one are there: written for nothing until it is written too."""


Probe = Callable[[str, Sequence[int]], Sequence[bool]]
"""(pool, page numbers of that pool) to one answer per page."""


def needed_pages(need: PoolNeed, boundaries: Iterable[int]) -> list[int]:
    """Return the pool's own page numbers that the boundaries need, ascending."""
    lengths = [boundary // need.multiple for boundary in boundaries]
    if need.policy is HitPolicy.ALL_PAGES:
        return list(range(max(lengths, default=0)))
    pages: set[int] = set()
    for length in lengths:
        pages.update(range(max(0, length - need.window), length))
    return sorted(pages)


def restorable_boundaries(
    needs: Sequence[PoolNeed], num_pages: int, probe: Probe
) -> BoundaryResult:
    """Return every length at which all pools satisfy their policy, out of 1..num_pages.

    Whole-prefix pools are asked first, in order, then trailing ones; no pool is asked about a page
    beyond the longest boundary still alive.
    """
    alive = list(range(1, num_pages + 1))
    limited_by, gap = None, _Gap()
    ordered = sorted(needs, key=lambda need: need.policy is not HitPolicy.ALL_PAGES)
    for need in ordered:
        longest = alive[-1] if alive else 0
        alive = [boundary for boundary in alive if boundary % need.multiple == 0]
        if need.policy is HitPolicy.ALL_PAGES:
            alive, found = _whole_prefix(need, alive, probe)
        else:
            alive, found = _trailing(need, alive, probe), _Gap()
        if (alive[-1] if alive else 0) < longest:
            limited_by, gap = need.pool, found
        if not alive:
            break
    return BoundaryResult(
        boundaries=tuple(alive), limited_by=limited_by, lacks=gap.page, is_hole=gap.is_hole
    )


@dataclass(frozen=True, slots=True)
class _Gap:
    """Where a pool of whole prefixes ends."""

    page: int | None = None
    is_hole: bool = False


def _whole_prefix(need: PoolNeed, alive: list[int], probe: Probe) -> tuple[list[int], _Gap]:
    total = (alive[-1] if alive else 0) // need.multiple
    start, size = 0, _FIRST_PROBE
    while start < total:
        pages = range(start, min(start + size, total))
        present = probe(need.pool, pages)
        if not all(present):
            first = present.index(False)
            length = (start + first) * need.multiple
            gap = _Gap(start + first, any(present[first:]))
            return [boundary for boundary in alive if boundary <= length], gap
        start, size = pages.stop, size * _PROBE_GROWTH
    return alive, _Gap()


def _trailing(need: PoolNeed, alive: list[int], probe: Probe) -> list[int]:
    pages = needed_pages(need, alive)
    present = dict(zip(pages, probe(need.pool, pages), strict=True)) if pages else {}
    run, runs = 0, {}
    for page in range((pages[-1] + 1) if pages else 0):
        run = run + 1 if present.get(page, False) else 0
        runs[page + 1] = run
    return [
        boundary
        for boundary in alive
        if runs[boundary // need.multiple] >= min(need.window, boundary // need.multiple)
    ]


def common_boundaries(sets: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Return the lengths that every rank can restore, ascending: an intersection, never a minimum."""
    ranks = [set(boundaries) for boundaries in sets]
    if not ranks:
        return ()
    return tuple(sorted(set.intersection(*ranks)))
