"""A server of S3's kind on loopback, with one bucket, ended by its pid."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time

from obstore.store import S3Store

BUCKET = "kv-pages"
_START_SECONDS = 60.0
_POLL_SECONDS = 0.05
_OK = 200


class BucketServer:
    """moto's server: objects in the memory of one process."""

    def __init__(self) -> None:
        """Start it, wait for its first answer, and make the bucket."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self.start()

    @property
    def endpoint(self) -> str:
        """What a store's option says."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, with an empty bucket."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + _START_SECONDS
        while not self._makes_bucket():
            assert self._process.poll() is None, "moto ended at once"
            assert time.monotonic() < end, "moto did not start"
            time.sleep(_POLL_SECONDS)

    def _makes_bucket(self) -> bool:
        try:
            return self.ask("PUT", "")[0] == _OK
        except OSError:
            return False

    def ask(self, method: str, name: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Ask for one thing, without a signature; return status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, f"/{BUCKET}/{name}", body=body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def client(self) -> S3Store:
        """Return a client of the bucket."""
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id="kv",
            secret_access_key="open sesame",  # noqa: S106  # moto takes any
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    def freeze(self) -> None:
        """Let it do nothing, with all its connections; return when each of its threads has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as the kernel would; what it held is gone. Idempotent."""
        self._process.kill()
        self._process.wait()
