"""Redis servers of the tests' own: on loopback, on a free port, in a folder of their own, ended by their pid."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

__all__ = ["BINARY", "RedisServer", "free_port", "make_cluster"]

BINARY = shutil.which("redis-server")
_START_SECONDS = 30.0
_POLL_SECONDS = 0.02
_SLOTS = 16384


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A server without persistence."""

    def __init__(self, binary: str, folder: Path, *options: str, port: int | None = None) -> None:
        """Start a server in an empty folder and wait for its first answer."""
        self._binary = binary
        self.folder = folder
        self.port = port or free_port()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def option(self, name: str) -> str:
        """Return the value of one of the options that it was started with."""
        return self._options[self._options.index(name) + 1]

    def client(self, **options: object) -> Redis:
        """Return a client of the tests' own, which tries nothing twice."""
        place = {"host": "127.0.0.1", "port": self.port, **options}
        return Redis(retry=Retry(NoBackoff(), 0), **place)  # type: ignore[arg-type]  # any option

    def start(self) -> None:
        """Start it, empty."""
        command: Sequence[str] = [
            *(
                self._binary,
                "--bind",
                "127.0.0.1",
                "--port",
                str(self.port),
                "--dir",
                str(self.folder),
            ),
            *("--save", "", "--appendonly", "no", "--logfile", str(self.folder / "log")),
            *self._options,
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    return
            except (OSError, RedisError):
                time.sleep(_POLL_SECONDS)
        log = (self.folder / "log").read_text() if (self.folder / "log").exists() else ""
        message = f"redis-server did not start on port {self.port}: {log[-2000:]}"
        raise RuntimeError(message)

    def kill(self) -> None:
        """End it as the kernel would; what it held is gone."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Let it do nothing, with all its connections; return when each of its threads has stopped."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it. Idempotent."""
        self._end(signal.SIGKILL)  # it has nothing to save

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None


def make_cluster(servers: Sequence[RedisServer]) -> None:
    """Make servers one cluster, with about as many slots each, and wait until each of them knows all.

    Raises:
        RuntimeError: they do not agree in time.
    """
    clients = [server.client() for server in servers]
    share = -(-_SLOTS // len(servers))
    for number, client in enumerate(clients):
        client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        last = min((number + 1) * share, _SLOTS) - 1
        client.execute_command("CLUSTER ADDSLOTSRANGE", number * share, last)
    for server in servers[1:]:
        clients[0].execute_command(
            "CLUSTER MEET", "127.0.0.1", server.port, server.option("--cluster-port")
        )
    end = time.monotonic() + _START_SECONDS
    while not all(_knows(client, len(servers)) for client in clients):
        if time.monotonic() > end:
            message = f"{len(servers)} servers did not become a cluster in {_START_SECONDS} s"
            raise RuntimeError(message)
        time.sleep(_POLL_SECONDS)


def _knows(client: Redis, count: int) -> bool:
    state: object = client.execute_command("CLUSTER INFO")
    slots: object = client.execute_command("CLUSTER SLOTS")
    assert isinstance(state, dict)
    assert isinstance(slots, dict | list)
    return state["cluster_state"] == "ok" and len(slots) == count
