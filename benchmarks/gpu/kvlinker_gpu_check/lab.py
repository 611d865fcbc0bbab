"""The lab: what a check needs of a device, so that it runs on a GPU and on a stand-in that a test controls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvlinker.cuda import CopyDirection
from kvlinker.device import DeviceAccess, DeviceEvent
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker.staging import PINNED_RUN_BYTES

__all__ = ["DevicePools", "EngineEvent", "EngineStream", "Lab", "OpenAccess", "PoolBytes"]


class PoolBytes(Protocol):
    """Buffers that spans are made of, whose bytes a check reads and writes outside of any stream."""

    def allocate(
        self, rows: int, row_bytes: int, *, row_stride: int | None = None, label: str = ""
    ) -> BufferSpan:
        """Return the span of a new buffer."""
        ...

    def read(self, span: BufferSpan, first_row: int, rows: int = 1) -> bytes:
        """Return the data of some rows, without their padding."""
        ...

    def write(self, span: BufferSpan, first_row: int, content: bytes) -> None:
        """Write the data of some rows; their padding stays."""
        ...

    def snapshot(self) -> dict[str, bytes]:
        """Return label to all bytes, padding included."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAccess:
    """An access, and the host memory that it took for staging."""

    access: DeviceAccess
    buffers: tuple[tuple[int, bool], ...]
    """Bytes of each staging buffer on the host, and whether it is pinned."""


class DevicePools(PoolBytes, Protocol):
    """Buffers on the device."""

    def open(
        self,
        group: DevicePoolGroup,
        *,
        staging_bytes: int,
        pinned_run_bytes: int = PINNED_RUN_BYTES,
    ) -> OpenAccess:
        """Return a new access to a group of these buffers; see CudaAccess for the sizes."""
        ...


class EngineEvent(DeviceEvent, Protocol):
    """A point in an engine's stream."""

    def wait(self) -> None:
        """Return when the point is reached."""
        ...


class EngineStream(Protocol):
    """A stream as an engine's: what is enqueued runs in order, some time."""

    def keep_busy(self) -> None:
        """Enqueue kernels that take much longer than any copy of a check."""
        ...

    def write(self, pools: DevicePools, span: BufferSpan, first_row: int, content: bytes) -> None:
        """Enqueue a kernel that writes rows, as a model's forward does."""
        ...

    def read(
        self, pools: DevicePools, span: BufferSpan, first_row: int, rows: int
    ) -> Callable[[], bytes]:
        """Enqueue a kernel that reads rows; the function waits and returns what it saw."""
        ...

    def record(self) -> EngineEvent:
        """Return the point behind everything that was enqueued."""
        ...


class Lab(Protocol):
    """A device with all that a check needs."""

    @property
    def name(self) -> str:
        """The device, as a report names it."""
        ...

    def pools(self) -> DevicePools:
        """Return a memory without buffers."""
        ...

    def stream(self) -> EngineStream:
        """Return a new stream, on which nothing runs."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        ...

    def clock(self) -> float:
        """Return seconds from some moment on."""
        ...

    def is_pinned(self, array: NDArray[np.uint8]) -> bool:
        """Return whether the device copies an array's memory without the CPU."""
        ...

    def pinned_copy(self, direction: CopyDirection, size: int) -> Callable[[], None]:
        """Return a plain copy of so many bytes between pinned host memory and the device, done when it returns."""
        ...
