"""Pool memory for tests: on the host, or behind addresses that nobody can dereference."""

from __future__ import annotations

import bisect
import ctypes
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, HostAccess, HostObjects
from kvlinker.errors import ContractError
from kvlinker.pinning import HostPins
from kvlinker.spans import BufferSpan, MemoryKind, MemoryRegion
from kvlinker.staged_chunks import BUFFERS, StagedChunk, runs_of
from kvlinker.staging import PINNED_RUN_BYTES, PendingCopy, StagedAccess

__all__ = [
    "OPAQUE_BASE",
    "CopyTiming",
    "HostMemory",
    "HostStagingBuffer",
    "OpaqueAccess",
    "OpaqueMemory",
    "PoolMemory",
]

OPAQUE_BASE = 0x40F0_0000_0000_0000
"""Non-canonical on x86-64 and arm64 (with top-byte ignore too): a dereference faults, whatever is mapped."""
_GUARD_BYTES = 4096
"""Between allocations, so that a range that leaves its buffer hits nothing."""

_Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class _Allocation:
    address: int
    storage: _Bytes
    """All bytes, padding included."""
    rows: _Bytes
    """[rows, row_bytes] view of the data."""
    label: str


class PoolMemory(ABC):
    """Buffers that spans are made of, readable by tests whatever their addresses are.

    Fresh memory is filled with 0xA5, so that nothing looks right by accident.
    """

    def __init__(self) -> None:
        """Make a memory without buffers."""
        self._allocations: dict[int, _Allocation] = {}

    @abstractmethod
    def access(self) -> DeviceAccess:
        """Return a new access to this memory, as the linker would use it."""

    @abstractmethod
    def _place(self, storage: _Bytes) -> tuple[int, MemoryRegion]:
        """Return the address that the storage's first byte goes by, and its region."""

    def allocate(
        self, rows: int, row_bytes: int, *, row_stride: int | None = None, label: str = ""
    ) -> BufferSpan:
        """Return the span of a new buffer.

        Args:
            rows: how many, at least 1.
            row_bytes: bytes of data in a row.
            row_stride: bytes from row to row, for padded rows; `row_bytes` by default.
            label: name of the span, also in snapshots.
        """
        stride = row_bytes if row_stride is None else row_stride
        storage = np.full(rows * stride, 0xA5, dtype=np.uint8)
        address, region = self._place(storage)
        span = BufferSpan(
            base_ptr=address,
            rows=rows,
            row_bytes=row_bytes,
            row_stride=stride,
            region=region,
            label=label,
        )
        view = storage.reshape(rows, stride)[:, :row_bytes]
        self._allocations[address] = _Allocation(address, storage, view, label)
        return span

    def read(self, span: BufferSpan, first_row: int, rows: int = 1) -> bytes:
        """Return the data of some rows, without their padding."""
        return self._rows(span)[first_row : first_row + rows].tobytes()

    def write(self, span: BufferSpan, first_row: int, content: bytes) -> None:
        """Write the data of some rows, as a model's kernel would; their padding stays."""
        rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, span.row_bytes)
        self._rows(span)[first_row : first_row + len(rows)] = rows

    def poison(self, byte: int = 0xFF) -> None:
        """Overwrite all data and padding, as a fresh process would find it."""
        for allocation in self._allocations.values():
            allocation.storage[:] = byte

    def snapshot(self) -> dict[str, bytes]:
        """Return label to all bytes, padding included: equal snapshots mean that nothing was written."""
        return {
            allocation.label or hex(allocation.address): allocation.storage.tobytes()
            for allocation in self._allocations.values()
        }

    def _rows(self, span: BufferSpan) -> _Bytes:
        """[rows, row_bytes] the span's data; the span may group the rows of its buffer."""
        allocation = self._allocations[span.base_ptr]
        if allocation.rows.shape[1] == span.row_bytes:
            return allocation.rows
        return allocation.storage[: span.rows * span.row_bytes].reshape(span.rows, span.row_bytes)


class HostMemory(PoolMemory):
    """Pool memory in numpy arrays under their real addresses."""

    def access(self) -> HostAccess:
        """See PoolMemory."""
        return HostAccess()

    def _place(self, storage: _Bytes) -> tuple[int, MemoryRegion]:
        address = storage.ctypes.data
        region = MemoryRegion(base_ptr=address, size_bytes=storage.size, owner=storage)
        return address, region


class OpaqueMemory(PoolMemory):
    """Pool memory whose addresses cannot be dereferenced: whoever takes a shortcut through them crashes."""

    def __init__(self, *, staging_bytes: int = 1 << 16) -> None:
        """Make a memory without buffers, whose accesses stage through so many bytes."""
        super().__init__()
        self._staging_bytes = staging_bytes
        self._next = OPAQUE_BASE
        self._bases: list[int] = []

    def access(self) -> OpaqueAccess:
        """See PoolMemory."""
        return OpaqueAccess(self, staging_bytes=self._staging_bytes)

    def _place(self, storage: _Bytes) -> tuple[int, MemoryRegion]:
        address = self._next
        used = -(-storage.size // _GUARD_BYTES) * _GUARD_BYTES
        self._next += used + _GUARD_BYTES
        self._bases.append(address)
        region = MemoryRegion(
            base_ptr=address,
            size_bytes=storage.size,
            device="opaque:0",
            kind=MemoryKind.DEVICE,
            owner=storage,
        )
        return address, region

    def gather(self, addresses: IndexArray, size: int) -> _Bytes:
        """Return the bytes at some addresses: uint8 [addresses, size].

        Raises:
            ContractError: a range leaves its buffer.
        """
        parts = [self._range(address, size) for address in addresses.tolist()]
        return np.stack(parts) if parts else np.empty((0, size), dtype=np.uint8)

    def scatter(self, addresses: IndexArray, content: _Bytes) -> None:
        """Write rows of bytes to some addresses: uint8 [addresses, size].

        Raises:
            ContractError: a range leaves its buffer.
        """
        for address, row in zip(addresses.tolist(), content, strict=True):
            self._range(address, len(row))[:] = row

    def _range(self, address: int, size: int) -> _Bytes:
        number = bisect.bisect_right(self._bases, address) - 1
        if number >= 0:
            allocation = self._allocations[self._bases[number]]
            start = address - allocation.address
            if start + size <= len(allocation.storage):
                return allocation.storage[start : start + size]
        msg = f"bytes [{address:#x}, {address + size:#x}) lie in no buffer of this memory"
        raise ContractError(msg)


class CopyTiming(Enum):
    """When a device that copies at its own pace does so; both ends of what is possible."""

    AT_START = "at_start"
    """At once: a buffer that the host still reads is overwritten."""
    AT_WAIT = "at_wait"
    """As late as can be: a buffer that the host refills too early goes out with the wrong bytes."""
    EITHER = "either"
    """One or the other for each copy, from a seeded generator."""


@dataclass(frozen=True, slots=True, eq=False)
class HostStagingBuffer:
    """A staging buffer in ordinary host memory."""

    array: _Bytes

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.array.ctypes.data

    @property
    def size_bytes(self) -> int:
        """Bytes in it."""
        return self.array.size


class _Tally:
    """How many copies are between their start and the wait for them."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._lock = threading.Lock()

    def add(self, change: int) -> None:
        with self._lock:
            self.now += change
            self.peak = max(self.peak, self.now)


class _Copy:
    """A copy that runs when its device chooses to, and is counted until it is waited for."""

    def __init__(self, copy: Callable[[], None], tally: _Tally, *, now: bool) -> None:
        self._copy: Callable[[], None] | None = copy
        if now:
            self._run()
        self._tally: _Tally | None = tally
        tally.add(1)

    def _run(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()

    def wait(self) -> None:
        """Return once the copy is done."""
        tally, self._tally = self._tally, None
        if tally is not None:
            tally.add(-1)
        self._run()


class OpaqueAccess(StagedAccess[HostStagingBuffer]):
    """Access to an OpaqueMemory through staging buffers, as to a device's."""

    def __init__(
        self,
        memory: OpaqueMemory,
        *,
        staging_bytes: int = 1 << 16,
        timing: CopyTiming = CopyTiming.AT_WAIT,
        seed: int = 0,
        pins: HostPins | None = None,
        pinned_run_bytes: int = PINNED_RUN_BYTES,
    ) -> None:
        """Make the buffers.

        Args:
            memory: where the plans' addresses lie.
            staging_bytes: all buffers together.
            timing: when copies run between their start and the wait for them.
            seed: of the choices of `CopyTiming.EITHER`.
            pins: what pins host memory; None for a device that cannot.
            pinned_run_bytes: loads of shorter runs go through buffers all the same.
        """
        size = staging_bytes // BUFFERS
        super().__init__(
            loads=_buffers(size),
            offloads=_buffers(size),
            pins=pins,
            pinned_run_bytes=pinned_run_bytes,
        )
        self.pinned_copies = 0
        """Copies that were started from pinned slots."""
        self._memory = memory
        self._timing = timing
        self._random = random.Random(seed)  # noqa: S311 - chooses timings, not secrets
        self._tally = _Tally()

    @property
    def pending(self) -> int:
        """Copies that were started and not waited for."""
        return self._tally.now

    @property
    def peak_pending(self) -> int:
        """The most copies that were pending at once."""
        return self._tally.peak

    def start_gather(self, chunk: StagedChunk, buffer: HostStagingBuffer) -> PendingCopy:
        """See StagedAccess."""
        return self._start(lambda: self._gather(chunk, buffer))

    def start_scatter(self, chunk: StagedChunk, buffer: HostStagingBuffer) -> PendingCopy:
        """See StagedAccess."""
        return self._start(lambda: self._scatter(chunk, buffer))

    def start_pinned_scatter(
        self, chunk: StagedChunk, buffer: HostStagingBuffer, host: HostObjects
    ) -> PendingCopy:
        """See StagedAccess; the slots are read when the device chooses to copy."""
        self.pinned_copies += 1

        def copy() -> None:
            for place, content in _pinned_runs(chunk, host):
                buffer.array[place : place + len(content)] = content
            self._scatter(chunk, buffer)

        return self._start(copy)

    def _start(self, copy: Callable[[], None]) -> PendingCopy:
        now = self._timing is CopyTiming.AT_START
        if self._timing is CopyTiming.EITHER:
            now = self._random.random() < 0.5  # noqa: PLR2004 - one of two
        return _Copy(copy, self._tally, now=now)

    def _gather(self, chunk: StagedChunk, buffer: HostStagingBuffer) -> None:
        for addresses, block in _blocks(chunk, buffer):
            block[:] = self._memory.gather(addresses, block.shape[1])

    def _scatter(self, chunk: StagedChunk, buffer: HostStagingBuffer) -> None:
        for addresses, block in _blocks(chunk, buffer):
            self._memory.scatter(addresses, block)


def _buffers(size: int) -> tuple[HostStagingBuffer, HostStagingBuffer]:
    return (
        HostStagingBuffer(np.zeros(size, dtype=np.uint8)),
        HostStagingBuffer(np.zeros(size, dtype=np.uint8)),
    )


def _blocks(chunk: StagedChunk, buffer: HostStagingBuffer) -> list[tuple[IndexArray, _Bytes]]:
    """Return for each span its units' addresses and their block: uint8 [units, unit bytes]."""
    spans, units, rows = chunk.plan.spans, chunk.units, chunk.unit_rows
    found = []
    for i, place in enumerate(chunk.places.tolist()):
        size = int(spans.row_bytes[i]) * rows
        addresses = spans.base[i] + units * (spans.stride[i] * rows)
        strides = (chunk.page_bytes or size, 1)
        block = as_strided(buffer.array[place:], (len(units), size), strides)
        found.append((addresses, block))
    return found


def _pinned_runs(chunk: StagedChunk, host: HostObjects) -> Iterator[tuple[int, _Bytes]]:
    """Yield where in the buffer each run of each page goes, and what the slots hold there now."""
    spans, sizes, span = chunk.plan.spans, chunk.plan.range_bytes, host.span
    starts = runs_of(spans, sizes)
    lengths = np.add.reduceat(sizes, starts).tolist()
    for page, slot in enumerate(host.slots.tolist()):
        first = span.base_ptr + slot * span.row_stride - host.first_offset
        for start, length in zip(starts.tolist(), lengths, strict=True):
            content = ctypes.string_at(first + int(spans.offset[start]), length)
            place = page * chunk.page_bytes + int(chunk.places[start])
            yield place, np.frombuffer(content, dtype=np.uint8)
