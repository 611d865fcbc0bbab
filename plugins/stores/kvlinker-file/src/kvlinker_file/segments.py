"""A segment is one slab file, cut into slots of one size; a block is some slots of one kind, in any segments.

A segment's blocks were reserved before it was mapped, so that a full disk shows when the segment is made
and never as a SIGBUS when it is written.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, HostObjects, HostPin
from kvlinker.frames import header_bytes
from kvlinker.moving import summing_mover
from kvlinker.spans import BufferSpan
from kvlinker_file.mapping import FileMapping
from kvlinker_file.os_errors import changed_segment

__all__ = ["Segment", "SlotBlock", "SlotKind", "checksum", "checksums_of"]

_ALIGNMENT = 64

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

    @property
    def map_alignment(self) -> int:
        """Segments lie at multiples of this: of whole slots and of whole pages."""
        return math.lcm(self.slot_bytes, mmap.PAGESIZE)

    def slots_in(self, size: int) -> int:
        """Return how many slots fit into so many bytes."""
        return size // self.slot_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotBlock:
    """Some slots of one kind as rows of one span; the bytes between them are not ours to touch."""

    kind: SlotKind
    addresses: IndexArray
    """[slots] where each begins."""

    def __len__(self) -> int:
        return len(self.addresses)

    def select(self, chosen: slice | IndexArray) -> SlotBlock:
        """Return some of the slots; numbers of them are ascending, each once, so that as many as there are name all."""
        if isinstance(chosen, np.ndarray) and chosen.dtype != np.bool_ and len(chosen) == len(self):
            return self
        return SlotBlock(kind=self.kind, addresses=self.addresses[chosen])

    @cached_property
    def _base(self) -> int:
        return int(self.addresses.min())

    @cached_property
    def _rows(self) -> IndexArray:
        return (self.addresses - self._base) // self.kind.slot_bytes

    @cached_property
    def view(self) -> memoryview:
        """All bytes from the first slot to the last."""
        size = int(self.addresses.max()) + self.kind.slot_bytes - self._base
        return memoryview((ctypes.c_char * size).from_address(self._base)).cast("B")

    @cached_property
    def objects(self) -> HostObjects:
        """The payloads, for DeviceAccess; there must be at least one."""
        span = BufferSpan(
            base_ptr=self._base + self.kind.header_bytes,
            rows=int(self._rows.max()) + 1,
            row_bytes=self.kind.payload_bytes,
            row_stride=self.kind.slot_bytes,
            label="slots",
        )
        return HostObjects(span=span, slots=self._rows)

    def _headers(self) -> NDArray[np.void]:
        return np.ndarray(
            (int(self._rows.max()) + 1,),
            dtype=np.dtype((np.void, self.kind.header_bytes)),
            buffer=self.view,
            strides=(self.kind.slot_bytes,),
        )

    def read_headers(self) -> NDArray[np.uint8]:
        """Return a copy of the headers: [slots, header_bytes]."""
        if not len(self):
            return np.empty((0, self.kind.header_bytes), dtype=np.uint8)
        raw = self._headers()[self._rows]
        return raw.view(np.uint8).reshape(len(self), self.kind.header_bytes)

    def write_headers(self, headers: NDArray[np.uint8]) -> None:
        """Write headers in front of the payloads."""
        rows = headers.view(np.dtype((np.void, self.kind.header_bytes))).reshape(len(self))
        self._headers()[self._rows] = rows

    def payload_starts(self) -> IndexArray:
        """Return where each payload begins in the view."""
        return self.addresses - self._base + self.kind.header_bytes

    def checksums(self, offsets: IndexArray, sizes: IndexArray) -> NDArray[np.uint64]:
        """Return the checksums of some ranges of the payloads as they are now: [slots, ranges]."""
        mover = summing_mover(checksum)
        if mover is not None:
            places = (self.addresses[:, None] + self.kind.header_bytes) + offsets
            lengths = np.broadcast_to(sizes, places.shape)
            return mover.sums(places.reshape(-1), lengths.reshape(-1)).reshape(places.shape)
        starts = self.payload_starts()[:, None] + offsets
        digests = [
            checksums_of(self.view, column.tolist(), size)
            for column, size in zip(starts.T, sizes.tolist(), strict=True)
        ]
        return np.array(digests, dtype=np.uint64).reshape(starts.T.shape).T


def checksums_of(view: memoryview, starts: Sequence[int], size: int) -> list[int]:
    """Return the checksums of as many bytes from each of several starts on."""
    ends = [start + size for start in starts]
    return list(map(checksum, map(view.__getitem__, map(slice, starts, ends))))


class Segment:
    """A slab file as this process sees it, mapped when it is first needed; the bytes of a slot are its taker's."""

    def __init__(
        self,
        *,
        number: int,
        file_bytes: int,
        kind: SlotKind,
        slots: int,
        open_file: Callable[[int, int], int | None],
        first_row: int = 0,
        incarnation: int = 1,
    ) -> None:
        """Describe a file.

        Args:
            number: of the file.
            file_bytes: its size.
            kind: of its slots.
            slots: how many.
            open_file: returns a descriptor of a file that has a number and a size; None where there is none.
            first_row: row of the first slot.
            incarnation: of the file.
        """
        self.number = number
        self.file_bytes = file_bytes
        self.kind = kind
        self.slots = slots
        self.first_row = first_row
        self.incarnation = incarnation
        self._open_file = open_file
        self._lock = threading.Lock()
        self._is_present = np.zeros(slots, dtype=np.bool_)
        self._mapping: FileMapping | None = None
        self._pins: set[HostPin] = set()

    @property
    def rows(self) -> slice:
        """The rows of its slots."""
        return slice(self.first_row, self.first_row + self.slots)

    def map(self) -> FileMapping:
        """Map the file, which must not go meanwhile: one of its slots is taken or pinned, or nobody else is there.

        Raises:
            OSError: it is not there, not what was made, or cannot be mapped.
        """
        with self._lock:
            if self._mapping is None:
                descriptor = self._open_file(self.number, self.file_bytes)
                if descriptor is None:
                    raise changed_segment(self.number)
                self._mapping = FileMapping(
                    descriptor, self.file_bytes, alignment=self.kind.map_alignment
                )
            return self._mapping

    @property
    def is_pinned(self) -> bool:
        """Whether some access has pinned it."""
        return bool(self._pins)

    def pin(self, memory: DeviceAccess) -> bool:
        """Let an access pin the file's memory as long as it is mapped; False where that cannot be.

        Raises:
            OSError: see `map`.
        """
        address = self.map().address
        with self._lock:
            pin = memory.pin_host(address, self.file_bytes)
            if pin is not None:
                self._pins.add(pin)  # each access has one pin of it, however often it is asked
            return pin is not None

    def addresses(self, slots: IndexArray) -> IndexArray:
        """Return where slots begin.

        Raises:
            OSError: see `map`.
        """
        return self.map().address + slots * self.kind.slot_bytes

    def prepare_writing(self, slots: IndexArray) -> None:
        """Fault in the pages of slots that were not written since the file was mapped.

        Raises:
            OSError: see `map`.
            StoreError: the disk cannot give the pages; writing them would have ended the process.
        """
        fresh = np.sort(slots[~self._is_present[slots]])
        for first, last in _runs(fresh):
            size = self.kind.slot_bytes
            self.map().populate(first * size, (last + 1) * size)
        self._is_present[fresh] = True

    def sync(self) -> None:
        """Return when the bytes written so far are on the disk."""
        self.map().sync()

    def close(self) -> None:
        """Unpin and unmap; nobody may use a slot any more. Idempotent.

        What a device does not let go of stays mapped until the process ends.
        """
        with self._lock:
            if self._mapping is not None:
                kept = [pin for pin in self._pins if not pin.release()]
                if not kept:
                    self._mapping.close()
                self._mapping = None
                self._pins.clear()


def _runs(slots: IndexArray) -> Sequence[tuple[int, int]]:
    """Return the first and last of each run of consecutive slots."""
    cuts = np.flatnonzero(np.diff(slots) != 1)
    first = np.concatenate([slots[:1], slots[cuts + 1]])
    last = np.concatenate([slots[cuts], slots[-1:]])
    return tuple(zip(first.tolist(), last.tolist(), strict=True))
