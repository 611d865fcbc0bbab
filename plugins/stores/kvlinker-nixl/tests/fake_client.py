"""A client that moves bytes between memory and files by itself, and to which things happen as a test says."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(eq=False)
class Handle:
    """Ranges to move."""

    operation: str
    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    is_moved: bool = False
    thread: str = ""
    """Name of the thread that began it."""

    @property
    def size(self) -> int:
        """Bytes."""
        return int(self.local[:, 1].sum())


@dataclass
class FakeClient:
    """NIXL, as far as files go."""

    is_stuck: Callable[[], bool] = lambda: False
    """Whether transfers make no progress now."""
    fails: Callable[[], bool] = lambda: False
    """Whether transfers fail now."""
    most_regions: int = 1 << 20
    """Of host memory, in each agent."""
    begun: list[Handle] = field(default_factory=list)
    released: list[object] = field(default_factory=list)
    agents: list[FakeAgent] = field(default_factory=list)

    def make_agent(self, name: str) -> FakeAgent:
        """See Client."""
        self.agents.append(FakeAgent(self, name))
        return self.agents[-1]


class FakeAgent:
    """An agent."""

    def __init__(self, client: FakeClient, name: str) -> None:
        self.name = name
        self.regions: list[object] = []
        self._client = client

    def create_backend(self, backend: str, initParams: dict[str, str]) -> None:  # noqa: N803  # the name is NIXL's
        del backend, initParams

    def register_memory(
        self, reg_list: Sequence[tuple[int, int, int, str]], mem_type: str
    ) -> object:
        if mem_type == "DRAM" and len(self.regions) >= self._client.most_regions:
            message = "NIXL_ERR_BACKEND"
            raise RuntimeError(message)
        listed = [mem_type, *reg_list]
        self.regions.append(listed)
        return listed

    def deregister_memory(self, dereg_list: object) -> None:
        self.regions.remove(dereg_list)

    def get_xfer_descs(self, descs: NDArray[np.uint64], mem_type: str) -> object:
        del mem_type
        return descs

    def initialize_xfer(
        self, operation: str, local_descs: object, remote_descs: object, remote_agent: str
    ) -> object:
        assert remote_agent == self.name
        assert isinstance(local_descs, np.ndarray)
        assert isinstance(remote_descs, np.ndarray)
        return Handle(operation, local_descs, remote_descs)

    def transfer(self, handle: object) -> str:
        assert isinstance(handle, Handle)
        handle.thread = threading.current_thread().name
        self._client.begun.append(handle)
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: object) -> str:
        assert isinstance(handle, Handle)
        if self._client.is_stuck():
            return "PROC"
        if self._client.fails():
            message = "NIXL_ERR_BACKEND"
            raise RuntimeError(message)
        if not handle.is_moved:
            handle.is_moved = True
            _move(handle)
        return "DONE"

    def release_xfer_handle(self, handle: object) -> None:
        self._client.released.append(handle)

    def get_agent_metadata(self) -> bytes:
        return b""

    def add_remote_agent(self, metadata: bytes) -> bytes | str:
        return metadata.decode()

    def remove_remote_agent(self, agent: str) -> None:
        del agent

    def get_new_notifs(self) -> object:
        return {}


def _move(handle: Handle) -> None:
    for (address, size, _), (offset, _, fd) in zip(
        handle.local.tolist(), handle.remote.tolist(), strict=True
    ):
        place = (ctypes.c_ubyte * size).from_address(address)
        if handle.operation == "WRITE":
            os.pwrite(fd, bytes(place), offset)
        else:
            ctypes.memmove(address, os.pread(fd, size, offset), size)
