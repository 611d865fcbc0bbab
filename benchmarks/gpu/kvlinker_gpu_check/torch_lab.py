"""A lab of torch tensors: on a CUDA device, or wherever its tools say."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvlinker.cuda import CopyDirection, CopyStreams, CudaAccess, CudaStreams
from kvlinker.errors import UnsupportedOperationError
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker.staging import PINNED_RUN_BYTES, PendingCopy
from kvlinker_gpu_check.lab import DevicePools, OpenAccess

if TYPE_CHECKING:
    import torch

__all__ = ["CudaTools", "TorchEvent", "TorchLab", "TorchPools", "TorchTools"]

BUSY_SECONDS = 0.4
"""How long the slow kernels run: many times what the copies of a check take."""
_MATRIX = 8192
"""Side of the matrices that slow kernels multiply: all of a large GPU, for about two milliseconds."""
_MOST_KERNELS = 900
"""A driver takes about a thousand launches before it makes the host wait."""


class TorchEvent(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self) -> None:
        """Mark the end of what the current stream was given."""
        ...

    def query(self) -> bool:
        """Return whether that is reached."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class TorchTools(Protocol):
    """What is particular to a kind of device."""

    device: torch.device

    @property
    def name(self) -> str:
        """The device in words."""
        ...

    def copy_streams(self) -> CopyStreams:
        """Return new streams of an access."""
        ...

    def new_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """Return what enters a new stream, so that work is enqueued there."""
        ...

    def event(self) -> TorchEvent:
        """Return an event."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        ...

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether the device copies the tensor's memory without the CPU."""
        ...


class CudaTools:
    """A CUDA device."""

    def __init__(self, index: int = 0) -> None:
        """Use the device of that number.

        Raises:
            UnsupportedOperationError: there is no such device.
        """
        import torch

        if torch.cuda.device_count() <= index:
            msg = f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices, so none of number {index}"
            raise UnsupportedOperationError(msg)
        self.device = torch.device("cuda", index)

    @property
    def name(self) -> str:
        """See TorchTools."""
        import torch

        return f"{torch.cuda.get_device_name(self.device)}, torch {torch.__version__}"

    def copy_streams(self) -> CopyStreams:
        """See TorchTools."""
        return CudaStreams(self.device)

    def new_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """See TorchTools."""
        import torch

        stream = torch.cuda.Stream(self.device)
        return lambda: torch.cuda.stream(stream)

    def event(self) -> TorchEvent:
        """See TorchTools."""
        import torch

        return torch.cuda.Event()

    def synchronize(self) -> None:
        """See TorchTools."""
        import torch

        torch.cuda.synchronize(self.device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """See TorchTools."""
        return tensor.is_pinned()


class _NotedStreams:
    """Copy streams that remember the host memory they handed out."""

    def __init__(self, streams: CopyStreams) -> None:
        self.handed_out: list[torch.Tensor] = []
        self._streams = streams

    @property
    def device(self) -> torch.device:
        return self._streams.device

    def pinned(self, size: int) -> torch.Tensor:
        buffer = self._streams.pinned(size)
        self.handed_out.append(buffer)
        return buffer

    def pin(self, address: int, size: int) -> None:
        self._streams.pin(address, size)

    def unpin(self, address: int) -> None:
        self._streams.unpin(address)

    def submit(self, direction: CopyDirection, work: Callable[[], None]) -> PendingCopy:
        return self._streams.submit(direction, work)


class TorchPools:
    """Buffers on the device; see PoolBytes. What is read and written here has arrived when a call returns."""

    def __init__(self, tools: TorchTools) -> None:
        """Make a memory without buffers."""
        self._tools = tools
        self._storages: dict[str, torch.Tensor] = {}

    def allocate(
        self, rows: int, row_bytes: int, *, row_stride: int | None = None, label: str = ""
    ) -> BufferSpan:
        """See PoolBytes."""
        import torch

        shape, device = (rows, row_stride or row_bytes), self._tools.device
        storage = torch.full(shape, 0xA5, dtype=torch.uint8, device=device)
        self._storages[label] = storage
        return BufferSpan.from_tensor(storage[:, :row_bytes], label=label)

    def rows(self, span: BufferSpan, first_row: int, rows: int) -> torch.Tensor:
        """Return a view of rows: uint8 [rows, row_bytes]."""
        return self._storages[span.label][first_row : first_row + rows, : span.row_bytes]

    def read(self, span: BufferSpan, first_row: int, rows: int = 1) -> bytes:
        """See PoolBytes."""
        return self.rows(span, first_row, rows).cpu().numpy().tobytes()

    def write(self, span: BufferSpan, first_row: int, content: bytes) -> None:
        """See PoolBytes."""
        made = self.to_device(content).view(-1, span.row_bytes)
        self.rows(span, first_row, len(made)).copy_(made)
        self._tools.synchronize()

    def to_device(self, content: bytes) -> torch.Tensor:
        """Return bytes in a tensor on the device: uint8 [bytes]."""
        import torch

        return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._tools.device)

    def snapshot(self) -> dict[str, bytes]:
        """See PoolBytes."""
        return {label: storage.cpu().numpy().tobytes() for label, storage in self._storages.items()}

    def open(
        self,
        group: DevicePoolGroup,
        *,
        staging_bytes: int,
        pinned_run_bytes: int = PINNED_RUN_BYTES,
    ) -> OpenAccess:
        """See DevicePools."""
        streams = _NotedStreams(self._tools.copy_streams())
        access = CudaAccess(
            group,
            staging_bytes=staging_bytes,
            streams=streams,
            pinned_run_bytes=pinned_run_bytes,
        )
        buffers = tuple(
            (buffer.numel(), self._tools.is_pinned(buffer)) for buffer in streams.handed_out
        )
        return OpenAccess(access=access, buffers=buffers)


class _StreamEvent:
    """See EngineEvent."""

    def __init__(self, event: TorchEvent) -> None:
        self._event = event

    def query(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class _TorchStream:
    """See EngineStream; tensors that kernels use are kept until the stream is dropped."""

    def __init__(self, tools: TorchTools, slow: _SlowKernels) -> None:
        self._tools = tools
        self._slow = slow
        self._enter = tools.new_stream()
        self._kept: list[torch.Tensor] = []

    def keep_busy(self) -> None:
        with self._enter():
            self._slow.launch()

    def write(self, pools: DevicePools, span: BufferSpan, first_row: int, content: bytes) -> None:
        memory = _torch_pools(pools)
        made = memory.to_device(content).view(-1, span.row_bytes)
        self._kept.append(made)
        with self._enter():
            memory.rows(span, first_row, len(made)).copy_(made)

    def read(
        self, pools: DevicePools, span: BufferSpan, first_row: int, rows: int
    ) -> Callable[[], bytes]:
        memory = _torch_pools(pools)
        with self._enter():
            seen = memory.rows(span, first_row, rows).clone()
        event = self.record()
        self._kept.append(seen)

        def result() -> bytes:
            event.wait()
            return seen.cpu().numpy().tobytes()

        return result

    def record(self) -> _StreamEvent:
        event = self._tools.event()
        with self._enter():
            event.record()
        return _StreamEvent(event)


def _torch_pools(pools: DevicePools) -> TorchPools:
    if not isinstance(pools, TorchPools):
        msg = f"a stream of this lab takes its own pools, got {type(pools).__name__}"
        raise TypeError(msg)
    return pools


class _SlowKernels:
    """Matrix products that keep a device busy for a while; how many is measured once."""

    def __init__(self, tools: TorchTools, *, seconds: float, side: int) -> None:
        import torch

        self._factors = torch.ones((2, side, side), dtype=torch.float16, device=tools.device)
        self._product = torch.empty((side, side), dtype=torch.float16, device=tools.device)
        self._multiply()  # sets the library up
        tools.synchronize()
        start = time.perf_counter()
        self._multiply()
        tools.synchronize()
        each = max(time.perf_counter() - start, 1e-6)
        self._count = min(math.ceil(seconds / each), _MOST_KERNELS)

    def _multiply(self) -> None:
        import torch

        torch.matmul(self._factors[0], self._factors[1], out=self._product)

    def launch(self) -> None:
        for _ in range(self._count):
            self._multiply()


class TorchLab:
    """See Lab."""

    def __init__(
        self, tools: TorchTools, *, busy_seconds: float = BUSY_SECONDS, matrix: int = _MATRIX
    ) -> None:
        """Set the device up.

        Args:
            tools: the kind of device.
            busy_seconds: how long slow kernels run.
            matrix: side of the matrices that they multiply.
        """
        self._tools = tools
        self._slow = _SlowKernels(tools, seconds=busy_seconds, side=matrix)

    @property
    def name(self) -> str:
        """See Lab."""
        return self._tools.name

    def pools(self) -> TorchPools:
        """See Lab."""
        return TorchPools(self._tools)

    def stream(self) -> _TorchStream:
        """See Lab."""
        return _TorchStream(self._tools, self._slow)

    def synchronize(self) -> None:
        """See Lab."""
        self._tools.synchronize()

    def clock(self) -> float:
        """See Lab."""
        return time.perf_counter()

    def is_pinned(self, array: NDArray[np.uint8]) -> bool:
        """See Lab."""
        import torch

        return self._tools.is_pinned(torch.from_numpy(array))

    def pinned_copy(self, direction: CopyDirection, size: int) -> Callable[[], None]:
        """See Lab."""
        import torch

        host = self._tools.copy_streams().pinned(size)
        device = torch.zeros(size, dtype=torch.uint8, device=self._tools.device)
        target, source = (device, host) if direction is CopyDirection.LOAD else (host, device)

        def copy() -> None:
            target.copy_(source, non_blocking=True)
            self._tools.synchronize()

        return copy
