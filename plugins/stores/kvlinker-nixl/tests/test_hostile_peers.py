"""What answers at a server's address may be anything: it is refused by name, and no answer is taken for another's."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress

import pytest
from fake_client import FakeAgent, FakeClient

from kvlinker.errors import StoreContractError, StoreError
from kvlinker.testing.shelves import object_keys
from kvlinker_nixl import NixlStoreOptions, open_nixl_store, peer_depot
from kvlinker_nixl.agents import Agent
from kvlinker_nixl.depots import Pins, Reservation
from kvlinker_nixl.messages import Message, numbers_of, receive, send
from kvlinker_nixl.peer_depot import Channel, PeerDepot
from kvlinker_nixl.peer_server import PROTOCOL, PeerServer

WELCOME = {
    "protocol": PROTOCOL,
    "epoch": "one",
    "metadata": "cGVlcg==",
    "base": 4096,
    "max_frame_bytes": 1 << 20,
}
STATS = {"objects": 0, "used_bytes": 0, "capacity_bytes": 1, "counters": {}}
FOUND = {"number": 1, "offsets": [0], "headers": [192]}


class Impostor:
    """A server that answers each call as a test says."""

    def __init__(self) -> None:
        """Listen."""
        self.answers: dict[str, Message | bytes] = {"hello": WELCOME, "stats": STATS}
        self.connections = 0
        self.ended = 0
        self.calls: list[str] = []
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._listener.getsockname()
        return host, port

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while True:
                self.calls.append(str(receive(connection, deadline=None)["call"]))
                answer = self.answers[self.calls[-1]]
                if isinstance(answer, bytes):
                    connection.sendall(answer)
                else:
                    send(connection, answer, deadline=time.monotonic() + 60)
        self.ended += 1

    def end_connections(self) -> None:
        """End what is open, as a server that is restarted does."""
        while self._open:
            with suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Listen no more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def impostor() -> Iterator[Impostor]:
    """Give a server that says what a test wants."""
    server = Impostor()
    yield server
    server.close()


@pytest.fixture
def make_channel(impostor: Impostor) -> Iterator[Callable[[], Channel]]:
    """Give what makes a connection to it, with an agent that believes everything."""
    with ExitStack() as opened:

        def make() -> Channel:
            agent = Agent(FakeClient(), "UCX", {}, advice="")
            channel = Channel(impostor.address, agent, answer_seconds=5.0, pause_seconds=0.1)
            opened.callback(channel.close)
            return channel

        yield make


@pytest.fixture
def depot(make_channel: Callable[[], Channel]) -> PeerDepot:
    """Give a depot that asks it."""
    return PeerDepot(make_channel(), make_channel())


def framed(raw: bytes) -> bytes:
    """Return bytes with their length in front."""
    return len(raw).to_bytes(4, "big") + raw


@pytest.mark.parametrize(
    "raw",
    [(1 << 30).to_bytes(4, "big"), framed(b"no JSON"), framed(b"[1]"), framed(b"[" * 100_000)],
    ids=["endless", "no JSON", "no object", "deep"],
)
def test_t4_an_answer_that_is_none_ends_the_connection_and_the_rest_of_it_answers_nothing(
    impostor: Impostor, depot: PeerDepot, raw: bytes
) -> None:
    impostor.answers["exists"] = raw + framed(b'{"flags": [true]}')
    with pytest.raises(StoreContractError, match="message"):
        depot.exists(object_keys(1))

    impostor.answers["exists"] = {"flags": [False]}
    assert depot.exists(object_keys(1, chain="other")) == (False,)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"offsets": [-2]}, "offsets"),
        ({"offsets": [1 << 80]}, "offsets"),
        ({"offsets": [0, 0]}, "1 whole numbers"),
        ({"headers": [-1]}, "headers"),
        ({"headers": [0]}, "headers"),
        ({"headers": [1]}, "headers"),
        ({"headers": [1 << 40]}, "headers"),
        ({"number": "1"}, "number"),
    ],
    ids=str,
)
def test_places_that_cannot_be_are_refused(
    impostor: Impostor, depot: PeerDepot, wrong: Mapping[str, object], reason: str
) -> None:
    impostor.answers["pin"] = FOUND
    assert depot.pin(object_keys(1), 640).offsets.tolist() == [0]
    impostor.answers["pin"] = {**FOUND, **wrong}
    impostor.answers["reserve"] = {"number": 1, "offsets": [-3]}

    with pytest.raises(StoreContractError, match=reason):
        depot.pin(object_keys(1), 640)
    with pytest.raises(StoreContractError, match="offsets"):
        depot.reserve(object_keys(1), 640)


def test_t4_letting_go_ends_with_the_connection_where_the_answer_is_none(
    impostor: Impostor, depot: PeerDepot
) -> None:
    impostor.answers |= {"pin": FOUND, "reserve": FOUND, "hold": {"number": 1, "flags": [True]}}
    impostor.answers |= dict.fromkeys(("unpin", "discard", "release"), framed(b"no JSON"))
    keys = object_keys(1)

    depot.unpin(depot.pin(keys, 640))
    depot.discard(depot.reserve(keys, 640))
    depot.release(depot.hold(keys, 60)[0])

    assert impostor.calls[-2:] == ["hold", "release"]
    assert depot.stats().objects == 0
    assert impostor.connections == 4, "what else is behind such an answer is nobody's"


@pytest.mark.parametrize(
    "wrong",
    [{"metadata": "?"}, {"base": -1}, {"base": 1 << 70}, {"protocol": 2}, {"epoch": 1}],
    ids=str,
)
def test_b87_a_welcome_that_is_none_is_refused_and_the_next_one_is_taken(
    impostor: Impostor, make_channel: Callable[[], Channel], wrong: Mapping[str, object]
) -> None:
    impostor.answers["hello"] = {**WELCOME, **wrong}
    channel = make_channel()
    with pytest.raises((StoreError, StoreContractError)):
        channel.ask("stats")

    impostor.answers["hello"] = WELCOME
    until(lambda: channel.ask("stats") == STATS)
    assert channel.target.peer == "peer"


def test_b87_a_server_whose_memory_could_not_be_reached_once_is_asked_anew(
    impostor: Impostor, make_channel: Callable[[], Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make_channel()

    def refuse(_agent: FakeAgent, _metadata: bytes) -> bytes | str:
        message = "NIXL_ERR_NOT_FOUND"
        raise RuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(FakeAgent, "add_remote_agent", refuse)
        with pytest.raises(StoreError, match="NIXL_ERR_NOT_FOUND"):
            channel.ask("stats")

    until(lambda: channel.ask("stats") == STATS)
    assert channel.target.peer == "peer"
    assert impostor.connections == 2


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds; a server that was refused is left alone for a while."""
    end = time.monotonic() + 30
    while True:
        with suppress(StoreError):
            if holds():
                return
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    "wrong",
    [
        {"call": "reserve", "keys": "00" * 32, "bytes": 0},
        {"call": "reserve", "keys": "00" * 32, "bytes": -640},
        {"call": "clear", "namespace": "everything"},
        {"call": "exists", "keys": "00" * 31},
        {"call": "drop", "number": 1, "positions": ["0"]},
    ],
    ids=str,
)
def test_a_server_refuses_what_means_nothing_and_loses_no_room_over_it(
    wrong: Mapping[str, object],
) -> None:
    server = PeerServer(1 << 20, client=FakeClient())
    deadline = time.monotonic() + 60
    with ExitStack() as opened:
        opened.callback(server.close)
        connection = opened.enter_context(socket.create_connection(server.address))
        send(connection, {"epoch": server.epoch, **wrong}, deadline=deadline)
        assert "must be" in str(receive(connection, deadline=deadline)["error"])

        places = {
            "call": "reserve",
            "epoch": server.epoch,
            "keys": "00" * 32,
            "bytes": server.depot.max_frame_bytes,
        }
        send(connection, places, deadline=deadline)
        assert receive(connection, deadline=deadline)["offsets"] == [0]


@pytest.mark.parametrize("call", ["pin", "reserve"])
def test_b87_places_are_those_of_the_server_that_named_them_whoever_finds_another_one_meanwhile(
    impostor: Impostor, depot: PeerDepot, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(FakeAgent, "add_remote_agent", lambda _, metadata: metadata.decode())
    keys, really = object_keys(1), numbers_of

    def as_another_thread_finds_the_next_server(*given: object) -> list[int]:
        monkeypatch.setattr(peer_depot, "numbers_of", really)
        impostor.answers["hello"] = {**WELCOME, "epoch": "two", "metadata": "b3RoZXI="}
        impostor.end_connections()
        depot.exists(object_keys(1))
        depot.delete(object_keys(1))
        # The line of offloads finds it too.
        depot.discard(depot.reserve(object_keys(1), 640))
        return really(*given)  # type: ignore[arg-type]  # as they were given

    impostor.answers |= {"exists": {"flags": [True]}, "delete": {"flags": [True]}}
    impostor.answers |= {"pin": FOUND, "reserve": FOUND, "discard": {}}
    monkeypatch.setattr(peer_depot, "numbers_of", as_another_thread_finds_the_next_server)

    given = depot.pin(keys, 640) if call == "pin" else depot.reserve(keys, 640)

    assert given.target.peer == "peer"
    assert depot.pin(keys, 640).target.peer == "other"
    if call == "pin":
        assert isinstance(given, Pins)
        assert not depot.is_current(given)
    else:
        assert isinstance(given, Reservation)
        with pytest.raises(StoreError, match="connection was lost"):
            depot.publish(given)


@pytest.mark.parametrize("stats", [{"error": "no"}, framed(b"no JSON")], ids=["error", "none"])
def test_a_store_that_cannot_be_opened_leaves_no_connection_behind(
    impostor: Impostor, stats: Message | bytes
) -> None:
    impostor.answers["stats"] = stats
    host, port = impostor.address
    options = NixlStoreOptions.of_config({"backend": "UCX", "server": f"{host}:{port}"})

    with pytest.raises((StoreError, StoreContractError)) as caught:
        open_nixl_store(options, client=FakeClient())

    until(lambda: impostor.ended == 1)
    assert caught.value.__traceback__ is not None  # which has kept the connection all the time


def test_b87_a_hold_of_a_server_that_is_gone_ends_none_of_the_next_one(
    impostor: Impostor, depot: PeerDepot
) -> None:
    impostor.answers |= {"hold": {"number": 1, "flags": [True]}, "exists": {"flags": [True]}}
    old, _ = depot.hold(object_keys(1), 60)
    impostor.answers["hello"] = {**WELCOME, "epoch": "two"}
    impostor.end_connections()
    new, _ = depot.hold(object_keys(1), 60)
    impostor.answers["release"] = {}
    impostor.calls.clear()

    depot.release(old)
    assert "release" not in impostor.calls
    depot.release(new)
    depot.release(new)
    assert impostor.calls == ["release"]
