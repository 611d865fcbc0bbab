"""What a memory store hands out: read sessions and holds, and the host slots that bytes pass through."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import StoreClosedError
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import Hold, ObjectKey, ReadRequest, ReadSession, ReadStatus
from kvlinker.testing.objects import Lease, ObjectTable, StoredObject

__all__ = ["MemoryHold", "MemoryReadSession", "staging_slots"]


class MemoryReadSession(ReadSession):
    """Objects that were there when it was opened, pinned until it is closed."""

    def __init__(
        self,
        *,
        table: ObjectTable,
        request: ReadRequest,
        found: tuple[StoredObject | None, ...],
        check_plan: Callable[[TransferPlan], None],
        by_checksum: bool,
    ) -> None:
        """Keep what was pinned.

        Args:
            table: where the objects are unpinned, and corrupt ones dropped.
            request: what was asked for.
            found: one pinned object per key; None where there is none.
            check_plan: raises for plans that the store does not take.
            by_checksum: notice changed bytes and not only changed lengths.
        """
        self._table = table
        self._request = request
        self._found: tuple[StoredObject | None, ...] | None = found
        self._check_plan = check_plan
        self._by_checksum = by_checksum
        self._lock = threading.Lock()

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession."""
        found = self._found
        if found is None:
            msg = f"pool {plan.pool!r}: this read session was closed; open another"
            raise StoreClosedError(msg)
        self._request.check(plan)
        self._check_plan(plan)
        statuses = tuple(map(self._status, self._request.keys, found))
        good = [i for i, status in enumerate(statuses) if status is ReadStatus.OK]
        payloads = [stored.payload for stored in map(found.__getitem__, good) if stored]
        if payloads and len(plan.spans.base):
            _copy_in(plan.select(good), payloads, memory)
        return statuses

    def _status(self, key: ObjectKey, stored: StoredObject | None) -> ReadStatus:
        if stored is None:
            return ReadStatus.MISS
        same_length = len(stored.payload) == self._request.object_bytes
        if same_length and (stored.is_intact or not self._by_checksum):
            return ReadStatus.OK
        with self._table.lock:
            self._table.counters["corrupt"] += 1
            if self._table.get(key) is stored:
                self._table.drop(key)
        return ReadStatus.CORRUPT

    def close(self) -> None:
        """See ReadSession."""
        with self._lock:
            found, self._found = self._found, None
        self._table.unpin([stored for stored in found or () if stored is not None])


class MemoryHold(Hold):
    """A lease, and which of the asked keys it keeps."""

    def __init__(self, lease: Lease, present: tuple[bool, ...]) -> None:
        """Keep both."""
        self._lease = lease
        self._present = present

    @property
    def present(self) -> tuple[bool, ...]:
        """See Hold."""
        return self._present

    def release(self) -> None:
        """See Hold."""
        self._lease.released = True


def staging_slots(count: int, size: int) -> tuple[NDArray[np.uint8], HostObjects]:
    """Return host memory for `count` objects of `size` bytes, as an array and as slots."""
    array = np.zeros((count, size), dtype=np.uint8)
    span = BufferSpan(
        base_ptr=array.ctypes.data, rows=count, row_bytes=size, row_stride=size, label="staging"
    )
    return array, HostObjects(span=span, slots=np.arange(count, dtype=np.int64))


def _copy_in(plan: TransferPlan, payloads: Sequence[bytes], memory: DeviceAccess) -> None:
    """Copy the window of the objects that the plan covers into pool memory."""
    first = int(plan.spans.offset.min())
    size = int((plan.spans.offset + plan.range_bytes).max()) - first
    staging, host = staging_slots(len(payloads), size)
    for row, payload in zip(staging, payloads, strict=True):
        row[:] = np.frombuffer(payload, dtype=np.uint8, count=size, offset=first)
    memory.copy_in(plan, replace(host, first_offset=first))
