"""While one layer is copied, the next ones are read in a thread: nobody hears of it but by the time it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fake_client import FakeClient, Handle

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import StoreClosedError, StoreTimeoutError
from kvlinker.moving import Mover, using_mover
from kvlinker.plans import TransferPlan
from kvlinker.store import ReadSession, ReadStatus
from kvlinker.testing import PythonMover
from kvlinker.testing.shelves import LAYERS, Shelf, object_keys
from kvlinker_nixl import NixlStoreOptions, open_nixl_store
from kvlinker_nixl.agents import Operation
from kvlinker_nixl.aside import Begun
from kvlinker_nixl.depots import LocalDepot
from kvlinker_nixl.state import checksum
from kvlinker_nixl.store import SlotStore

OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
KEYS = object_keys(16)
ALL = (OK,) * 16
PAGE_BYTES = 1 << 20
"""K and V of a layer have 2 MiB each: more is left behind layer 1 than is read at once without a thread."""
ASIDE = "kvlinker-nixl-aside"
MakeShelf = Callable[..., Shelf]


@pytest.fixture
def client() -> Iterator[FakeClient]:
    """Give a client to which a test lets things happen."""
    client = FakeClient()
    yield client
    client.is_stuck = client.fails = lambda: False


@pytest.fixture
def make_shelf(tmp_path: Path, client: FakeClient) -> Iterator[MakeShelf]:
    """Give what opens a store with sixteen objects; it is closed after the test, when no thread may be left."""
    stores: list[SlotStore] = []

    def make(**options: object) -> Shelf:
        place = {"backend": "POSIX", "path": str(tmp_path / "store"), "capacity": "64MiB"}
        store = open_nixl_store(
            NixlStoreOptions.of_config({**place, "pause_seconds": 0.05, **options}), client=client
        )
        assert isinstance(store, SlotStore)
        stores.append(store)
        shelf = Shelf(store, page_bytes=PAGE_BYTES)
        shelf.stock(KEYS)
        client.begun.clear()
        return shelf

    yield make
    client.is_stuck = client.fails = lambda: False
    for store in stores:
        store.close()
        assert store.state.reads.agent.registrations == store.state.reads.agent.transfers == 0
    assert ASIDE not in {thread.name for thread in threading.enumerate()}


def is_aside() -> bool:
    """Whether this is a thread that reads ahead."""
    return threading.current_thread().name == ASIDE


def state_of(shelf: Shelf) -> tuple[SlotStore, LocalDepot]:
    """Return the store of a shelf and what says where its objects are."""
    assert isinstance(shelf.store, SlotStore)
    depot = shelf.store.state.depot
    assert isinstance(depot, LocalDepot)
    return shelf.store, depot


def read_ahead(client: FakeClient) -> list[Handle]:
    """Return what was read ahead."""
    return [handle for handle in client.begun if handle.thread == ASIDE]


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("mover", [None, PythonMover(checksum)], ids=["python", "mover"])
@pytest.mark.parametrize("call_bytes", ["64MiB", "1MiB"])
def test_layers_that_were_read_ahead_are_what_was_written_and_read_once(
    make_shelf: MakeShelf, client: FakeClient, *, mover: Mover | None, call_bytes: str
) -> None:
    shelf = make_shelf(call_bytes=call_bytes)

    with using_mover(mover), shelf.open(KEYS) as session:
        for layer in range(LAYERS):
            assert shelf.read(KEYS, session=session, layer=layer) == ALL

    reads = [one for one in client.begun if one.operation == Operation.READ.value]
    assert len(read_ahead(client)) >= 4
    assert sum(one.size for one in reads) < len(KEYS) * PAGE_BYTES * 1.01


@pytest.mark.parametrize("mover", [None, PythonMover(checksum)], ids=["python", "mover"])
def test_l4_a_read_that_goes_on_past_where_another_one_began_is_read_to_its_end(
    make_shelf: MakeShelf, *, mover: Mover | None
) -> None:
    shelf, keys, pages = make_shelf(), KEYS[:2], range(32, 34)
    plan = shelf.plan(pages)

    with using_mover(mover), shelf.open(keys) as session:
        # Ranges 0 to 3 are K, the others V: the first piece of the second read ends in what the first one has read.
        for spans in ([0, 4, 5], [1, 2, 3, 4, 6]):
            some = plan.select_spans(np.array(spans, dtype=np.int64))
            assert session.read(some, shelf.access) == (OK, OK)

    assert shelf.store.exists(keys) == (True, True)


@pytest.mark.parametrize("mover", [None, PythonMover(checksum)], ids=["python", "mover"])
@pytest.mark.parametrize("changed", [1, 2, LAYERS - 1])
def test_t1_a_changed_byte_of_a_layer_that_was_read_ahead_is_noticed_with_that_layer(
    make_shelf: MakeShelf, tmp_path: Path, *, mover: Mover | None, changed: int
) -> None:
    shelf = make_shelf()
    file = tmp_path / "store" / "objects.kvlinker-nixl"
    raw = file.read_bytes()
    place = raw.find(shelf.payload(KEYS[5])) + PAGE_BYTES // 2 + PAGE_BYTES // 8 * changed
    with file.open("r+b") as written:
        written.seek(place)
        written.write(bytes([raw[place] ^ 1]))  # of V of the layer

    with using_mover(mover), shelf.open(KEYS) as session:
        for layer in range(LAYERS):
            found = shelf.read(KEYS, session=session, layer=layer)
            is_wrong = layer >= changed
            assert found == tuple(CORRUPT if is_wrong and at == 5 else OK for at in range(16))

    assert shelf.store.exists(KEYS) == tuple(at != 5 for at in range(16))


def test_t6_what_fails_while_it_is_read_ahead_is_tried_anew_when_it_is_asked_for(
    make_shelf: MakeShelf, client: FakeClient
) -> None:
    shelf = make_shelf()
    client.fails = lambda: (
        is_aside() and len(read_ahead(client)) in {3, 4}
    )  # behind V of layers 0 and 1

    with shelf.open(KEYS) as session:
        for layer in range(LAYERS):
            assert shelf.read(KEYS, session=session, layer=layer) == ALL

    assert [one.is_moved for one in read_ahead(client)[:4]] == [True, True, False, False]
    assert shelf.store.stats().counters["errors"] == 0


def test_t6_what_is_late_while_it_is_read_ahead_is_late_for_who_asks_for_it_and_costs_one_wait(
    make_shelf: MakeShelf, client: FakeClient
) -> None:
    shelf = make_shelf(transfer_seconds=0.2, pause_seconds=60)
    store, _ = state_of(shelf)
    client.is_stuck = lambda: (
        is_aside() and len(read_ahead(client)) == 3
    )  # behind V of layers 0 and 1
    with shelf.open(KEYS) as session:
        for layer in range(2):
            assert shelf.read(KEYS, session=session, layer=layer) == ALL
        with pytest.raises(StoreTimeoutError, match="did not end lately"):
            shelf.read(KEYS, session=session, layer=2)

    client.is_stuck = lambda: False
    until(lambda: store.state.reads.blocks.sweep() == 0)
    assert store.state.reads.breaker.timeouts == 1


def test_nothing_of_a_window_is_reported_as_right_once_the_pins_are_gone(
    make_shelf: MakeShelf, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = make_shelf()
    _, depot = state_of(shelf)
    with shelf.open(KEYS) as session:
        for layer in range(2):
            assert shelf.read(KEYS, session=session, layer=layer) == ALL
        until(lambda: all(one.is_moved for one in client.begun))
        assert read_ahead(client)
        monkeypatch.setattr(depot, "is_current", lambda _pins: False)

        assert shelf.read(KEYS, session=session, layer=2) == (MISS,) * 16
        assert shelf.read(KEYS, session=session, layer=3) == (MISS,) * 16

    assert shelf.store.stats().counters["vanished"] == 16


def test_a_session_that_is_closed_lets_go_of_what_was_read_ahead_and_of_its_thread(
    make_shelf: MakeShelf, client: FakeClient
) -> None:
    shelf = make_shelf()
    store, depot = state_of(shelf)

    registered = []
    for _ in range(8):
        with shelf.open(KEYS) as session:
            for layer in range(2):
                shelf.read(KEYS, session=session, layer=layer)
            assert ASIDE in {thread.name for thread in threading.enumerate()}
        assert ASIDE not in {thread.name for thread in threading.enumerate()}
        assert not depot.is_busy
        registered.append(store.state.reads.agent.registrations)

    assert read_ahead(client)
    assert registered[-1] == registered[3]


def test_l5_pins_and_blocks_are_kept_until_what_is_read_ahead_is_over_and_nobody_waits_for_it(
    make_shelf: MakeShelf, client: FakeClient
) -> None:
    shelf = make_shelf()
    store, depot = state_of(shelf)
    client.is_stuck = lambda: (
        is_aside() and len(read_ahead(client)) > 2
    )  # behind V of layers 0 and 1
    session = shelf.open(KEYS)
    for layer in range(2):
        assert shelf.read(KEYS, session=session, layer=layer) == ALL
    until(lambda: len(read_ahead(client)) > 2)

    began = time.monotonic()
    session.close()

    assert time.monotonic() - began < 20, "transfer_seconds were waited for"
    with pytest.raises(StoreClosedError):
        shelf.read(KEYS, session=session, layer=2)
    assert depot.is_busy
    late = read_ahead(client)[-1]
    with store.state.reads.blocks.borrow(late.size) as block:
        assert block.address != int(late.local[0, 0])
    client.is_stuck = lambda: False
    until(lambda: not depot.is_busy)
    until(lambda: ASIDE not in {thread.name for thread in threading.enumerate()})
    with store.state.reads.blocks.borrow(late.size) as block:
        assert block.address == int(late.local[0, 0])


def test_b71_threads_that_read_layers_of_one_session_at_once_get_their_own(
    make_shelf: MakeShelf,
) -> None:
    shelf = make_shelf()
    shelves = [shelf.beside() for _ in range(3)]

    with shelf.open(KEYS) as session, ThreadPoolExecutor(3) as pool:

        def read(one: Shelf) -> None:
            for _ in range(3):
                for layer in range(LAYERS):
                    assert one.read(KEYS, session=session, layer=layer) == ALL

        for task in [pool.submit(read, one) for one in shelves]:
            task.result(timeout=120)


class Closing(DeviceAccess):
    """Closes the session before it copies."""

    def __init__(self, access: DeviceAccess, session: ReadSession) -> None:
        self._access = access
        self._session = session

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        self._access.copy_out(plan, host)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        self._session.close()
        self._access.copy_in(plan, host)


def test_a_read_goes_on_where_the_session_is_closed_meanwhile(
    make_shelf: MakeShelf,
) -> None:
    shelf = make_shelf()
    _, depot = state_of(shelf)
    session = shelf.open(KEYS)
    for layer in range(2):
        assert shelf.read(KEYS, session=session, layer=layer) == ALL

    found = shelf.read(KEYS, session=session, layer=2, memory=Closing(shelf.access, session))

    assert found == ALL
    assert not depot.is_busy


def test_a_read_goes_on_where_the_session_is_closed_before_its_next_piece_was_begun(
    make_shelf: MakeShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, is_closed = make_shelf(), threading.Event()
    _, depot = state_of(shelf)
    run = Begun.run

    def run_late(begun: Begun) -> None:
        is_closed.wait(60)
        run(begun)

    class ClosingFirst(Closing):
        def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
            super().copy_in(plan, host)
            is_closed.set()

    monkeypatch.setattr(Begun, "run", run_late)
    session = shelf.open(KEYS)

    found = shelf.read(KEYS, session=session, layer=0, memory=ClosingFirst(shelf.access, session))

    assert found == ALL
    assert not depot.is_busy


def test_layers_are_read_one_by_one_where_no_thread_can_be_had(
    make_shelf: MakeShelf, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = make_shelf()

    def refuse(_thread: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    monkeypatch.setattr(threading.Thread, "start", refuse)

    with shelf.open(KEYS) as session:
        for layer in range(LAYERS):
            assert shelf.read(KEYS, session=session, layer=layer) == ALL
    assert not read_ahead(client)
