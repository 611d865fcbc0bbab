"""Page tables: where one request's pages lie in an index space."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kvlinker.description import IndexArray
from kvlinker_transformers.pages import RESERVED_PAGE

__all__ = ["PageTable"]


class PageTable:
    """One request's pages, in sequence order; a page that it does not hold is the reserved one."""

    def __init__(self, page_size: int, device: torch.device, pages: Iterable[int] = ()) -> None:
        self.page_size = page_size
        self._device = device
        self._pages: list[int] = list(pages)
        self._numbers: torch.Tensor | None = None

    @property
    def pages(self) -> tuple[int, ...]:
        """The page numbers, in sequence order."""
        return tuple(self._pages)

    def replace(self, first: int, pages: Sequence[int]) -> None:
        """Set the numbers of the sequence's pages from `first` on, growing the table as needed."""
        missing = first + len(pages) - len(self._pages)
        self._pages.extend([RESERVED_PAGE] * missing)
        self._pages[first : first + len(pages)] = pages
        self._numbers = None

    def slots(self, first: int, last: int) -> IndexArray:
        """Return the slots of the sequence's pages [first, last): int64 [pages * page_size]."""
        pages = np.asarray(self._pages[first:last], dtype=np.int64)
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def locate(
        self, first: int, last: int, rows_per_page: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return page numbers and rows within them for the sequence's rows [first, last): int64 [T] each."""
        return self.locate_each(torch.arange(first, last, device=self._device), rows_per_page)

    def locate_each(
        self, rows: torch.Tensor, rows_per_page: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return page numbers and rows within them for any of the sequence's rows: int64 [T] each."""
        return self._tensor()[rows // rows_per_page], rows % rows_per_page

    def covering(self, first: int, last: int, rows_per_page: int) -> tuple[torch.Tensor, int]:
        """Return the numbers of the pages that hold rows [first, last), and how many rows to skip in them."""
        start = first // rows_per_page
        end = -(-last // rows_per_page)
        return self._tensor()[start:end], first - start * rows_per_page

    def _tensor(self) -> torch.Tensor:
        if self._numbers is None:
            self._numbers = torch.tensor(self._pages, dtype=torch.int64, device=self._device)
        return self._numbers
