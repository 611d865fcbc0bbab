"""Very many small objects: as pages to read and write, and as the values that stores of framed objects keep.

A million of them are put where a store keeps them by its raw client, which takes seconds and no store's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvlinker.device import HostAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.frames import Checksum, FrameLayout, encode_headers
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import ObjectKey, ReadRequest, ReadStatus, Store, WriteBatch
from kvlinker.testing.shelves import allow
from kvlinker.testing.verdicts import fail

__all__ = ["CALL_OBJECTS", "ManyObjects"]

CALL_OBJECTS = 4096
"""Objects of one call: those of a prompt of a quarter of a million tokens."""
_PAGE_BYTES = 64
_FINGERPRINT = b"many objects"
_NAMESPACE = b"many objects"
_PRIME = 251


class ManyObjects:
    """Objects with numbers from 0 on; those of a call are neighbours."""

    def __init__(self) -> None:
        """Make the pages of one call, to write from and to read into."""
        rows = np.arange(2 * CALL_OBJECTS * _PAGE_BYTES) % _PRIME
        self._memory = rows.astype(np.uint8).reshape(2 * CALL_OBJECTS, _PAGE_BYTES)
        span = BufferSpan(
            base_ptr=self._memory.ctypes.data,
            rows=2 * CALL_OBJECTS,
            row_bytes=_PAGE_BYTES,
            row_stride=_PAGE_BYTES,
            label="rows",
        )
        self._entry = DevicePoolEntry(
            name="kv",
            indices_from_pool="kv",
            components=[[span]],
            layer_mapping={0: 0},
            page_size=1,
            rows_are_pages=True,
        )

    @property
    def namespace(self) -> bytes:
        """What all keys begin with."""
        return _NAMESPACE[:NAMESPACE_BYTES]

    def calls(self, count: int) -> Iterator[tuple[ObjectKey, ...]]:
        """Yield the keys of so many objects, call by call."""
        for start in range(0, count, CALL_OBJECTS):
            numbers = range(start, min(start + CALL_OBJECTS, count))
            yield tuple(self.namespace + b"%020d" % number for number in numbers)

    def values(self, keys: Sequence[ObjectKey], *, checksum: Checksum) -> list[bytes]:
        """Return the framed values of the objects of a call: a header and the payload.

        Args:
            keys: of a call, from its first object on.
            checksum: the one that the store makes headers with.
        """
        payloads = self._memory[: len(keys)]
        layout = FrameLayout(offsets=(0,), sizes=(_PAGE_BYTES,))
        sums = np.array([[checksum(row.data)] for row in payloads], dtype=np.uint64)
        headers = encode_headers(layout, keys, _FINGERPRINT, sums, checksum=checksum)
        return [row.tobytes() for row in np.concatenate([headers, payloads], axis=1)]

    def write(self, store: Store, keys: Sequence[ObjectKey]) -> None:
        """Store the objects of a call, or some of its first ones, through the store.

        Raises:
            AssertionError: not all of them are stored.
        """
        plan = self._plan(0, len(keys))
        batch = WriteBatch(keys=tuple(keys), plan=plan, fingerprint=_FINGERPRINT)
        (statuses,) = store.write([batch], HostAccess(), may_publish=allow)
        if not all(status.is_stored for status in statuses):
            fail(f"a write of {len(keys)} small objects answered {set(statuses)}")

    def check(self, store: Store, keys: Sequence[ObjectKey]) -> None:
        """Read the objects of a call, and compare every byte.

        Raises:
            AssertionError: one is not there, or not right.
        """
        target = self._memory[CALL_OBJECTS : CALL_OBJECTS + len(keys)]
        target[:] = 0xFF
        request = ReadRequest(keys=tuple(keys), object_bytes=_PAGE_BYTES, fingerprint=_FINGERPRINT)
        with store.open_read(request) as session:
            statuses = set(session.read(self._plan(CALL_OBJECTS, len(keys)), HostAccess()))
        if statuses != {ReadStatus.OK}:
            fail(f"a read of {len(keys)} small objects answered {statuses}")
        if not np.array_equal(target, self._memory[: len(keys)]):
            fail(f"a read of {len(keys)} small objects left wrong bytes")

    def _plan(self, first: int, count: int) -> TransferPlan:
        located = self._entry.prepare_locations(range(first, first + count))
        return self._entry.page_plan(located)
