"""A server that is never silent for long, and never done, has its time too."""

from __future__ import annotations

import itertools
import socketserver
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from conftest import OpenStore
from proxy import proxy_to
from redis import Connection
from redis_server import RedisServer

from kvlinker.errors import StoreError, StoreTimeoutError
from kvlinker.store import ReadStatus
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker.testing.waiting import wait_for
from kvlinker_redis import store as redis_store

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
}


class Scripted(socketserver.ThreadingTCPServer):
    """Answers each command as it is told to by the command's name."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.answers = dict(ANSWERS)
        self.scans: Iterator[bytes] = itertools.repeat(b"*2\r\n$1\r\n7\r\n*0\r\n")
        self.connected = set[object]()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}/0"


class _Answering(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Scripted)
        self.server.connected.add(self)
        while line := self.rfile.readline():
            words = [self._word() for _ in range(int(line[1:]))]
            answer = self.server.answers.get(words[0], b"+OK\r\n")
            self.wfile.write(next(self.server.scans) if words[0] == b"SCAN" else answer)
        self.server.connected.remove(self)

    def _word(self) -> bytes:
        return self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2]


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with Scripted() as server:
        thread = threading.Thread(target=lambda: server.serve_forever(0.02))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_t6_a_server_that_lists_its_keys_without_end_is_not_asked_for_ever(
    scripted: Scripted, open_store: OpenStore
) -> None:
    store = open_store(scripted)

    with pytest.raises(StoreError, match=r"lists its keys in a circle, SCAN 7 came again"):
        store.stats()


def test_t6_a_server_that_invents_cursors_is_not_asked_for_ever(
    scripted: Scripted, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(scripted)
    scripted.scans = (b"*2\r\n$4\r\n%04d\r\n*0\r\n" % cursor for cursor in itertools.count(1))
    monkeypatch.setattr(redis_store, "MOST_STEPS", 20)

    with pytest.raises(StoreError, match=r"does not end listing its keys, after 20 steps"):
        store.stats()


def test_t4_an_answer_that_nobody_asked_for_makes_the_others_worth_nothing(
    scripted: Scripted, open_store: OpenStore
) -> None:
    store = open_store(scripted)
    scripted.answers[b"EXISTS"] = b":1\r\n:0\r\n"

    with pytest.raises(StoreTimeoutError, match="4 B that nobody asked for"):
        store.exists(object_keys(1))


def test_t6_questions_of_many_keys_are_sent_in_steps_of_which_each_has_its_time(
    scripted: Scripted, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, keys = open_store(scripted), object_keys(12_000)
    scripted.answers[b"EXISTS"] = b":1\r\n"
    steps: list[int] = []
    send = Connection.send_packed_command

    def noted(connection: Connection, command: list[bytes], check_health: bool = True) -> None:  # noqa: FBT001, FBT002  # redis-py's own
        steps.extend(map(len, command))
        send(connection, command, check_health)  # type: ignore[no-untyped-call]  # redis-py's own

    monkeypatch.setattr(Connection, "send_packed_command", noted)

    assert store.exists(keys) == (True,) * len(keys)
    assert max(steps) <= 1 << 20
    assert len(steps) < 8


def test_a_store_that_cannot_be_opened_leaves_no_connection_behind(
    scripted: Scripted, open_store: OpenStore
) -> None:
    scripted.answers[b"DBSIZE"] = b"+many\r\n"

    with pytest.raises(StoreError, match="DBSIZE was answered with a ") as caught:
        open_store(scripted)

    wait_for(lambda: not scripted.connected, "the end of all connections")
    assert caught.value.__traceback__ is not None  # which has kept the store all the time


def test_calls_that_were_given_up_leave_no_connections_behind(
    make_server: Callable[..., RedisServer], open_store: OpenStore
) -> None:
    server = make_server()
    shelf = Shelf(open_store(server, answer_seconds=0.2, retry_seconds=0.5))
    keys = object_keys(2)
    shelf.stock(keys)

    server.freeze()
    with pytest.raises(StoreTimeoutError):
        shelf.read(keys)
    with pytest.raises(StoreTimeoutError):
        shelf.write(object_keys(2, chain="others"))
    server.thaw()
    wait_for(lambda: shelf.read(keys) == (OK, OK), "objects", despite=(StoreTimeoutError,))
    wait_for(lambda: shelf.write(keys), "an answer to a write", despite=(StoreTimeoutError,))

    wait_for(lambda: len(_clients_of(server)) <= 2, "one connection for loads and one for offloads")


def _clients_of(server: RedisServer) -> list[str]:
    with server.client() as client:
        found: object = client.client_list()
    assert isinstance(found, list)
    return [one["name"] for one in found if one["name"]]
