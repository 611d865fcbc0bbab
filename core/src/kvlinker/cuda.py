"""Access to pools on a CUDA device: pinned buffers, own copy streams, nothing left running when a call returns.

torch is imported by the functions that need it; the stream and event layer is small and can be replaced.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvlinker.cuda_streams import CopyDirection, CopyStreams, CudaStreams
from kvlinker.device import HostObjects
from kvlinker.errors import DeviceCopyError, StalePoolError, UnsupportedOperationError
from kvlinker.pinning import HostPins
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import MemoryRegion
from kvlinker.staged_chunks import runs_of
from kvlinker.staging import (
    BUFFERS,
    DEFAULT_STAGING_BYTES,
    PINNED_RUN_BYTES,
    PendingCopy,
    StagedAccess,
    StagedChunk,
    buffer_bytes_for,
)

if TYPE_CHECKING:
    import torch

__all__ = ["CopyDirection", "CopyStreams", "CudaAccess", "CudaStreams", "DeviceStagingBuffer"]

_WORDS = (8, 4, 2, 1)
"""Bytes of the integer types that rows are copied as; the widest that everything is a multiple of."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceStagingBuffer:
    """A pinned host buffer and its twin on the device, where pages are gathered before they cross over."""

    host: torch.Tensor
    """uint8 [size], pinned."""
    device: torch.Tensor
    """uint8 [size]."""

    @property
    def address(self) -> int:
        """Host address of the first byte."""
        return self.host.data_ptr()

    @property
    def size_bytes(self) -> int:
        """Bytes of one of the two."""
        return self.host.numel()


class CudaAccess(StagedAccess[DeviceStagingBuffer]):
    """Access to the pools of a group whose regions are tensors on one CUDA device."""

    def __init__(
        self,
        group: DevicePoolGroup,
        *,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        streams: CopyStreams | None = None,
        pinned_run_bytes: int = PINNED_RUN_BYTES,
    ) -> None:
        """Allocate the buffers, pinned on the host and as much on the device, and make the streams.

        Args:
            group: its regions' owners are tensors, which stay alive with it.
            staging_bytes: all buffers together, on either side.
            streams: the stream and event layer; CUDA's by default.
            pinned_run_bytes: from pinned host memory, loads of shorter runs go through the buffers all the same.

        Raises:
            UnsupportedOperationError: a region is not on a CUDA device, not on the same one, or no tensor.
            StalePoolError: a tensor is no longer where its region was.
            ContractError: a page would not fit a buffer.
            DeviceCopyError: the device cannot be used, or there is no memory for the buffers.
        """
        regions = group.regions
        self._streams = streams or _cuda_streams(regions)
        self._memory = tuple(_memory_of(region, self._streams.device) for region in regions)
        size = buffer_bytes_for(group, staging_bytes)
        try:
            super().__init__(
                loads=self._pair(size),
                offloads=self._pair(size),
                pins=HostPins(self._streams.pin, self._streams.unpin),
                pinned_run_bytes=pinned_run_bytes,
            )
        except RuntimeError as error:
            msg = (
                f"no memory for {BUFFERS} staging buffers of {size} B on {self._streams.device} and pinned "
                f"on the host ({error}); lower staging_bytes"
            )
            raise DeviceCopyError(msg) from error

    def _pair(self, size: int) -> tuple[DeviceStagingBuffer, DeviceStagingBuffer]:
        return self._buffer(size), self._buffer(size)

    def _buffer(self, size: int) -> DeviceStagingBuffer:
        import torch

        twin = torch.empty(size, dtype=torch.uint8, device=self._streams.device)
        return DeviceStagingBuffer(host=self._streams.pinned(size), device=twin)

    def start_gather(self, chunk: StagedChunk, buffer: DeviceStagingBuffer) -> PendingCopy:
        """See StagedAccess."""

        def gather() -> None:
            import torch

            index = self._index(chunk)
            for rows, block in self._views(chunk, buffer):
                torch.index_select(rows, 0, index, out=block)
            used = chunk.used_bytes
            buffer.host[:used].copy_(buffer.device[:used], non_blocking=True)

        return self._submit(CopyDirection.OFFLOAD, chunk, gather)

    def start_scatter(self, chunk: StagedChunk, buffer: DeviceStagingBuffer) -> PendingCopy:
        """See StagedAccess."""

        def scatter() -> None:
            used = chunk.used_bytes
            buffer.device[:used].copy_(buffer.host[:used], non_blocking=True)
            self._scatter(chunk, buffer)

        return self._submit(CopyDirection.LOAD, chunk, scatter)

    def start_pinned_scatter(
        self, chunk: StagedChunk, buffer: DeviceStagingBuffer, host: HostObjects
    ) -> PendingCopy:
        """See StagedAccess."""

        def scatter() -> None:
            for place, slots in _pinned_runs(chunk, host):
                buffer.device[place : place + slots.numel()].copy_(slots, non_blocking=True)
            self._scatter(chunk, buffer)

        return self._submit(CopyDirection.LOAD, chunk, scatter)

    def _scatter(self, chunk: StagedChunk, buffer: DeviceStagingBuffer) -> None:
        index = self._index(chunk)
        for rows, block in self._views(chunk, buffer):
            rows.index_copy_(0, index, block)

    def _submit(
        self, direction: CopyDirection, chunk: StagedChunk, work: Callable[[], None]
    ) -> PendingCopy:
        pool = chunk.plan.pool
        with _named(pool):
            return _NamedCopy(self._streams.submit(direction, work), pool)

    def _index(self, chunk: StagedChunk) -> torch.Tensor:
        import torch

        # From pageable memory the driver takes the numbers before the call returns.
        return torch.from_numpy(chunk.units).to(self._streams.device, non_blocking=True)

    def _views(
        self, chunk: StagedChunk, buffer: DeviceStagingBuffer
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield for each span all its units and the block of the chunk's: [units, words] both."""
        spans, rows, count = chunk.plan.spans, chunk.unit_rows, len(chunk.units)
        for i, place in enumerate(chunk.places.tolist()):
            address, size = int(spans.base[i]), int(spans.row_bytes[i]) * rows
            stride = int(spans.stride[i]) * rows
            memory = self._memory_at(address)
            start = address - memory.base_ptr
            gcd = math.gcd(address, start, size, stride, place)
            word = next(word for word in _WORDS if gcd % word == 0)
            shape = (int(spans.span_rows[i]) // rows, size // word)
            units = memory.words(word).as_strided(shape, (stride // word, 1), start // word)
            block = _words(buffer.device, word)[place // word :]
            yield (
                units,
                block.as_strided((count, shape[1]), ((chunk.page_bytes or size) // word, 1)),
            )

    def _memory_at(self, address: int) -> _DeviceMemory:
        return next(memory for memory in self._memory if memory.holds(address))

    def close(self) -> None:
        """See StagedAccess; the pools' tensors are let go of too."""
        super().close()
        self._memory = ()


@dataclass(frozen=True, slots=True, eq=False)
class _DeviceMemory:
    """One region as a flat tensor."""

    base_ptr: int
    content: torch.Tensor
    """uint8 [bytes]; it shares the storage of the region's owner."""

    def holds(self, address: int) -> bool:
        return self.base_ptr <= address < self.base_ptr + self.content.numel()

    def words(self, word: int) -> torch.Tensor:
        return _words(self.content, word)


def _pinned_runs(chunk: StagedChunk, host: HostObjects) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield where in the buffer each run of each page goes, and its bytes in the slots."""
    import torch

    spans, sizes = chunk.plan.spans, chunk.plan.range_bytes
    starts = runs_of(spans, sizes)
    lengths = np.add.reduceat(sizes, starts).tolist()
    runs = list(
        zip(chunk.places[starts].tolist(), spans.offset[starts].tolist(), lengths, strict=True)
    )
    size = host.span.rows * host.span.row_stride
    # Between segments there may be nothing; of the tensor, only bytes of slots are used.
    memory = (ctypes.c_uint8 * size).from_address(host.span.base_ptr)
    slots = torch.frombuffer(memory, dtype=torch.uint8)
    for page, slot in enumerate(host.slots.tolist()):
        first = slot * host.span.row_stride - host.first_offset
        for place, offset, length in runs:
            start = first + offset
            yield page * chunk.page_bytes + place, slots[start : start + length]


def _words(content: torch.Tensor, word: int) -> torch.Tensor:
    """Return uint8 [bytes] as integers of `word` bytes; a rest that fills no word is cut."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return content[: content.numel() // word * word].view(kinds[word])


def _memory_of(region: MemoryRegion, device: torch.device) -> _DeviceMemory:
    """Return the region's bytes as a tensor, from the storage of its owner."""
    import torch

    owner = region.owner
    if not isinstance(owner, torch.Tensor) or owner.device != device:
        msg = (
            f"the region at {region.base_ptr:#x} on {region.device!r} is no tensor on {str(device)!r}; make its "
            f"spans with BufferSpan.from_tensor, on one device, or pass an access of your own"
        )
        raise UnsupportedOperationError(msg)
    storage = owner.untyped_storage()
    if storage.data_ptr() != region.base_ptr or storage.nbytes() != region.size_bytes:
        msg = (
            f"the region at {region.base_ptr:#x} of {region.size_bytes} B is now {storage.nbytes()} B at "
            f"{storage.data_ptr():#x}; describe the pools again and build a new group"
        )
        raise StalePoolError(msg)
    content = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    return _DeviceMemory(base_ptr=region.base_ptr, content=content)


def _cuda_streams(regions: Sequence[MemoryRegion]) -> CudaStreams:
    """Return streams of the one CUDA device of all regions."""
    devices = sorted({region.device for region in regions})
    if len(devices) != 1 or devices[0].partition(":")[0] != "cuda":
        msg = f"CudaAccess needs all pools on one CUDA device, got {devices}"
        raise UnsupportedOperationError(msg)
    import torch

    try:
        return CudaStreams(torch.device(devices[0]))
    except RuntimeError as error:
        msg = f"device {devices[0]!r} cannot be used: {error}"
        raise DeviceCopyError(msg) from error


class _NamedCopy:
    """A copy whose failure names its pool."""

    def __init__(self, pending: PendingCopy, pool: str) -> None:
        self._pending = pending
        self._pool = pool

    def wait(self) -> None:
        with _named(self._pool):
            self._pending.wait()


@contextmanager
def _named(pool: str) -> Iterator[None]:
    """Turn a device's error into a DeviceCopyError that names the pool."""
    try:
        yield
    except RuntimeError as error:  # what torch raises for a device
        msg = f"pool {pool!r}: the device failed a copy: {error}"
        raise DeviceCopyError(msg) from error
