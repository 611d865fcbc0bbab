"""A client without a cluster: an honest small one, and what a real one does rarely or elsewhere, on demand."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvlinker.lanes import LaneTask
from kvlinker.testing import Gate
from kvlinker_mooncake import MooncakeStore, MooncakeStoreOptions
from kvlinker_mooncake.client import Client
from kvlinker_mooncake.codes import Code
from kvlinker_mooncake.raw_client import RawReplica

__all__ = ["FakeClient", "StillClock", "answers", "hangs", "name_of", "open_fake", "wait_until"]


class StillClock:
    """Stands in for the module `time`: its time passes only where somebody sleeps, or a test says so."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


_PATIENCE_SECONDS = 120.0
"""For what comes soon, or never."""


@dataclass(frozen=True, slots=True)
class _Status:
    name: str = "COMPLETE"
    number: int = 3

    def __int__(self) -> int:
        return self.number


@dataclass(frozen=True, slots=True)
class _Place:
    size: int
    buffer_address: int
    transport_endpoint: str

    @property
    def buffer_descriptor(self) -> _Place:
        return self


@dataclass(frozen=True, slots=True)
class _Replica:
    value: bytearray
    in_memory: bool
    status: _Status
    segment: str

    def is_memory_replica(self) -> bool:
        return self.in_memory

    def get_memory_descriptor(self) -> _Place:
        return _Place(len(self.value), id(self.value), self.segment)


@dataclass(eq=False)
class FakeClient:
    """Objects in a dictionary; every call passes `before` with its name, and may be answered by it."""

    on_disk: set[str] = field(default_factory=set)
    """Names whose objects have no copy in memory."""
    incomplete: set[str] = field(default_factory=set)
    """Names whose objects have no copy that can be read yet."""
    segment: str = "127.0.0.1:1"
    """Where all objects are."""
    serves_ranges: bool = True
    before: Callable[[str], list[int] | None] = lambda _: None
    """Answers a call in its place, or lets it go on."""
    objects: dict[str, bytearray] = field(default_factory=dict)
    writing: dict[str, bytearray] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    registered: dict[int, int] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)
    """Each call with how many buffers it moved."""
    configs: list[object] = field(default_factory=list)
    is_closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def _come(self, name: str, buffers: int = 0) -> list[int] | None:
        assert not self.is_closed, f"{name} after close is a fault of memory"
        with self.lock:
            self.calls.append((name, buffers))
        return self.before(name)

    def wait(self, task: LaneTask, seconds: float) -> bool:  # noqa: ARG002  # nobody looks at a clock
        """Wait for a call; the time is over for those that hang, and for no others, however busy the machine is."""
        while not task.wait(0.002):
            if isinstance(self.before, _Hangs) and self.before.gives_up():
                return task.has_ended
        return True

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int:
        place = (local_hostname, metadata_server, protocol, rdma_devices, master_server_addr)
        self.configs.append((*place, global_segment_size, local_buffer_size))
        answer = self._come("setup")
        return answer[0] if answer else 0

    def close(self) -> int:
        self._come("close")
        self.is_closed = True
        return 0

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        answer = self._come("register_buffer")
        if answer is None and buffer_ptr not in self.registered:
            self.registered[buffer_ptr] = size
            return 0
        return answer[0] if answer else Code.REFUSED

    def unregister_buffer(self, buffer_ptr: int) -> int:
        self._come("unregister_buffer")
        return 0 if self.registered.pop(buffer_ptr, 0) else Code.REFUSED

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        answer = self._come("batch_is_exist")
        return [int(key in self.objects) for key in keys] if answer is None else answer

    def batch_get_replica_desc(self, keys: list[str]) -> Mapping[str, list[RawReplica]]:
        if self._come("batch_get_replica_desc") is not None:
            return {}
        return {
            key: [
                _Replica(
                    self.objects[key], key not in self.on_disk, self._status_of(key), self.segment
                )
            ]
            for key in keys
            if key in self.objects
        }

    def _status_of(self, key: str) -> _Status:
        return _Status("PROCESSING", 2) if key in self.incomplete else _Status()

    def get_size(self, key: str) -> int:
        answer = self._come("get_size")
        if key in self.incomplete:
            return Code.NOT_READY
        found = self.objects.get(key)
        return answer[0] if answer else Code.NOT_FOUND if found is None else len(found)

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        answer = self._come("batch_get_into_multi_buffers", sum(map(len, all_sizes)))
        if answer is not None:
            return answer
        results = []
        for key, pointers, sizes in zip(keys, all_buffer_ptrs, all_sizes, strict=True):
            found = self.objects.get(key)
            if found is None or len(found) != sum(sizes):
                results.append(int(Code.NOT_FOUND if found is None else Code.NOT_TRANSFERRED))
                continue
            start = 0
            for pointer, size in zip(pointers, sizes, strict=True):
                ctypes.memmove(pointer, bytes(found[start : start + size]), size)
                start += size
            results.append(start)
        return results

    def batch_get_session_start(self, keys: list[str]) -> list[int]:
        answer = self._come("batch_get_session_start")
        if answer is not None:
            return answer
        codes = []
        for key in keys:
            if key not in self.objects:
                codes.append(int(Code.NOT_FOUND))
            elif key in self.on_disk:
                codes.append(int(Code.NO_REPLICA))
            else:
                self.sessions.add(key)
                codes.append(0)
        return codes

    def batch_get_session_end(self, keys: list[str]) -> int:
        self._come("batch_get_session_end")
        self.sessions.difference_update(keys)
        return 0

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_src_offsets: list[list[int]],
    ) -> list[int]:
        answer = self._come("batch_get_into_multi_buffer_ranges", sum(map(len, all_sizes)))
        if answer is not None:
            return answer
        results = []
        columns = zip(keys, all_buffer_ptrs, all_sizes, all_src_offsets, strict=True)
        for key, pointers, sizes, offsets in columns:
            if key not in self.sessions or not self.serves_ranges:
                results.append(int(Code.REFUSED))
                continue
            for pointer, size, offset in zip(pointers, sizes, offsets, strict=True):
                ctypes.memmove(pointer, bytes(self.objects[key][offset : offset + size]), size)
            results.append(sum(sizes))
        return results

    def batch_put_session_start(
        self, keys: list[str], sizes: list[int], config: object
    ) -> list[int]:
        self.configs.append(config)
        answer = self._come("batch_put_session_start")
        if answer is not None:
            return answer
        codes = []
        for key, size in zip(keys, sizes, strict=True):
            if key in self.objects or key in self.writing:
                codes.append(int(Code.EXISTS if key in self.objects else Code.REFUSED))
            else:
                self.writing[key] = bytearray(size)
                codes.append(0)
        return codes

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_dst_offsets: list[list[int]],
    ) -> list[int]:
        answer = self._come("batch_put_from_multi_buffer_ranges", sum(map(len, all_sizes)))
        if answer is not None:
            return answer
        columns = zip(keys, all_buffer_ptrs, all_sizes, all_dst_offsets, strict=True)
        for key, pointers, sizes, offsets in columns:
            for pointer, size, offset in zip(pointers, sizes, offsets, strict=True):
                self.writing[key][offset : offset + size] = ctypes.string_at(pointer, size)
        return [sum(sizes) for sizes in all_sizes]

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        answer = self._come("batch_put_session_end")
        if answer is not None:
            return answer
        for key in keys:
            self.objects[key] = self.writing.pop(key)
        return [0] * len(keys)

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        answer = self._come("batch_put_session_revoke")
        if answer is not None:
            return answer
        return [0 if self.writing.pop(key, None) is not None else -600 for key in keys]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:  # noqa: ARG002, FBT001  # the client's own signature
        answer = self._come("batch_remove")
        if answer is not None:
            return answer
        return [0 if self.objects.pop(key, None) is not None else -704 for key in keys]

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int:  # noqa: ARG002, FBT001  # the client's own signature
        answer = self._come("remove_by_regex")
        return answer[0] if answer else 0

    def moved_by(self, name: str) -> Sequence[int]:
        """Return how many buffers each call of one name moved."""
        return [buffers for call, buffers in self.calls if call == name]


def open_fake(fake: FakeClient, **options: object) -> MooncakeStore:
    """Open a store on a client without a cluster; with it only calls that hang are late."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_hang_up, args=(listener,), daemon=True).start()
        port = listener.getsockname()[1]
        return _open(fake, {"master": f"127.0.0.1:{port}", **options})


def _hang_up(listener: socket.socket) -> None:
    """Do as a master does with what is no question of a client."""
    with suppress(OSError), listener.accept()[0] as door:
        door.recv(64)


def _open(fake: FakeClient, options: Mapping[str, object]) -> MooncakeStore:
    usual = {"reads": "ranged", "connect_seconds": 60.0, "contended_seconds": 0.1}
    settings = MooncakeStoreOptions.of_config({**usual, **options})
    client = Client(settings, make=lambda: fake, config=lambda _: "config", wait=fake.wait)
    return MooncakeStore(settings, client=client)


def answers(**codes: list[int]) -> Callable[[str], list[int] | None]:
    """Return what answers some calls with codes."""
    return codes.get


@dataclass(eq=False)
class _Hangs:
    """Holds some calls at a gate, and knows which of them somebody may be waiting for on another thread."""

    gate: Gate
    names: tuple[str, ...]
    held: int = 0
    given_up: int = 0

    def __call__(self, name: str) -> list[int] | None:
        if name in self.names:
            self.held += threading.current_thread().name.startswith("kvlinker-mooncake")
            self.gate.pass_through()
        return None

    def gives_up(self) -> bool:
        """Whether there is one more that nobody has given up yet; it is given up then."""
        is_one_more = not self.gate.is_open and self.held > self.given_up
        self.given_up += is_one_more
        return is_one_more


def hangs(gate: Gate, *names: str) -> Callable[[str], list[int] | None]:
    """Return what holds some calls at a gate."""
    return _Hangs(gate, names)


def name_of(key: bytes) -> str:
    """Return the name of an object."""
    return f"kvlinker/{key[:12].hex()}/{key[12:].hex()}"


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)
