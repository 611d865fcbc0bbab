"""What is read layer by layer is read ahead: in few transfers, and each layer is right or not for itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from fake_client import FakeAgent, FakeClient

from kvlinker.errors import StoreError, StoreTimeoutError
from kvlinker.moving import Mover, using_mover
from kvlinker.store import ReadStatus
from kvlinker.testing import PythonMover
from kvlinker.testing.shelves import LAYERS, Shelf, object_keys
from kvlinker_nixl import NixlStoreOptions, open_nixl_store
from kvlinker_nixl.agents import Operation
from kvlinker_nixl.depots import LocalDepot
from kvlinker_nixl.state import checksum
from kvlinker_nixl.store import SlotStore

OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
KEYS = object_keys(3)
MakeShelf = Callable[..., Shelf]


@pytest.fixture
def client() -> FakeClient:
    """Give a client to which a test lets things happen."""
    return FakeClient()


@pytest.fixture
def make_shelf(tmp_path: Path, client: FakeClient) -> Iterator[MakeShelf]:
    """Give what opens a store with three objects; it is closed after the test."""
    stores: list[SlotStore] = []

    def make(**options: object) -> Shelf:
        place = {"backend": "POSIX", "path": str(tmp_path / "store"), "capacity": "4MiB"}
        store = open_nixl_store(
            NixlStoreOptions.of_config({**place, "pause_seconds": 0.05, **options}), client=client
        )
        assert isinstance(store, SlotStore)
        stores.append(store)
        shelf = Shelf(store)
        shelf.stock(KEYS)
        client.begun.clear()
        return shelf

    yield make
    client.is_stuck = client.fails = lambda: False
    for store in stores:
        store.close()
        assert store.state.reads.agent.registrations == store.state.reads.agent.transfers == 0


def reads_of(client: FakeClient) -> int:
    """Return how many transfers have read."""
    return sum(handle.operation == Operation.READ.value for handle in client.begun)


def test_layers_in_order_are_read_with_those_behind_them(
    make_shelf: MakeShelf, client: FakeClient
) -> None:
    shelf = make_shelf()

    with shelf.open(KEYS) as session:
        for layer in range(LAYERS):
            assert shelf.read(KEYS, session=session, layer=layer) == (OK,) * 3

    # The headers, K and V of layer 0, and then all that is left of K and of V.
    assert reads_of(client) == 5


def test_layers_in_another_order_are_read_one_by_one(
    make_shelf: MakeShelf, client: FakeClient
) -> None:
    shelf = make_shelf()

    with shelf.open(KEYS) as session:
        for layer in (3, 1, 2, 0, 2):
            assert shelf.read(KEYS, session=session, layer=layer) == (OK,) * 3
        assert shelf.read(KEYS, session=session) == (OK,) * 3

    assert reads_of(client) <= 1 + 2 * 5 + 1


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds; behind a transfer that was late, none is begun for a while."""
    end = time.monotonic() + 60
    while True:
        with suppress(StoreTimeoutError):
            if holds():
                return
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("changed", [2, LAYERS - 1])
@pytest.mark.parametrize("mover", [None, PythonMover(checksum)], ids=["python", "mover"])
def test_t1_a_changed_byte_of_a_layer_that_was_read_ahead_is_noticed_with_that_layer(
    make_shelf: MakeShelf, tmp_path: Path, mover: Mover | None, changed: int
) -> None:
    shelf = make_shelf()
    file = tmp_path / "store" / "objects.kvlinker-nixl"
    raw = bytearray(file.read_bytes())
    raw[raw.find(shelf.payload(KEYS[1])) + 320 + 80 * changed] ^= 1  # V of the layer
    file.write_bytes(raw)

    with using_mover(mover), shelf.open(KEYS) as session:
        for layer in range(changed):
            assert shelf.read(KEYS, session=session, layer=layer) == (OK,) * 3
        for layer in (*range(changed, LAYERS), 1, 2):
            found = shelf.read(KEYS, session=session, layer=layer)
            assert found == (OK, CORRUPT, OK)

    assert shelf.store.exists(KEYS) == (True, False, True)


def test_t6_reading_ahead_that_is_late_or_fails_says_nothing_of_any_layer(
    make_shelf: MakeShelf, client: FakeClient
) -> None:
    shelf = make_shelf(transfer_seconds=0.1)
    with shelf.open(KEYS) as session:
        assert shelf.read(KEYS, session=session, layer=0) == (OK,) * 3
        client.fails = lambda: True
        with pytest.raises(StoreError, match="NIXL_ERR_BACKEND"):
            shelf.read(KEYS, session=session, layer=1)
        client.fails = lambda: False
        client.is_stuck = lambda: True
        with pytest.raises(StoreTimeoutError, match="transfer_seconds"):
            shelf.read(KEYS, session=session, layer=1)
        client.is_stuck = lambda: False
        assert isinstance(shelf.store, SlotStore)
        reads = shelf.store.state.reads
        assert reads.blocks.sweep() == 0
        until(lambda: shelf.read(KEYS, session=session, layer=0) == (OK,) * 3)

        for layer in range(1, LAYERS):
            assert shelf.read(KEYS, session=session, layer=layer) == (OK,) * 3


def test_a_session_that_is_closed_gives_back_what_it_read_ahead(make_shelf: MakeShelf) -> None:
    shelf = make_shelf()
    assert isinstance(shelf.store, SlotStore)

    registered = []
    for _ in range(8):
        with shelf.open(KEYS) as session:
            for layer in (0, 1):
                shelf.read(KEYS, session=session, layer=layer)
        registered.append(shelf.store.state.reads.agent.registrations)

    assert registered[-1] == registered[1]


def test_b84_memory_that_the_client_keeps_registered_keeps_no_object_pinned_and_no_file_open(
    make_shelf: MakeShelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = make_shelf()
    assert isinstance(shelf.store, SlotStore)
    depot = shelf.store.state.depot
    assert isinstance(depot, LocalDepot)

    def refuse(_agent: FakeAgent, _listed: object) -> None:
        message = "NIXL_ERR_UNKNOWN"
        raise RuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(FakeAgent, "deregister_memory", refuse)
        with shelf.open(KEYS) as session:
            for layer in (0, 1):
                shelf.read(KEYS, session=session, layer=layer)
            shelf.store.close()

    assert not depot.is_busy
    assert depot.stats().used_bytes == 0, "the file was not closed"
    assert "NIXL_ERR_UNKNOWN" in caplog.text


def test_b71_threads_that_read_layers_of_one_session_at_once_get_their_own(
    make_shelf: MakeShelf,
) -> None:
    shelf = make_shelf()
    shelves = [shelf.beside() for _ in range(3)]

    with shelf.open(KEYS) as session, ThreadPoolExecutor(3) as pool:

        def read(one: Shelf) -> None:
            for _ in range(10):
                for layer in range(LAYERS):
                    assert one.read(KEYS, session=session, layer=layer) == (OK,) * 3

        for task in [pool.submit(read, one) for one in shelves]:
            task.result(timeout=120)
