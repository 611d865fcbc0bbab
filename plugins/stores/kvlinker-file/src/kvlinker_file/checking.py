"""Ranges are checked right after they were copied, a few at a time, while the processor has them in its cache.

Fetching bytes from memory for a checksum takes as long as fetching them to copy them; so it is done once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.errors import ContractError
from kvlinker.plans import TransferPlan
from kvlinker_file.segments import SlotBlock, checksums_of

__all__ = ["CopyCheck", "RangeNumbers"]


class RangeNumbers:
    """Which range of an object lies where, by a table that is made once for all reads of a session."""

    def __init__(self, offsets: IndexArray, sizes: IndexArray) -> None:
        """Take an object's ranges.

        Args:
            offsets: [ranges] where each begins in the object.
            sizes: [ranges] bytes.
        """
        self._numbers = {
            place: number
            for number, place in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True))
        }

    def of_spans(self, plan: TransferPlan) -> Sequence[int] | None:
        """Return which range each of a plan's spans is; None where one is no single range."""
        places = zip(plan.spans.offset.tolist(), plan.range_bytes.tolist(), strict=True)
        try:
            return [self._numbers[place] for place in places]
        except KeyError:
            return None


class CopyCheck:
    """Checks what a copy tells of, as `HostObjects.copied`."""

    def __init__(self, block: SlotBlock, plan: TransferPlan, expected: NDArray[np.uint64]) -> None:
        """Prepare for a copy.

        Args:
            block: the objects' slots, in the plan's page order.
            plan: of whole pages, each span one range of the objects.
            expected: [spans, objects] checksums.
        """
        self._view = block.view
        self._starts: list[list[int]] = (
            plan.spans.offset[:, np.newaxis] + block.payload_starts()
        ).tolist()
        self._sizes = plan.range_bytes.tolist()
        self._expected: list[list[int]] = expected.tolist()
        self._told = np.zeros(expected.shape, dtype=np.bool_)
        self._is_right = np.ones(len(block), dtype=np.bool_)

    def __call__(self, span: int, pages: slice) -> None:
        """Check a span's ranges of some pages."""
        found = checksums_of(self._view, self._starts[span][pages], self._sizes[span])
        self._told[span, pages] = True
        if found != self._expected[span][pages]:
            expected = self._expected[span][pages]
            self._is_right[pages] &= [a == b for a, b in zip(found, expected, strict=True)]

    def are_right(self) -> NDArray[np.bool_]:
        """Return whether every range of each object was right: [objects].

        Raises:
            ContractError: the copy did not tell of some ranges, so that nobody knows what they were.
        """
        if not self._told.all():
            msg = (
                f"a device access that says that it tells what it copied told of {self._told.sum()} ranges "
                f"out of {self._told.size}; let its tells_copied be False"
            )
            raise ContractError(msg)
        return self._is_right
