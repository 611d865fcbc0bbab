"""A proxy between a store and its server, which cuts, stalls or changes what the server answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["Proxy", "proxy_to"]

_CHUNK = 1 << 16
_SLOW_BYTES = 100


class Proxy:
    """Passes bytes on in both directions, unless told otherwise."""

    def __init__(self, port: int) -> None:
        """Listen on a free port for connections to a server's port."""
        self._upstream = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self.connections = 0
        """Connections that were made so far."""
        self.answer_bytes: int | None = None
        """After so many more bytes of answers, connections are closed; None for no end."""
        self.flips: bytes | None = None
        """What is changed in answers, by one bit of its last byte."""
        self.sent_pause_seconds = 0.0
        """How long each 64 KiB that is sent takes."""
        self.answer_pause_seconds = 0.0
        """How long each 100 B of answers take."""
        self._may_answer = threading.Event()
        self._may_answer.set()
        threading.Thread(target=self._accept, daemon=True, name="proxy").start()

    @property
    def url(self) -> str:
        """Where the store is to look for the server."""
        return f"redis://127.0.0.1:{self.port}/0"

    def stall(self) -> None:
        """Answer nothing from now on, with connections open."""
        self._may_answer.clear()

    def go_on(self) -> None:
        """Answer again."""
        self._may_answer.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._upstream))
                self.connections += 1
                self._sockets += [near, far]
                for source, target, is_answer in ((near, far, False), (far, near, True)):
                    threading.Thread(
                        target=self._pump, args=(source, target, is_answer), daemon=True
                    ).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:  # noqa: FBT001  # which of the two directions
        with suppress(OSError):
            while chunk := source.recv(_CHUNK):
                if not is_answer:
                    time.sleep(self.sent_pause_seconds)
                answer = self._altered(chunk) if is_answer else b""
                while is_answer and self.answer_pause_seconds and len(answer) > _SLOW_BYTES:
                    target.sendall(answer[:_SLOW_BYTES])
                    answer = answer[_SLOW_BYTES:]
                    time.sleep(self.answer_pause_seconds)
                target.sendall(answer if is_answer else chunk)
                if is_answer and self.answer_bytes == 0:
                    break
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _altered(self, chunk: bytes) -> bytes:
        self._may_answer.wait()
        with self._lock:
            if self.answer_bytes is not None:
                chunk = chunk[: self.answer_bytes]
                self.answer_bytes -= len(chunk)
            if self.flips and self.flips in chunk:
                chunk = chunk.replace(self.flips, self.flips[:-1] + bytes([self.flips[-1] ^ 1]))
        return chunk

    def close(self) -> None:
        """Close everything."""
        self._may_answer.set()
        for end in (self._listener, *self._sockets):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """Give a proxy to a server's port for the length of a block."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
