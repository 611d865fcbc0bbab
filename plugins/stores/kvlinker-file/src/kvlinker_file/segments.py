"""A segment is one slab file, mapped into memory and cut into slots of one size.

Its blocks were reserved before it was mapped, so that a full disk shows when a segment is made and
never as a SIGBUS when it is written.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import HostObjects
from kvlinker.errors import StoreError
from kvlinker.frames import header_bytes
from kvlinker.spans import BufferSpan

__all__ = ["Segment", "SlotKind", "checksum"]

_ALIGNMENT = 64
_MADV_POPULATE_WRITE = 23
"""Linux 5.14: fault pages in at once, seven times faster than one by one; older kernels say EINVAL."""
_PAGE_MASK = ~(mmap.PAGESIZE - 1)

checksum = xxhash.xxh3_64_intdigest
"""XXH3 with 64 bits: the checksum of headers and ranges."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SlotKind:
    """What fits into one kind of slot: objects of one length with one number of ranges."""

    payload_bytes: int
    ranges: int

    @property
    def header_bytes(self) -> int:
        """Bytes in front of the payload."""
        return header_bytes(self.ranges)

    @property
    def slot_bytes(self) -> int:
        """Bytes from slot to slot."""
        return -(-(self.header_bytes + self.payload_bytes) // _ALIGNMENT) * _ALIGNMENT

    def slots_in(self, size: int) -> int:
        """Return how many slots fit into so many bytes."""
        return size // self.slot_bytes


class Segment:
    """A mapped slab file; which of its slots are free is its own knowledge, what is in the others is not.

    Not locked: the store's lock guards `take` and `give`; the bytes of a slot belong to whoever took it.
    """

    def __init__(self, *, number: int, descriptor: int, file_bytes: int) -> None:
        """Map a reserved file; the descriptor is closed."""
        self.number = number
        self.file_bytes = file_bytes
        try:
            self._map = mmap.mmap(descriptor, file_bytes)
        finally:
            os.close(descriptor)
        self._view = memoryview(self._map)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._base = int(self._bytes.ctypes.data)

    def assign(self, kind: SlotKind, slots: int) -> None:
        """Cut the file into slots of a kind, all of them free."""
        self.kind = kind
        self.slots = slots
        self._free = np.arange(slots, dtype=np.int64)[::-1].copy()
        self.free_slots = slots
        self._is_present = np.zeros(slots, dtype=np.bool_)
        self._span = BufferSpan(
            base_ptr=self._base + kind.header_bytes,
            rows=slots,
            row_bytes=kind.payload_bytes,
            row_stride=kind.slot_bytes,
            label=f"segment {self.number}",
        )
        self._headers = np.ndarray(
            (slots, kind.header_bytes),
            dtype=np.uint8,
            buffer=self._bytes,
            strides=(kind.slot_bytes, 1),
        )

    # ---- slots --------------------------------------------------------------------------------

    def take(self, count: int) -> IndexArray:
        """Take up to `count` free slots."""
        left = max(0, self.free_slots - count)
        taken = self._free[left : self.free_slots][::-1].copy()
        self.free_slots = left
        return taken

    def take_these(self, slots: IndexArray) -> None:
        """Take slots that are known to be in use, before any other is taken."""
        is_free = np.ones(self.slots, dtype=np.bool_)
        is_free[slots] = False
        free = np.flatnonzero(is_free)[::-1]
        self._free[: len(free)] = free
        self.free_slots = len(free)

    def give(self, slots: IndexArray) -> None:
        """Give slots back."""
        end = self.free_slots + len(slots)
        self._free[self.free_slots : end] = slots
        self.free_slots = end

    @property
    def used_slots(self) -> int:
        """Slots that somebody has taken."""
        return self.slots - self.free_slots

    # ---- bytes --------------------------------------------------------------------------------

    def objects(self, slots: IndexArray) -> HostObjects:
        """Return the payloads of some slots, for DeviceAccess."""
        return HostObjects(span=self._span, slots=slots)

    def read_headers(self, slots: IndexArray) -> NDArray[np.uint8]:
        """Return a copy of the headers: [slots, header_bytes]."""
        return self._headers[slots]

    def write_headers(self, slots: IndexArray, headers: NDArray[np.uint8]) -> None:
        """Write headers in front of the payloads."""
        self._headers[slots] = headers

    def checksums(
        self, slots: IndexArray, offsets: IndexArray, sizes: IndexArray
    ) -> NDArray[np.uint64]:
        """Return the checksums of some ranges of the payloads as they are now: [slots, ranges]."""
        starts = slots[:, None] * self.kind.slot_bytes + (self.kind.header_bytes + offsets)
        lengths = chain.from_iterable(repeat(sizes.tolist(), len(slots)))
        view = self._view
        pairs = zip(starts.reshape(-1).tolist(), lengths, strict=True)
        digests = [checksum(view[start : start + length]) for start, length in pairs]
        return np.array(digests, dtype=np.uint64).reshape(starts.shape)

    def prepare_writing(self, slots: IndexArray) -> None:
        """Fault in the pages of slots that were not written since the file was mapped.

        Raises:
            StoreError: the disk cannot give the pages; writing them would have ended the process.
        """
        fresh = np.sort(slots[~self._is_present[slots]])
        if not fresh.size:
            return
        cuts = np.flatnonzero(np.diff(fresh) != 1) + 1
        for run in np.split(fresh, cuts):
            self._populate(int(run[0]), int(run[-1]) + 1)
        self._is_present[fresh] = True

    def _populate(self, first: int, end: int) -> None:
        start = first * self.kind.slot_bytes & _PAGE_MASK
        size = min(self.file_bytes, end * self.kind.slot_bytes) - start
        # Through ctypes, because mmap.madvise holds the interpreter lock for as long as the kernel works.
        libc = ctypes.CDLL(None, use_errno=True)
        address, length = ctypes.c_void_p(self._base + start), ctypes.c_size_t(size)
        if (
            libc.madvise(address, length, _MADV_POPULATE_WRITE)
            and ctypes.get_errno() == errno.EFAULT
        ):
            msg = (
                f"segment {self.number}: the disk cannot give the pages of slots {first}..{end - 1}"
            )
            raise StoreError(msg)

    def sync(self) -> None:
        """Return when the bytes written so far are on the disk."""
        self._map.flush()

    def close(self) -> None:
        """Unmap; nobody may use a slot any more."""
        self._view.release()
        del self._headers, self._bytes
        # A view that somebody still holds keeps the mapping alive; it goes with the view.
        with suppress(BufferError):
            self._map.close()
