"""S3 servers of the tests' own: on loopback, on a free port, with one bucket, ended by their pid."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from kvlinker_s3 import S3Store

__all__ = ["BUCKET", "OpenStore", "S3Server", "free_port", "settings_for"]

OpenStore: TypeAlias = Callable[..., S3Store]
"""Opens a store on the server at a port, with options."""
BUCKET = "kv-pages"
_START_SECONDS = 60.0
_POLL_SECONDS = 0.05
_OK = 200


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settings_for(port: int) -> Mapping[str, str | bool]:
    """Return the settings of a store whose server listens on a port."""
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "region": "us-east-1",
        "access_key_id": "kv",
        "secret_access_key": "${env:KV_S3_TEST_SECRET}",
        "virtual_hosted_style_request": False,
    }


class S3Server:
    """moto's server: objects in the memory of one process."""

    def __init__(self, folder: Path, *, port: int | None = None) -> None:
        """Start a server, wait for its first answer, and make the bucket."""
        self.port = port or free_port()
        self._log = folder / f"moto-{self.port}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, with an empty bucket."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ}
            )
        end = time.monotonic() + _START_SECONDS
        while not self._makes_bucket():
            if self._process.poll() is not None or time.monotonic() > end:
                message = f"moto did not start on port {self.port}: {self._log.read_text()[-2000:]}"
                raise RuntimeError(message)
            time.sleep(_POLL_SECONDS)

    def _makes_bucket(self) -> bool:
        try:
            return self.ask("PUT", "") == _OK
        except OSError:
            return False

    def ask(self, method: str, name: str, body: bytes | None = None) -> int:
        """Ask for one thing, without a signature, and return the status."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, f"/{BUCKET}/{name}", body=body)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    def freeze(self) -> None:
        """Let it do nothing, with all its connections; return when each of its threads has stopped."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as the kernel would; what it held is gone. Idempotent."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
