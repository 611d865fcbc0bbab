"""A peer server in a process of its own, as an operator starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from kvlinker_nixl.messages import receive, send

_ENVIRONMENT = {"UCX_TLS": "self,sm,tcp", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}


class PeerProcess:
    """A server that can be killed, stopped, and started again at the same port."""

    def __init__(self, capacity: str) -> None:
        """Start it on any port."""
        self._capacity = capacity
        self.port = 0
        self.start()

    @property
    def server(self) -> str:
        """What a store's option says."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def start(self) -> None:
        """Start it, where it was before if it was somewhere."""
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvlinker_nixl", "serve"),
                *("--capacity", self._capacity, "--port", str(self.port)),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._end()
            message = "the server ended at once"
            raise AssertionError(message)
        self.port = int(line.rpartition(":")[2])

    def empty(self) -> None:
        """Let it forget every object."""
        deadline = time.monotonic() + 60
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            send(connection, {"call": "hello"}, deadline=deadline)
            epoch = receive(connection, deadline=deadline)["epoch"]
            message = {"call": "clear", "epoch": epoch, "namespace": ""}
            send(connection, message, deadline=deadline)
            assert "count" in receive(connection, deadline=deadline)

    def kill(self) -> None:
        """End it as the kernel would."""
        self._process.kill()
        self._end()

    def stop(self) -> None:
        """Let it do nothing any more, and stay; return when each of its threads has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def go_on(self) -> None:
        """Let it do something again."""
        self._process.send_signal(signal.SIGCONT)

    def wait(self) -> int:
        """Wait for its end, and return its exit status."""
        return self._process.wait(timeout=60)

    def end(self) -> None:
        """End it as an operator would; a dead one is no error."""
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        self._end()

    def _end(self) -> None:
        self.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
