"""A server that is never silent for long, and never done, has its time too."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Iterator

import pytest
from conftest import OpenStore
from proxy import proxy_to
from redis_server import RedisServer

from kvlinker.errors import StoreError, StoreTimeoutError
from kvlinker.store import ReadStatus
from kvlinker.testing.shelves import Shelf, object_keys

OK = ReadStatus.OK


def test_t6_a_server_that_sends_a_little_now_and_then_costs_the_deadline(
    server: RedisServer, open_store: OpenStore
) -> None:
    keys = object_keys(2)
    with proxy_to(server.port) as proxy:
        store = open_store(proxy, answer_seconds=0.3, retry_seconds=0.1)
        shelf = Shelf(store, page_bytes=40 << 10)
        shelf.stock(keys)

        proxy.answer_pause_seconds = 0.1
        began = time.monotonic()
        with pytest.raises(StoreTimeoutError):
            shelf.read(keys)
        passed = time.monotonic() - began
        proxy.answer_pause_seconds = 0
        time.sleep(0.06)

        assert passed < 5
        assert shelf.read(keys) == (OK, OK)


INFO = b"used_memory:1000\r\nmaxmemory:0\r\ncluster_enabled:0\r\n"
ANSWERS = {
    b"INFO": b"$%d\r\n%b\r\n" % (len(INFO), INFO),
    b"DBSIZE": b":3\r\n",
    b"SCAN": b"*2\r\n$1\r\n7\r\n*0\r\n",
}


class Circling(socketserver.StreamRequestHandler):
    """Answers each look at its keys with the same place to go on from."""

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = [self._word() for _ in range(int(line[1:]))]
            self.wfile.write(ANSWERS.get(words[0], b"+OK\r\n"))

    def _word(self) -> bytes:
        return self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2]


class CirclingServer(socketserver.ThreadingTCPServer):
    daemon_threads = True

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}/0"


@pytest.fixture
def circling() -> Iterator[CirclingServer]:
    with CirclingServer(("127.0.0.1", 0), Circling) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(0.02))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_t6_a_server_that_lists_its_keys_without_end_is_not_asked_for_ever(
    circling: CirclingServer, open_store: OpenStore
) -> None:
    store = open_store(circling)

    with pytest.raises(StoreError, match=r"lists its keys in a circle, SCAN 7 came again"):
        store.stats()
