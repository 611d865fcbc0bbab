"""Two pages of a pool in host memory with as many layers as a test wants; page 1 is read into."""

from __future__ import annotations

import numpy as np

from kvlinker.entries import DevicePoolEntry
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import ReadRequest, WriteBatch
from kvlinker.testing.verdicts import fail

__all__ = ["LayeredPages"]


class LayeredPages:
    """A pool of one span for each layer."""

    def __init__(self, spans: int, size: int) -> None:
        """Make the pool, with `size` bytes of a page in each span."""
        rng = np.random.default_rng(0)
        self.memory = rng.integers(0, 255, (spans, 2, size), dtype=np.uint8)
        components = [
            [
                BufferSpan(
                    base_ptr=layer.ctypes.data,
                    rows=2,
                    row_bytes=size,
                    row_stride=size,
                    label=f"l{i}",
                )
                for i, layer in enumerate(self.memory)
            ]
        ]
        self.entry = DevicePoolEntry(
            name="kv",
            indices_from_pool="kv",
            components=components,
            layer_mapping={layer: layer for layer in range(spans)},
            page_size=1,
            rows_are_pages=True,
        )
        self.source = self.entry.page_plan(self.entry.prepare_locations([0]))
        self.target = self.entry.page_plan(self.entry.prepare_locations([1]))
        self.both = self.entry.page_plan(self.entry.prepare_locations([0, 1]))

    def layer(self, layer: int) -> TransferPlan:
        """Return the plan that reads one layer into page 1."""
        plan = self.entry.layer_plan(self.entry.prepare_locations([1]), layer)
        if plan is None:
            fail(f"layer {layer} is none of the pool's")
        return plan

    def batch(self, key: bytes) -> WriteBatch:
        """Return the batch that writes page 0."""
        return WriteBatch(keys=(key,), plan=self.source, fingerprint=b"pages")

    def request(self, key: bytes) -> ReadRequest:
        """Return the request for what `batch` writes."""
        size = self.source.object_bytes
        return ReadRequest(keys=(key,), object_bytes=size, fingerprint=b"pages")
