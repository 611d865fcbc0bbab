"""Objects in the memory of another process: what is known of a server is not believed of the next one."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from idle_time import busiest_thread
from peer_process import PeerProcess

from kvlinker.errors import StoreError, StoreTimeoutError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.shelves import LAYERS, Shelf, object_keys
from kvlinker_nixl import NixlStoreOptions, open_nixl_store
from kvlinker_nixl.messages import receive, send
from kvlinker_nixl.peer_server import PeerServer
from kvlinker_nixl.store import SlotStore

OK, MISS = ReadStatus.OK, ReadStatus.MISS
OpenStore = Callable[..., SlotStore]


@pytest.fixture
def open_store() -> Iterator[OpenStore]:
    """Give what opens a store on a server, impatient; it is closed after the test."""
    stores: list[SlotStore] = []

    def open_it(server: str, **options: object) -> SlotStore:
        quick = {"connect_seconds": 1.5, "transfer_seconds": 3.0, "pause_seconds": 0.3}
        found = NixlStoreOptions.of_config({"backend": "UCX", "server": server, **quick, **options})
        store = open_nixl_store(found)
        assert isinstance(store, SlotStore)
        stores.append(store)
        return store

    yield open_it
    for store in stores:
        store.close()


def until_it_works(call: Callable[[], object]) -> None:
    """Call until no store error is raised."""
    end = time.monotonic() + 60
    while True:
        try:
            call()
        except StoreError:
            assert time.monotonic() < end
            time.sleep(0.05)
        else:
            return


@pytest.mark.parametrize("staged", [True, False])
def test_b87_places_in_a_server_that_was_restarted_are_refused(
    peer: PeerProcess, open_store: OpenStore, *, staged: bool
) -> None:
    shelf = Shelf(open_store(peer.server, staged=staged))
    keys = object_keys(4)
    shelf.stock(keys)
    with shelf.open(keys) as session:
        assert shelf.read(keys, session=session, layer=0) == (OK,) * 4
        hold = shelf.store.hold(keys, seconds=60)
        peer.kill()
        peer.start()
        other = Shelf(open_store(peer.server), seed=b"other bytes in the same places")
        other.stock(keys)

        # Nobody has noticed yet: the transfer fails, and the next server is asked.
        assert shelf.read(keys, session=session, layer=1) == (MISS,) * 4
        assert shelf.read(keys, session=session, layer=0) == (MISS,) * 4
        hold.release()
    assert other.read(keys) == (OK,) * 4


def test_t6_a_read_from_a_server_that_is_gone_and_not_back_is_an_error(
    peer: PeerProcess, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(peer.server))
    keys = object_keys(4)
    shelf.stock(keys)
    with shelf.open(keys) as session:
        peer.kill()

        with pytest.raises(StoreError):
            shelf.read(keys, session=session)


def test_t6_a_dead_server_costs_one_wait_and_is_used_when_it_is_back(
    peer: PeerProcess, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(peer.server))
    keys = object_keys(3)
    shelf.stock(keys)
    peer.kill()

    began = time.monotonic()
    with pytest.raises(
        StoreTimeoutError, match=r"does `python -m kvlinker_nixl serve` run there\?"
    ):
        shelf.store.exists(keys)
    with pytest.raises(StoreTimeoutError, match="not asked again yet"):
        shelf.store.exists(keys)
    with pytest.raises(StoreTimeoutError):
        shelf.write(keys)
    assert time.monotonic() - began < 10

    peer.start()
    until_it_works(lambda: shelf.store.exists(keys))
    assert shelf.store.exists(keys) == (False,) * 3
    until_it_works(lambda: shelf.stock(keys))
    assert shelf.read(keys) == (OK,) * 3


def test_t6_a_stopped_server_is_answered_for_in_time(
    peer: PeerProcess, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(peer.server))
    keys = object_keys(3)
    shelf.stock(keys)
    peer.stop()

    began = time.monotonic()
    with pytest.raises(StoreTimeoutError, match=r"no answer in time|timed out"):
        shelf.store.exists(keys)
    assert 0.4 < time.monotonic() - began < 10

    with pytest.raises(StoreTimeoutError, match="not asked again yet"):
        shelf.store.exists(keys)
    peer.go_on()
    until_it_works(lambda: shelf.store.exists(keys))
    assert shelf.read(keys) == (OK,) * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [0, 1, -1], ids=["own", "first", "last"])
def test_a_server_ends_whichever_of_its_threads_gets_the_signal(
    peer: PeerProcess, at: int, number: signal.Signals
) -> None:
    """The first threads are older than any line of the server's: those of numpy."""
    threads = sorted(int(task.name) for task in Path(f"/proc/{peer.pid}/task").iterdir())
    assert threads[0] == peer.pid

    os.kill(threads[at], number)  # for the whole process, but this thread is asked first

    assert peer.wait() == 0


@pytest.mark.parametrize("staged", [True, False])
def test_pages_of_several_transfers_are_what_was_written(
    empty_peer: PeerProcess, open_store: OpenStore, *, staged: bool
) -> None:
    store = open_store(empty_peer.server, staged=staged, call_bytes="1MiB", transfer_seconds=30)
    shelf = Shelf(store, page_bytes=200 << 10)
    keys = object_keys(12)
    shelf.stock(keys)

    assert shelf.read(keys) == (OK,) * 12
    with shelf.open(keys) as session:
        for layer in range(LAYERS):
            assert shelf.read(keys, session=session, layer=layer) == (OK,) * 12


def test_l9_what_a_lost_client_had_reserved_pinned_and_held_is_free_again(
    empty_peer: PeerProcess, open_store: OpenStore
) -> None:
    lost, other = open_store(empty_peer.server), open_store(empty_peer.server)
    shelf = Shelf(lost, page_bytes=100 << 10)
    keys = object_keys(32)  # as many as there is room for
    shelf.stock(keys)
    lost.hold(keys, seconds=600)
    shelf.open(keys)
    beside = Shelf(other, page_bytes=100 << 10)
    (more,) = object_keys(1, chain="more")
    assert beside.write([more]) == (WriteStatus.FULL,)

    lost.state.depot.close()  # its connections end, and nothing is said

    end = time.monotonic() + 60
    while beside.write([more]) == (WriteStatus.FULL,):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert beside.read([more]) == (OK,)


def test_an_idle_server_and_its_client_burn_no_core(
    shared_peer: PeerProcess, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(shared_peer.server))
    keys = object_keys(3)
    shelf.stock(keys)
    assert shelf.read(keys) == (OK,) * 3
    time.sleep(0.1)

    assert busiest_thread(os.getpid(), seconds=0.5) < 0.05
    assert busiest_thread(shared_peer.pid, seconds=1.0) < 0.05


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x03{{{",
        b"\x00\x00\x00\x0c" + b'{"call": 12}',
    ],
)
def test_what_is_no_message_ends_its_connection_and_nothing_else(
    shared_peer: PeerProcess, open_store: OpenStore, raw: bytes
) -> None:
    with (
        socket.create_connection(("127.0.0.1", shared_peer.port), timeout=10) as connection,
        suppress(OSError),  # it may have been ended already
    ):
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""

    assert open_store(shared_peer.server).exists(object_keys(1, chain="none")) == (False,)


@pytest.mark.parametrize(
    "message",
    [
        {"call": "erase"},
        {"call": "pin", "keys": "00", "bytes": 1},
        {"call": "reserve", "keys": "00" * 32, "bytes": "many"},
        {"call": "publish", "number": 10**9},
        {"call": "hold", "keys": "zz", "milliseconds": 5},
    ],
)
def test_odd_questions_are_refused_and_change_nothing(
    shared_peer: PeerProcess, message: dict[str, object]
) -> None:
    deadline = time.monotonic() + 30
    with socket.create_connection(("127.0.0.1", shared_peer.port), timeout=10) as connection:
        send(connection, {"call": "hello"}, deadline=deadline)
        epoch = receive(connection, deadline=deadline)["epoch"]
        send(connection, {**message, "epoch": epoch}, deadline=deadline)

        assert "error" in receive(connection, deadline=deadline)


def test_b87_a_question_for_another_server_is_refused(shared_peer: PeerProcess) -> None:
    deadline = time.monotonic() + 30
    with socket.create_connection(("127.0.0.1", shared_peer.port), timeout=10) as connection:
        send(connection, {"call": "stats", "epoch": "an older one"}, deadline=deadline)

        assert receive(connection, deadline=deadline) == {"error": "another epoch"}


def test_a_server_that_is_closed_in_its_process_ends_its_connections(open_store: OpenStore) -> None:
    server = PeerServer(4 << 20)
    store = open_store(f"127.0.0.1:{server.address[1]}", connect_seconds=30)
    keys = object_keys(2)
    Shelf(store).stock(keys)

    began = time.monotonic()
    server.close()
    server.close()
    with pytest.raises(StoreTimeoutError):
        store.exists(keys)

    assert time.monotonic() - began < 20
