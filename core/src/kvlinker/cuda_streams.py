"""What is particular to CUDA: streams to copy on, and host memory that a device copies without the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from kvlinker.staging import PendingCopy

if TYPE_CHECKING:
    import torch

__all__ = ["CopyDirection", "CopyStreams", "CudaStreams"]

_PORTABLE = 1
"""What is pinned is so for every device. Not read-only, which few machines offer: loads read it, whatever it may be."""


class CopyDirection(Enum):
    """Each direction has a stream of its own, so that loads never wait for offloads."""

    LOAD = "load"
    OFFLOAD = "offload"


class CopyStreams(Protocol):
    """What is particular to a device: its streams, its events and its pinned memory."""

    @property
    def device(self) -> torch.device:
        """The device that all regions lie on."""
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """Return uint8 [size] of host memory that the device copies without the CPU."""
        ...

    def pin(self, address: int, size: int) -> None:
        """Pin host memory that is there; raise RuntimeError where the device or the system refuses."""
        ...

    def unpin(self, address: int) -> None:
        """End that; raise RuntimeError where the device fails."""
        ...

    def submit(self, direction: CopyDirection, work: Callable[[], None]) -> PendingCopy:
        """Enqueue work on the direction's stream and return what to wait for."""
        ...


class _RecordedEvent:
    """An event behind the work of one copy."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class CudaStreams:
    """Two streams of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Make the streams."""
        import torch

        self.device = device
        self._streams = {direction: torch.cuda.Stream(device) for direction in CopyDirection}

    def pinned(self, size: int) -> torch.Tensor:
        """See CopyStreams."""
        import torch

        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def pin(self, address: int, size: int) -> None:
        """See CopyStreams."""
        import torch

        self._ask(lambda: int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)))

    def unpin(self, address: int) -> None:
        """See CopyStreams."""
        import torch

        self._ask(lambda: int(torch.cuda.cudart().cudaHostUnregister(address)))

    def _ask(self, question: Callable[[], int]) -> None:
        """Ask the runtime for something, and raise RuntimeError where its answer is an error.

        On a thread of its own: the runtime keeps an error for its thread, where the next kernel would fail of it.
        """
        import torch

        answers: list[int | BaseException] = []

        def ask() -> None:
            try:
                with torch.cuda.device(self.device):
                    answers.append(question())
            except BaseException as error:  # noqa: BLE001  # raised by who asked
                answers.append(error)

        thread = threading.Thread(target=ask, name="kvlinker-pin")
        thread.start()
        thread.join()
        (answer,) = answers
        if isinstance(answer, BaseException):
            raise answer
        if answer:
            msg = f"error {answer} of the CUDA runtime"
            raise RuntimeError(msg)

    def submit(self, direction: CopyDirection, work: Callable[[], None]) -> PendingCopy:
        """See CopyStreams."""
        import torch

        stream = self._streams[direction]
        event = torch.cuda.Event(blocking=True)  # do not spin: the engine needs the core
        with torch.cuda.stream(stream):
            try:
                work()
            except BaseException:
                # A part of it may be enqueued, and nobody would wait for that.
                stream.synchronize()
                raise
            event.record(stream)
        return _RecordedEvent(event)
