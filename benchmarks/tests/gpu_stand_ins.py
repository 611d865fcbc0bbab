"""Stand-ins for a GPU: pools behind opaque addresses with a stream that runs when it is asked, and torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from kvlinker.cuda import CopyDirection
from kvlinker.device import DeviceAccess
from kvlinker.pinning import HostPins
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker.staging import PINNED_RUN_BYTES
from kvlinker.testing import CopyTiming, OpaqueAccess, OpaqueMemory
from kvlinker_gpu_check.lab import DevicePools, OpenAccess
from kvlinker_gpu_check.torch_lab import TorchLab

QUERIES_UNTIL_DONE = 3
"""How often somebody must ask for an event before the stream gets there: a slow kernel, without a clock."""


class LazyEvent:
    """A point in a stream that is reached when it was asked for often enough, or waited for."""

    def __init__(self, stream: LazyStream, *, lies: bool) -> None:
        self._stream = stream
        self._position = len(stream.enqueued)
        self._queries = 0
        self._lies = lies

    def query(self) -> bool:
        self._queries += 1
        if self._queries > QUERIES_UNTIL_DONE and not self._lies:
            self._stream.run_until(self._position)
        return self._lies or self._stream.done >= self._position

    def wait(self) -> None:
        self._stream.run_until(self._position)


class LazyStream:
    """A stream that runs nothing of its own accord."""

    def __init__(self, *, lying_events: bool = False) -> None:
        self.enqueued: list[Callable[[], None]] = []
        self.done = 0
        self._lying_events = lying_events

    def run_until(self, position: int) -> None:
        while self.done < position:
            self.enqueued[self.done]()
            self.done += 1

    def drain(self) -> None:
        self.run_until(len(self.enqueued))

    def keep_busy(self) -> None:
        self.enqueued.append(lambda: None)

    def write(self, pools: DevicePools, span: BufferSpan, first_row: int, content: bytes) -> None:
        self.enqueued.append(lambda: pools.write(span, first_row, content))

    def read(
        self, pools: DevicePools, span: BufferSpan, first_row: int, rows: int
    ) -> Callable[[], bytes]:
        seen: list[bytes] = []
        self.enqueued.append(lambda: seen.append(pools.read(span, first_row, rows)))
        event = self.record()

        def result() -> bytes:
            event.wait()
            return seen[0]

        return result

    def record(self) -> LazyEvent:
        return LazyEvent(self, lies=self._lying_events)


Wrap = Callable[[DeviceAccess, OpaqueMemory], DeviceAccess]


class PinnedPlaces:
    """What a driver has pinned; a test may have it refuse, or forget to let go."""

    def __init__(self, *, refuses: bool = False, keeps: bool = False) -> None:
        self._sizes: dict[int, int] = {}
        self._refuses = refuses
        self._keeps = keeps

    def pin(self, address: int, size: int) -> None:
        if self._refuses:
            msg = "error 2 of the CUDA runtime"
            raise RuntimeError(msg)
        self._sizes[address] = size

    def unpin(self, address: int) -> None:
        if not self._keeps:
            del self._sizes[address]

    def holds(self, address: int) -> bool:
        return any(start <= address < start + size for start, size in self._sizes.items())


class OpaquePools(OpaqueMemory):
    """Pools whose addresses nobody can dereference, opened with an access that a test may spoil."""

    def __init__(self, lab: OpaqueLab) -> None:
        super().__init__()
        self._lab = lab

    def open(
        self,
        group: DevicePoolGroup,
        *,
        staging_bytes: int,
        pinned_run_bytes: int = PINNED_RUN_BYTES,
    ) -> OpenAccess:
        del group
        access = OpaqueAccess(
            self,
            staging_bytes=staging_bytes,
            timing=CopyTiming.EITHER,
            pins=HostPins(self._lab.pinned.pin, self._lab.pinned.unpin),
            pinned_run_bytes=pinned_run_bytes,
        )
        size = access.staging_bytes // 4
        buffers = [(size, True)] * 4
        return OpenAccess(
            access=self._lab.wrap(access, self), buffers=tuple(map(self._lab.staging, buffers))
        )


class OpaqueLab:
    """A lab without a device; each part can be made to do wrong."""

    name = "nothing"

    def __init__(
        self,
        *,
        wrap: Wrap = lambda access, _: access,
        staging: Callable[[tuple[int, bool]], tuple[int, bool]] = lambda buffer: buffer,
        lying_events: bool = False,
        pinned: PinnedPlaces | None = None,
    ) -> None:
        """Make a lab.

        Args:
            wrap: what becomes of every access.
            staging: what is reported of a staging buffer.
            lying_events: events say that they are reached when they are not.
            pinned: the driver.
        """
        self.pinned = pinned or PinnedPlaces()
        self.wrap = wrap
        self.staging = staging
        self.streams: list[LazyStream] = []
        self._lying_events = lying_events
        self._now = 0.0

    def pools(self) -> OpaquePools:
        return OpaquePools(self)

    def stream(self) -> LazyStream:
        self.streams.append(LazyStream(lying_events=self._lying_events))
        return self.streams[-1]

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.drain()

    def clock(self) -> float:
        """Return a time that goes on by a second whenever somebody looks."""
        self._now += 1
        return self._now

    def is_pinned(self, array: NDArray[np.uint8]) -> bool:
        return self.pinned.holds(array.ctypes.data)

    def pinned_copy(self, direction: CopyDirection, size: int) -> Callable[[], None]:
        del direction, size
        return lambda: None


class CpuCopy:
    """A copy that is done when it is waited for."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


class CpuStreams:
    """Streams of the CPU, as an access wants them."""

    device = torch.device("cpu")

    def __init__(self, places: PinnedPlaces) -> None:
        self._places = places
        self.pin, self.unpin = places.pin, places.unpin

    def pinned(self, size: int) -> torch.Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        self._places.pin(buffer.data_ptr(), size)
        return buffer

    def submit(self, direction: CopyDirection, work: Callable[[], None]) -> CpuCopy:
        del direction
        return CpuCopy(work)


class CpuEvent:
    """What was given to the CPU is done."""

    def __init__(self, *, asked: int) -> None:
        self._asked = asked

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self._asked += 1
        return self._asked > 1

    def synchronize(self) -> None:
        pass


class CpuTools:
    """torch on the CPU in the place of CUDA."""

    name = "the CPU"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._places = PinnedPlaces()

    def copy_streams(self) -> CpuStreams:
        return CpuStreams(self._places)

    def new_stream(self) -> Callable[[], AbstractContextManager[object]]:
        return nullcontext

    def event(self) -> CpuEvent:
        return CpuEvent(asked=0)

    def synchronize(self) -> None:
        pass

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._places.holds(tensor.data_ptr())


def cpu_lab() -> TorchLab:
    """Return a lab of torch tensors in host memory, whose slow kernels are quick."""
    return TorchLab(CpuTools(), busy_seconds=1e-6, matrix=4)
