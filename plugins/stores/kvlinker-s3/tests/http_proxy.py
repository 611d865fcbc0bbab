"""A proxy between a store and its server, which delays, cuts or changes what the server answers."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["Answer", "Asked", "Proxy", "proxy_to"]

_PAUSE_SECONDS = 0.06
"""A little more than a store of these tests does not ask a server that it gave up."""
_SLOW_BYTES = 20
_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "date", "server"})


@dataclass(kw_only=True)
class Asked:
    """One request, as it came; what is changed is what the server gets."""

    method: str
    path: str
    headers: dict[str, str]
    """With names in lower case."""

    @property
    def is_ranged(self) -> bool:
        """Whether a range of an object is asked for."""
        return self.method == "GET" and "range" in self.headers

    @property
    def first_byte(self) -> int:
        """Where the range begins, -1 without one."""
        return int(self.headers["range"].split("=")[1].split("-")[0]) if self.is_ranged else -1


@dataclass(kw_only=True)
class Answer:
    """One answer; what is changed is what the store gets."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    """With names in lower case."""
    body: bytes = b""
    cut: int | None = None
    """After so many bytes of the body the connection ends."""
    is_reset: bool = False
    """Nothing is answered, and the connection is reset."""
    pause_seconds: float = 0.0
    """How long each few bytes of the body take."""


Before = Callable[[Asked], Answer | None]
"""Answers in the place of the server, or not."""
After = Callable[[Asked, Answer], None]


class Proxy:
    """Passes requests on, unless told otherwise."""

    def __init__(self, port: int) -> None:
        """Listen on a free port for requests to a server's port."""
        self._upstream = port
        self.before: Before | None = None
        self.after: After | None = None
        self.asked: list[Asked] = []
        """Every request so far."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(0.02))
        self._thread.start()

    @property
    def port(self) -> int:
        """Where the store is to look for the server."""
        return self._server.server_port

    def count(self, method: str) -> int:
        """Return how many requests of a kind there were."""
        return sum(asked.method == method for asked in self.asked)

    @contextmanager
    def troubled(
        self, *, before: Before | None = None, after: After | None = None
    ) -> Iterator[None]:
        """Let something happen to requests for the length of a block, and wait until impatient stores ask again."""
        self.before, self.after = before, after
        try:
            yield
        finally:
            self.before = self.after = None
            time.sleep(_PAUSE_SECONDS)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def handle_one_request(self) -> None:
                with suppress(OSError):
                    self.raw_requestline = self.rfile.readline(65537)
                    if not self.raw_requestline or not self.parse_request():
                        self.close_connection = True
                        return
                    proxy.pass_on(self)
                    return
                self.close_connection = True

        return Handler

    def pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in handler.headers.items()}
        asked = Asked(method=handler.command, path=handler.path, headers=headers)
        self.asked.append(asked)
        answer = self.before(asked) if self.before else None
        if answer is None:
            answer = self._upstream_answer(asked, body)
            if self.after:
                self.after(asked, answer)
        _send(handler, answer)

    def _upstream_answer(self, asked: Asked, body: bytes) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=30)
        try:
            connection.request(asked.method, asked.path, body=body, headers=asked.headers)
            found = connection.getresponse()
            found_headers = [(name.lower(), value) for name, value in found.getheaders()]
            headers = {name: value for name, value in found_headers if name not in _HOP}
            return Answer(status=found.status, headers=headers, body=found.read())
        finally:
            connection.close()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    if answer.is_reset:
        linger = struct.pack("ii", 1, 0)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        handler.connection.close()
        handler.close_connection = True
        return
    is_head = handler.command == "HEAD"
    handler.send_response(answer.status)
    for name, value in answer.headers.items():
        if is_head or name != "content-length":
            handler.send_header(name, value)
    if not is_head:
        handler.send_header("Content-Length", str(len(answer.body)))
    handler.end_headers()
    if is_head:
        return
    body = answer.body[: answer.cut]
    while answer.pause_seconds and len(body) > _SLOW_BYTES:
        handler.wfile.write(body[:_SLOW_BYTES])
        body = body[_SLOW_BYTES:]
        time.sleep(answer.pause_seconds)
    handler.wfile.write(body)
    if answer.cut is not None:
        handler.close_connection = True


@contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """Give a proxy to a server's port for the length of a block."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
