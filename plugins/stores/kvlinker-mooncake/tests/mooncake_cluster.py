"""Mooncake clusters of the tests' own: a master and segments on loopback, in processes that are ended by their pid."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Protocol, TypeAlias, cast

from kvlinker.errors import KVLinkerError
from kvlinker_mooncake import MooncakeStore, MooncakeStoreOptions
from kvlinker_mooncake.client import Client
from kvlinker_mooncake.raw_client import NEEDED_CALLS, RawClient, make_raw_client

__all__ = ["LEASE_SECONDS", "SEGMENT_BYTES", "MooncakeCluster", "OpenStore", "missing_reason"]

OpenStore: TypeAlias = Callable[..., MooncakeStore]
"""Opens a store on a cluster, with options."""
LEASE_SECONDS = 0.2
SEGMENT_BYTES = 64 << 20
_CLIENT_TTL_SECONDS = 2
_DISCARD_SECONDS = 1
"""Of what a killed writer began; shorter than a write may take, so that a writer that is late loses its room."""
_START_SECONDS = 60.0
_POLL_SECONDS = 0.02
_QUICK_DISK = {
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "4",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 << 20),
}
_SEGMENT = """
import json, sys
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
code = client.setup(*json.loads(sys.argv[1]))
print("ready" if code == 0 else f"refused with {code}", flush=True)
sys.stdin.read()
client.close()
"""


def missing_reason() -> str:
    """Return why there can be no cluster here, or an empty text."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake is not installed: pip install mooncake-transfer-engine-non-cuda"
    try:
        make_raw_client()
    except KVLinkerError as error:
        return str(error)
    return ""


def _binary() -> str:
    found = importlib.util.find_spec("mooncake")
    assert found is not None
    assert found.submodule_search_locations is not None
    binary = Path(found.submodule_search_locations[0]) / "mooncake_master"
    binary.chmod(0o755)  # wheels carry no permissions, and the package's own script sets them too
    return str(binary)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PlainClient(Protocol):
    """What tests ask of Mooncake's client beyond what the store does."""

    def get(self, key: str) -> bytes:
        """Return a whole value."""
        ...

    def put(self, key: str, value: bytes) -> int:
        """Store one."""
        ...

    def remove(self, key: str, *, force: bool) -> int:
        """Remove one."""
        ...

    def close(self) -> int:
        """Leave."""
        ...


class MooncakeCluster:
    """A master and one segment."""

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        on_disk: bool = False,
        discard_seconds: int = _DISCARD_SECONDS,
    ) -> None:
        """Start both, and wait until they answer.

        Args:
            folder: for what they write.
            segment_bytes: of the segment.
            on_disk: whether objects are written to disk too, and stay there when memory is full.
            discard_seconds: after which the master gives away the room of a write that was not ended.
        """
        self._discard_seconds = discard_seconds
        self._disk = folder / "disk" if on_disk else None
        self.port, self.metrics_port = _free_port(), _free_port()
        self._log = folder / f"mooncake-{self.port}.log"
        self._segment_bytes = segment_bytes
        self._master: subprocess.Popen[bytes] | None = None
        self._segments: list[subprocess.Popen[bytes]] = []
        self._kept: RawClient | None = None
        self._plain: PlainClient | None = None
        self.start_master()
        self.start_segment()

    @property
    def options(self) -> Mapping[str, object]:
        """Options of a store on it: no answer of a busy machine is late, and a lost master is asked again soon."""
        return {
            "master": f"127.0.0.1:{self.port}",
            "metrics": f"127.0.0.1:{self.metrics_port}",
            "buffer_bytes": 0,
            "lease_seconds": LEASE_SECONDS,
            "contended_seconds": 2 * self._discard_seconds,
            "answer_seconds": 60.0,
            "connect_seconds": 60.0,
            "pause_seconds": 0.2,
        }

    def open_quickly(self, options: MooncakeStoreOptions) -> MooncakeStore:
        """Open a store on a client that has joined already: its farewell takes a second each time, with all threads."""
        if self._kept is None:
            raw = make_raw_client()
            assert raw.setup(*self._place(0), f"127.0.0.1:{self.port}") == 0
            calls = {name: getattr(raw, name) for name in NEEDED_CALLS}
            kept = SimpleNamespace(**{**calls, "setup": lambda *_: 0, "close": lambda: 0})
            self._kept = cast("RawClient", kept)
            self._plain = cast("PlainClient", raw)
        kept_client = self._kept
        return MooncakeStore(options, client=Client(options, make=lambda: kept_client))

    def alter(self, name: str, payload: bytes) -> None:
        """Change the first byte of an object's payload, as a bad memory would."""
        client = self.plain_client()
        value = bytearray(client.get(name))
        value[value.index(payload)] ^= 1
        assert client.remove(name, force=True) == 0
        assert client.put(name, bytes(value)) == 0

    def plain_client(self) -> PlainClient:
        """Return the client that stores of `open_quickly` use, as Mooncake's own users do."""
        assert self._plain is not None
        return self._plain

    @staticmethod
    def _place(segment_bytes: int) -> tuple[str, str, int, int, str, str]:
        return ("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 4 << 20, "tcp", "")

    def start_master(self) -> None:
        """Start the master, which knows nothing."""
        settings = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "metrics_host": "127.0.0.1",
            "metrics_port": self.metrics_port,
            "default_kv_lease_ttl": round(LEASE_SECONDS * 1000),
            "client_ttl": _CLIENT_TTL_SECONDS,
            "put_start_discard_timeout_sec": self._discard_seconds,
            "rpc_thread_num": 2,
            "enable_offload": str(self._disk is not None).lower(),
        }
        command = [_binary(), "--logtostderr", *(f"--{k}={v}" for k, v in settings.items())]
        with self._log.open("ab") as log:
            self._master = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        end = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._master.poll() is not None or time.monotonic() > end:
                message = f"the master did not start: {self._log.read_text()[-2000:]}"
                raise RuntimeError(message)
            time.sleep(_POLL_SECONDS)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 0.2):
                return True
        except OSError:
            return False

    def start_segment(self) -> None:
        """Let one more process give memory."""
        place = [*self._place(self._segment_bytes), f"127.0.0.1:{self.port}"]
        if self._disk is not None:
            self._disk.mkdir(exist_ok=True)
            place += [None, True, str(self._disk)]
        arguments = json.dumps(place)
        with self._log.open("ab") as log:
            segment = subprocess.Popen(
                [sys.executable, "-c", _SEGMENT, arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **_QUICK_DISK},
            )
        assert segment.stdout is not None
        said = _lines_before_ready(segment.stdout)
        if segment.poll() is not None:
            message = f"the segment did not start: {said}: {self._log.read_text()[-2000:]}"
            raise RuntimeError(message)
        self._segments.append(segment)

    def kill_master(self) -> None:
        """End the master as the kernel would. Idempotent."""
        _kill(self._master)
        self._master = None

    def kill_segment(self) -> None:
        """End the youngest segment as the kernel would."""
        _kill(self._segments.pop())

    def kill_segments(self) -> None:
        """End the segments as the kernel would. Idempotent."""
        while self._segments:
            _kill(self._segments.pop())

    def stop_master(self) -> None:
        """Let the master do nothing, with all its connections; return when each of its threads has stopped."""
        assert self._master is not None
        self._master.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._master.pid, os.WSTOPPED)

    def continue_master(self) -> None:
        """Let it go on."""
        assert self._master is not None
        self._master.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End everything. Idempotent."""
        if self._plain is not None:
            self._plain.close()
            self._plain = self._kept = None
        self.kill_segments()
        self.kill_master()


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is None:
        return
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _lines_before_ready(stream: IO[bytes]) -> list[bytes]:
    lines = []
    while (line := stream.readline()) not in (b"ready\n", b""):
        lines.append(line)
    return lines
