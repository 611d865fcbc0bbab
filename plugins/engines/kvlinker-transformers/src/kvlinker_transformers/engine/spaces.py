"""Index spaces: what pages of the pools are free, and which of them a request must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvlinker.description import PoolKind
from kvlinker_transformers.engine.sequence import PagedSequence
from kvlinker_transformers.pages import RESERVED_PAGE, PageAllocator
from kvlinker_transformers.pools import PagedPools

__all__ = ["IndexSpaces"]


_STATE_WINDOW = 2
"""A token needs the state behind the one before it, as it would need that one's row."""


def _reclaim_nothing() -> None:
    """Do nothing: every page that is held belongs to a request."""


class IndexSpaces:
    """The allocators of some pools, one for each index space."""

    def __init__(self, pools: PagedPools, *, shuffle_seed: int | None = None) -> None:
        """Make every page free; see `PageAllocator` for `shuffle_seed`."""
        self._page_size = pools.page_size
        self._slots = {pool.name for pool in pools.logical_pools if pool.kind is PoolKind.SLOT}
        self._windows = {
            pool.name: _STATE_WINDOW if pool.name in self._slots else pool.window
            for pool in pools.logical_pools
        }
        self.allocators = {
            name: PageAllocator(name, pages, shuffle_seed=shuffle_seed)
            for name, pages in pools.pages.items()
        }
        self.reclaim: Callable[[], object] = _reclaim_nothing
        """Called when pages are short, to wait for those that somebody else still reads."""

    def first_page(self, space: str, tokens: int) -> int:
        """Return the first of a sequence's pages that its next token needs, once `tokens` are in the pools."""
        window = self._windows[space]
        return 0 if window is None else max(0, tokens - window + 1) // self._page_size

    def window_pages(self, space: str) -> int | None:
        """Return how many pages before a boundary the next token needs; None for all of them."""
        window = self._windows[space]
        return None if window is None else -(-(window - 1) // self._page_size)

    def hold(self, sequence: PagedSequence, first: int, last: int) -> None:
        """Allocate what tokens [first, last) of a sequence need beside the pages it holds.

        Of the states behind its pages, that is the last one alone.

        Raises:
            ContractError: too few pages are free; what was allocated before stays with the sequence.
        """
        for space, allocator in self.allocators.items():
            table = sequence.tables[space]
            seen = last if space in self._slots else first
            start = max(len(table.pages), self.first_page(space, seen))
            missing = -(-last // self._page_size) - start
            if missing > allocator.free_pages:
                self.reclaim()
            if missing > 0:
                table.replace(start, allocator.allocate(missing))

    def drop(self, sequence: PagedSequence, tokens: int) -> None:
        """Release the pages that no token from `tokens` on looks back to."""
        for space in self.allocators:
            self._release(sequence, space, self.first_page(space, tokens))

    def release(self, sequence: PagedSequence) -> None:
        """Release every page of a sequence."""
        for space, table in sequence.tables.items():
            self._release(sequence, space, len(table.pages))

    def retain(self, pages: Mapping[str, Iterable[int]]) -> None:
        """Keep pages, by index space, for somebody who still reads them."""
        for space, numbers in pages.items():
            self.allocators[space].retain(numbers)

    def let_go(self, pages: Mapping[str, Iterable[int]]) -> None:
        """Undo `retain`."""
        for space, numbers in pages.items():
            self.allocators[space].release(numbers)

    def _release(self, sequence: PagedSequence, space: str, count: int) -> None:
        table = sequence.tables[space]
        held = [page for page in table.pages[:count] if page != RESERVED_PAGE]
        if held:
            table.replace(0, [RESERVED_PAGE] * count)
            self.allocators[space].release(held)
