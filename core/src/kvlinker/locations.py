"""Locations: the one place where an engine's slots are checked and become pages of a pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.errors import ContractError
from kvlinker.plans import PoolLife, PreparedPages
from kvlinker.transfers import as_index_array

__all__ = ["PageSpace"]

_SHOWN = 5
"""Indices of a page that a message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSpace:
    """What a pool's slots may be, and how many of its rows make a page."""

    pool: str
    page_size: int
    """Slots in a page."""
    page_rows: int
    """Pool rows in a page: 1 where rows are pages, the page size where rows are slots."""
    rows: int
    """Rows of the smallest span, such as a draft's."""
    smallest: str
    """Label of that span."""
    fragmented: bool
    """A page's slots need not be contiguous."""
    life: PoolLife = field(repr=False, compare=False)

    def prepare(self, indices: object) -> PreparedPages:
        """Validate slots and return the pages they make.

        Raises:
            ContractError: a wrong dtype or length, a page that is unaligned, scattered, repeated or out of bounds.
        """
        slots = as_index_array(indices, pool=self.pool)
        if len(slots) % self.page_size:
            self._refuse(
                f"got {len(slots)} indices, expected a multiple of the page size {self.page_size}"
            )
        if self.fragmented:
            self._check_rows(slots, 1)
            self._check_distinct(slots, "slot")
            return PreparedPages.of_slots(self.pool, slots, self.page_size, life=self.life)
        numbers = self._page_numbers(slots)
        starts = numbers * self.page_rows
        self._check_rows(starts, self.page_rows)
        self._check_distinct(numbers, "page")
        return PreparedPages.of_starts(self.pool, starts, self.page_rows, life=self.life)

    def _page_numbers(self, slots: IndexArray) -> IndexArray:
        pages = slots.reshape(-1, self.page_size)
        numbers = pages[:, 0] // self.page_size
        whole = numbers[:, np.newaxis] * self.page_size + np.arange(self.page_size)
        is_whole = pages == whole
        if not is_whole.all():
            bad = np.flatnonzero(~is_whole.all(axis=1))
            first = int(bad[0])
            self._refuse(
                f"page {first} of the request must be {self.page_size} consecutive slots from a "
                f"multiple of {self.page_size}, got {_shorten(pages[first])}"
            )
        return numbers

    def _check_rows(self, first: IndexArray, count: int) -> None:
        if not first.size or (first.min() >= 0 and first.max() <= self.rows - count):
            return
        outside = np.flatnonzero((first < 0) | (first > self.rows - count))
        if outside.size:
            row = int(first[outside[0]])
            self._refuse(
                f"page {row // self.page_rows} (rows {row}..{row + count - 1}) is out of bounds of "
                f"span {self.smallest!r} with {self.rows} rows"
            )

    def _check_distinct(self, numbers: IndexArray, what: str) -> None:
        ordered = np.sort(numbers)  # np.unique takes several times as long
        if (ordered[1:] == ordered[:-1]).any():
            values, counts = np.unique(numbers, return_counts=True)
            most = int(counts.argmax())
            self._refuse(
                f"{what} {int(values[most])} is named {int(counts[most])} times; "
                f"two keys cannot share one place"
            )

    def _refuse(self, problem: str) -> NoReturn:
        msg = f"pool {self.pool!r}: {problem}"
        raise ContractError(msg)


def _shorten(values: IndexArray) -> str:
    if len(values) <= _SHOWN:
        return str(values.tolist())
    shown = ", ".join(str(value) for value in values[: _SHOWN - 1].tolist())
    return f"[{shown}, ... {int(values[-1])}]"
