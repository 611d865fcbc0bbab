"""Pages of many ranges in one array: more than a call of the client may move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlinker.entries import DevicePoolEntry
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker.store import ObjectKey, ReadRequest, WriteBatch

__all__ = ["WidePages"]

_FINGERPRINT = b"wide"


class WidePages:
    """A pool of one buffer for each range, all in one region; the second half of its pages is read into."""

    def __init__(self, *, ranges: int, pages: int, row_bytes: int = 64) -> None:
        """Fill the first half of the pages with bytes that differ."""
        self.pages = pages
        self.array = np.zeros((ranges, 2 * pages, row_bytes), dtype=np.uint8)
        self.array[:, :pages] = np.random.default_rng(1).integers(
            0, 256, (ranges, pages, row_bytes), dtype=np.uint8
        )
        self.region = MemoryRegion(
            base_ptr=self.array.ctypes.data, size_bytes=self.array.nbytes, owner=self.array
        )
        spans = [
            BufferSpan(
                base_ptr=rows.ctypes.data,
                rows=2 * pages,
                row_bytes=row_bytes,
                row_stride=row_bytes,
                region=self.region,
                label=f"wide[{i}]",
            )
            for i, rows in enumerate(self.array)
        ]
        self.entry = DevicePoolEntry(
            name="wide",
            indices_from_pool="kv",
            components=[spans],
            layer_mapping={layer: layer for layer in range(ranges)},
            page_size=1,
            rows_are_pages=True,
        )

    def plan(self, pages: Sequence[int]) -> TransferPlan:
        """Return the plan of whole pages."""
        return self.entry.page_plan(self.entry.prepare_locations(pages))

    def batch(self, keys: Sequence[ObjectKey]) -> WriteBatch:
        """Return the batch that writes the first half."""
        plan = self.plan(range(self.pages))
        return WriteBatch(keys=tuple(keys), plan=plan, fingerprint=_FINGERPRINT)

    def request(self, keys: Sequence[ObjectKey]) -> ReadRequest:
        """Return the request for what it wrote."""
        size = len(self.array) * self.array.shape[2]
        return ReadRequest(keys=tuple(keys), object_bytes=size, fingerprint=_FINGERPRINT)

    @property
    def target(self) -> TransferPlan:
        """The plan of the second half."""
        return self.plan(range(self.pages, 2 * self.pages))

    def layer(self, number: int) -> TransferPlan:
        """Return the plan of one layer of the second half."""
        pages = self.entry.prepare_locations(range(self.pages, 2 * self.pages))
        plan = self.entry.layer_plan(pages, number)
        assert plan is not None
        return plan

    def forget(self) -> None:
        """Clear what was read."""
        self.array[:, self.pages :] = 0

    @property
    def landed(self) -> set[int]:
        """Which pages of the second half are what those of the first one are."""
        same = (self.array[:, : self.pages] == self.array[:, self.pages :]).all(axis=(0, 2))
        return set(np.flatnonzero(same).tolist())

    @property
    def has_landed(self) -> bool:
        """Whether all are."""
        return len(self.landed) == self.pages
