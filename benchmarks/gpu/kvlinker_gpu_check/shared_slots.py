"""Host slots in shared memory, as a store in memory has them: files of a tmpfs, mapped by every process."""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from kvlinker.device import HostObjects
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan, MemoryRegion

__all__ = ["SharedSlots"]

_HEADER_BYTES = 256
"""In front of each object, so that objects do not follow each other without a gap."""


class SharedSlots:
    """Slots for the objects of a plan, in memory that can be pinned."""

    def __init__(self, plan: TransferPlan, *, seed: int | None = None) -> None:
        """Make the memory, with random content where there is a seed, else with zeros."""
        stride = _HEADER_BYTES + plan.object_bytes
        file = os.memfd_create("kvlinker-gpu-check")
        try:
            self.size = -(-plan.num_pages * stride // mmap.PAGESIZE) * mmap.PAGESIZE
            os.posix_fallocate(file, 0, self.size)
            self.array: NDArray[np.uint8] = np.frombuffer(mmap.mmap(file, self.size), np.uint8)
        finally:
            os.close(file)
        if seed is not None:
            self.array[:] = np.random.default_rng(seed).integers(0, 256, self.size, np.uint8)
        span = BufferSpan(
            base_ptr=self.address,
            rows=plan.num_pages,
            row_bytes=stride,
            row_stride=stride,
            region=MemoryRegion(base_ptr=self.address, size_bytes=self.size, owner=self.array),
            label="shared slots",
        )
        slots = np.arange(plan.num_pages, dtype=np.int64)
        self.objects = HostObjects(span=span, slots=slots, first_offset=-_HEADER_BYTES)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.array.ctypes.data
