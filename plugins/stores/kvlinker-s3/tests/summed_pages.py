"""Pages in host memory, whose copies make checksums: those of a shelf are out of reach for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlinker.device import DeviceAccess, HostAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import ObjectKey, ReadRequest, ReadSession, ReadStatus, Store, WriteBatch
from kvlinker.testing.shelves import allow

__all__ = ["SummedPages"]

_FINGERPRINT = b"summed"


class SummedPages:
    """A pool of one buffer for each range; the second half of its pages is read into."""

    def __init__(self, *, pages: int, ranges: int = 4, row_bytes: int = 256) -> None:
        """Fill the first half of the pages with bytes that differ."""
        self.pages = pages
        self._object_bytes = ranges * row_bytes
        self.array = np.random.default_rng(1).integers(
            0, 256, (ranges, 2 * pages, row_bytes), dtype=np.uint8
        )
        spans = [
            BufferSpan(
                base_ptr=rows.ctypes.data,
                rows=2 * pages,
                row_bytes=row_bytes,
                row_stride=row_bytes,
                label=f"summed[{i}]",
            )
            for i, rows in enumerate(self.array)
        ]
        self.entry = DevicePoolEntry(
            name="summed",
            indices_from_pool="kv",
            components=[spans],
            layer_mapping={layer: layer for layer in range(ranges)},
            page_size=1,
            rows_are_pages=True,
        )

    def _plan(self, pages: Sequence[int]) -> TransferPlan:
        return self.entry.page_plan(self.entry.prepare_locations(pages))

    def stock(self, store: Store, keys: Sequence[ObjectKey]) -> None:
        """Write the first half."""
        plan = self._plan(range(self.pages))
        batch = WriteBatch(keys=tuple(keys), plan=plan, fingerprint=_FINGERPRINT)
        store.write([batch], HostAccess(), may_publish=allow)

    def request(self, keys: Sequence[ObjectKey]) -> ReadRequest:
        """Return the request for what was written."""
        return ReadRequest(
            keys=tuple(keys), object_bytes=self._object_bytes, fingerprint=_FINGERPRINT
        )

    def read(
        self, session: ReadSession, memory: DeviceAccess | None = None, *, layer: int | None = None
    ) -> tuple[ReadStatus, ...]:
        """Read the second half, whole or one layer of it, and compare what is said to be right."""
        self.array[:, self.pages :] = 0xFF
        locations = self.entry.prepare_locations(range(self.pages, 2 * self.pages))
        plan = (
            self.entry.page_plan(locations)
            if layer is None
            else self.entry.layer_plan(locations, layer)
        )
        assert plan is not None
        statuses = session.read(plan, memory or HostAccess())
        chosen = self.array if layer is None else self.array[layer : layer + 1]
        is_same = (chosen[:, : self.pages] == chosen[:, self.pages :]).all(axis=(0, 2))
        assert all(is_same[[status is ReadStatus.OK for status in statuses]])
        return statuses

    def read_anew(
        self, store: Store, keys: Sequence[ObjectKey], memory: DeviceAccess | None = None
    ) -> tuple[ReadStatus, ...]:
        """Read everything whole in a session of its own."""
        with store.open_read(self.request(keys)) as session:
            return self.read(session, memory)
