"""Device accesses that change what passes through them; faults are made of these."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.plans import PreparedPages, TransferPlan
from kvlinker.testing.memory_sessions import staging_slots

__all__ = ["CopyingPart", "FlippingAccess", "SkippingAccess", "first_rows"]


def first_rows(pages: PreparedPages) -> tuple[tuple[str, int], ...]:
    """Return pool and first pool row of each page: what tells pages apart, however plans number them."""
    runs = np.searchsorted(pages.page, np.arange(pages.num_pages))
    return tuple((pages.pool, row) for row in pages.row[runs].tolist())


class SkippingAccess(DeviceAccess):
    """Leaves some pages out of every copy."""

    def __init__(self, access: DeviceAccess, rows: Collection[tuple[str, int]]) -> None:
        """Skip the pages that begin at these pool rows."""
        self._access = access
        self._rows = rows

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        self._copy(self._access.copy_out, plan, host)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        self._copy(self._access.copy_in, plan, host)

    def _copy(
        self,
        run: Callable[[TransferPlan, HostObjects], None],
        plan: TransferPlan,
        host: HostObjects,
    ) -> None:
        kept = [i for i, row in enumerate(first_rows(plan.pages)) if row not in self._rows]
        # Numbers of the kept pages are not those of the plan, so nobody is told of them.
        run(plan.select(kept), replace(host, slots=host.slots[kept], copied=None, sums=None))


class FlippingAccess(DeviceAccess):
    """Flips the first byte of every range of some pages, in either direction."""

    def __init__(self, access: DeviceAccess, rows: Collection[tuple[str, int]]) -> None:
        """Flip bytes of the pages that begin at these pool rows."""
        self._access = access
        self._rows = rows

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        self._access.copy_out(plan, host)
        self._flip(plan, host)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        # The store's own copy stays right: what is flipped is a copy of its slots.
        array, altered = staging_slots(host.span.rows, host.span.row_bytes)
        for slot in set(host.slots.tolist()):
            source = host.span.base_ptr + slot * host.span.row_stride
            ctypes.memmove(array[slot].ctypes.data, source, host.span.row_bytes)
        changed = replace(altered, slots=host.slots, first_offset=host.first_offset)
        self._flip(plan, changed)
        self._access.copy_in(plan, changed)

    def _flip(self, plan: TransferPlan, host: HostObjects) -> None:
        for number, row in enumerate(first_rows(plan.pages)):
            if row not in self._rows:
                continue
            start = host.span.base_ptr + int(host.slots[number]) * host.span.row_stride
            for offset in plan.spans.offset.tolist():
                byte = ctypes.c_uint8.from_address(start + offset - host.first_offset)
                byte.value ^= 0xFF


class CopyingPart(DeviceAccess):
    """Copies half of the pages, rounded down, and raises."""

    def __init__(self, access: DeviceAccess, error: BaseException) -> None:
        """Raise copies of this error."""
        self._access = access
        self._error = error

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        self._copy(self._access.copy_out, plan, host)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        self._copy(self._access.copy_in, plan, host)

    def _copy(
        self,
        run: Callable[[TransferPlan, HostObjects], None],
        plan: TransferPlan,
        host: HostObjects,
    ) -> None:
        half = plan.num_pages // 2
        run(
            plan.select(range(half)), replace(host, slots=host.slots[:half], copied=None, sums=None)
        )
        raise copy.copy(self._error)
