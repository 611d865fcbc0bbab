"""Page numbers: which pages of an index space are free, and how many holders each other one has."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

from kvlinker.errors import ContractError

__all__ = ["RESERVED_PAGE", "PageAllocator"]

RESERVED_PAGE = 0
"""Belongs to no request: stands in page tables for pages that a request does not hold."""


class PageAllocator:
    """The page numbers of one index space, each counted by its holders."""

    def __init__(self, name: str, pages: int, *, shuffle_seed: int | None = None) -> None:
        """Make every page but the reserved one free.

        Args:
            name: index space, named in messages.
            pages: page numbers 0 to `pages` - 1.
            shuffle_seed: hand pages out in a shuffled order, as a pool does that has been in use; None for ascending.

        Raises:
            ContractError: no page would be left beside the reserved one.
        """
        if pages <= RESERVED_PAGE + 1:
            msg = f"index space {name!r}: needs at least 2 pages, because page {RESERVED_PAGE} is reserved; got {pages}"
            raise ContractError(msg)
        self.name = name
        self.pages = pages
        numbers = list(range(RESERVED_PAGE + 1, pages))
        if shuffle_seed is not None:
            random.Random(f"{shuffle_seed} {name}").shuffle(numbers)  # noqa: S311  # an order, not a secret
        self._free = deque(numbers)
        self._holders = [0] * pages

    @property
    def free_pages(self) -> int:
        """How many pages have no holder."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Return pages that nobody held, each with one holder now.

        Raises:
            ContractError: fewer pages are free; none is taken.
        """
        if not 0 <= count <= len(self._free):
            msg = (
                f"index space {self.name!r}: {count} pages asked for, {len(self._free)} of {self.pages - 1} are free; "
                f"release requests or make the pools larger"
            )
            raise ContractError(msg)
        taken = tuple(self._free.popleft() for _ in range(count))
        for page in taken:
            self._holders[page] = 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Add a holder to each page.

        Raises:
            ContractError: nobody holds one of them, so that it may be handed out at any time.
        """
        for page in pages:
            self._check_held(page)
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one holder from each page; a page without holders is free.

        Raises:
            ContractError: nobody holds one of them.
        """
        for page in pages:
            self._check_held(page)
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _check_held(self, page: int) -> None:
        if not RESERVED_PAGE < page < self.pages or not self._holders[page]:
            msg = f"index space {self.name!r}: page {page} of {self.pages} is held by nobody"
            raise ContractError(msg)
