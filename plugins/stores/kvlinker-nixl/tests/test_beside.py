"""Bytes move while others are copied and checked: each is right or not for itself, and none moves after its call."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_client import FakeClient

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import StoreError, StoreTimeoutError, TransferRevokedError
from kvlinker.moving import Mover, using_mover
from kvlinker.plans import TransferPlan
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing import PythonMover
from kvlinker.testing.altered_access import CopyingPart
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker_nixl import NixlStoreOptions, open_nixl_store
from kvlinker_nixl.aside import Aside
from kvlinker_nixl.state import checksum
from kvlinker_nixl.store import SlotStore

OK, CORRUPT = ReadStatus.OK, ReadStatus.CORRUPT
KEYS = object_keys(8)
PAGE_BYTES = 384 << 10
"""Two objects are read at a time, of those MiB that one transfer may move, and eight in four transfers."""
ASIDE = "kvlinker-nixl-aside"
MakeShelf = Callable[..., Shelf]


@pytest.fixture
def client() -> FakeClient:
    """Give a client to which a test lets things happen."""
    return FakeClient()


@pytest.fixture
def make_shelf(tmp_path: Path, client: FakeClient) -> Iterator[MakeShelf]:
    """Give what opens a store of eight objects; it is closed after the test, when no thread may be left."""
    stores: list[SlotStore] = []

    def make(*, staged: bool = True, transfer_seconds: float = 30.0) -> Shelf:
        options = NixlStoreOptions.of_config(
            {
                "backend": "POSIX",
                "path": str(tmp_path / "store"),
                "capacity": "32MiB",
                "call_bytes": "1MiB",
                "staged": staged,
                "transfer_seconds": transfer_seconds,
                "pause_seconds": 0.05,
            }
        )
        store = open_nixl_store(options, client=client)
        assert isinstance(store, SlotStore)
        stores.append(store)
        return Shelf(store, page_bytes=PAGE_BYTES)

    yield make
    client.is_stuck = client.fails = lambda: False
    for store in stores:
        store.close()
        assert store.state.reads.agent.transfers == store.state.writes.agent.transfers == 0
    assert ASIDE not in {thread.name for thread in threading.enumerate()}


def payload_threads(client: FakeClient) -> list[str]:
    """Return the threads that began transfers of payloads, and forget those."""
    found = [handle.thread for handle in client.begun if handle.size > PAGE_BYTES]
    client.begun.clear()
    return found


@pytest.mark.parametrize("mover", [None, PythonMover(checksum)], ids=["python", "mover"])
@pytest.mark.parametrize("staged", [True, False])
def test_b72_pages_of_several_transfers_are_what_was_written(
    make_shelf: MakeShelf, client: FakeClient, *, mover: Mover | None, staged: bool
) -> None:
    shelf = make_shelf(staged=staged)
    own = threading.current_thread().name

    with using_mover(mover):
        shelf.stock(KEYS)
        written = payload_threads(client)
        assert shelf.read(KEYS) == (OK,) * 8
        read = payload_threads(client)
        assert shelf.read(KEYS, layer=1) == (OK,) * 8

    # What is read first is read by whoever has nothing to do meanwhile.
    assert written == [ASIDE] * (4 if staged else 3)
    assert read == ([own] + [ASIDE] * 3 if staged else [ASIDE] * 4)


@pytest.mark.parametrize("mover", [None, PythonMover(checksum)], ids=["python", "mover"])
@pytest.mark.parametrize("staged", [True, False])
def test_t1_a_changed_byte_is_noticed_in_whichever_transfer_it_comes(
    make_shelf: MakeShelf, tmp_path: Path, *, mover: Mover | None, staged: bool
) -> None:
    shelf = make_shelf(staged=staged)
    shelf.stock(KEYS)
    file = tmp_path / "store" / "objects.kvlinker-nixl"
    raw = file.read_bytes()
    with file.open("r+b") as changed:
        for number in (0, 3, 7):
            changed.seek(raw.find(shelf.payload(KEYS[number])) + PAGE_BYTES - 1)
            changed.write(bytes([shelf.payload(KEYS[number])[-1] ^ 1]))

    with using_mover(mover):
        statuses = shelf.read(KEYS)

    assert statuses == (CORRUPT, OK, OK, CORRUPT, OK, OK, OK, CORRUPT)
    assert shelf.store.exists(KEYS) == tuple(status is OK for status in statuses)


@pytest.mark.parametrize("number", [0, 1, 2, 4])
@pytest.mark.parametrize("staged", [True, False])
def test_t6_whichever_transfer_of_a_read_is_late_or_fails_nothing_is_said_to_be_right(
    make_shelf: MakeShelf, client: FakeClient, *, staged: bool, number: int
) -> None:
    shelf = make_shelf(staged=staged, transfer_seconds=0.1)
    shelf.stock(KEYS)
    client.begun.clear()
    client.fails = lambda: len(client.begun) == number + 1
    with pytest.raises(StoreError, match="NIXL_ERR_BACKEND"):
        shelf.read(KEYS)
    client.fails = lambda: False
    assert shelf.read(KEYS) == (OK,) * 8

    client.begun.clear()
    assert isinstance(shelf.store, SlotStore)
    reads = shelf.store.state.reads
    before = reads.breaker.timeouts
    # What goes straight to the pools is waited for, and late all the same.
    client.is_stuck = lambda: len(client.begun) == number + 1 and reads.breaker.timeouts == before
    with pytest.raises(StoreTimeoutError, match="transfer_seconds"):
        shelf.read(KEYS)

    assert reads.blocks.sweep() == 0
    assert reads.agent.transfers == 0


@pytest.mark.parametrize("staged", [True, False])
def test_t2_whichever_transfer_of_a_write_fails_nothing_is_stored_and_its_room_is_free(
    make_shelf: MakeShelf, client: FakeClient, *, staged: bool
) -> None:
    shelf = make_shelf(staged=staged)
    for number in range(4):
        client.begun.clear()
        client.fails = lambda wrong=number + 1: len(client.begun) == wrong  # type: ignore[misc]  # bound now
        with pytest.raises(StoreError, match="NIXL_ERR_BACKEND"):
            shelf.write(KEYS)
        assert shelf.store.exists(KEYS) == (False,) * 8
    client.fails = lambda: False

    assert shelf.write(KEYS) == (WriteStatus.WRITTEN,) * 8
    assert shelf.read(KEYS) == (OK,) * 8
    assert shelf.store.stats().counters.get("evicted", 0) == 0


@pytest.mark.parametrize("number", range(4))
def test_t2_room_of_a_write_that_is_late_beside_another_is_nobody_elses_until_it_is_over(
    make_shelf: MakeShelf, client: FakeClient, number: int
) -> None:
    shelf = make_shelf(transfer_seconds=0.1)
    assert isinstance(shelf.store, SlotStore)
    depot, writes = shelf.store.state.depot, shelf.store.state.writes
    client.is_stuck = lambda: len(client.begun) == number + 1

    with pytest.raises(StoreTimeoutError, match="transfer_seconds"):
        shelf.write(KEYS)

    places = {int(one[0]) for one in client.begun[-1].remote.tolist()}
    frame = client.begun[-1].size // len(places)
    beside = depot.reserve(object_keys(8, chain="new"), frame)
    assert not places.intersection(beside.offsets.tolist()), "the late bytes would land in it"
    depot.discard(beside)
    client.is_stuck = lambda: False
    assert writes.blocks.sweep() == 0
    again = depot.reserve(object_keys(16, chain="newer"), frame)
    assert places.issubset(again.offsets.tolist())
    depot.discard(again)


class Impatient(CopyingPart):
    """Copies half of the first pages, and raises when others are on their way."""

    def __init__(self, access: DeviceAccess) -> None:
        super().__init__(access, TransferRevokedError("the engine has changed its mind"))
        self.others_begun, self.has_raised = threading.Event(), threading.Event()

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        assert self.others_begun.wait(60)
        try:
            super().copy_in(plan, host)
        finally:
            self.has_raised.set()


def test_l5_a_load_that_is_revoked_ends_behind_the_transfer_beside_it(
    make_shelf: MakeShelf, client: FakeClient
) -> None:
    shelf = make_shelf()
    shelf.stock(KEYS)
    client.begun.clear()
    access, asked = Impatient(shelf.access), itertools.count()

    def is_stuck() -> bool:
        if len(client.begun) < 3:  # behind headers and the first pages
            return False
        access.others_begun.set()
        return not access.has_raised.wait(0.05) or next(asked) < 20

    client.is_stuck = is_stuck
    with shelf.open(KEYS) as session, pytest.raises(TransferRevokedError):
        session.read(shelf.plan(range(32, 40)), access)

    assert next(asked) == 21
    assert isinstance(shelf.store, SlotStore)
    assert shelf.store.state.reads.agent.transfers == 0
    assert shelf.read(KEYS) == (OK,) * 8


def test_calls_are_made_without_a_thread_where_none_can_be_had(
    make_shelf: MakeShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = make_shelf()

    def refuse(_thread: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    monkeypatch.setattr(threading.Thread, "start", refuse)

    shelf.stock(KEYS)
    assert shelf.read(KEYS) == (OK,) * 8


def test_l12_what_a_call_in_a_thread_raises_is_raised_by_who_waits_for_it_once() -> None:
    with Aside() as aside:
        begun = aside.begin(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            begun.finish()
        begun.finish()
        aside.begin(lambda: 1 // 0)


def test_a_call_that_is_given_up_is_not_made_and_one_that_is_under_way_is_waited_for() -> None:
    entered, left, over = threading.Event(), threading.Event(), threading.Event()
    made: list[str] = []

    def call() -> None:
        entered.set()
        assert left.wait(60)
        made.append("call")

    with Aside() as aside:
        under_way, waiting = aside.begin(call), aside.begin(lambda: made.append("waiting"))
        assert entered.wait(60)
        waiting.give_up(lambda: made.append("given up"))
        under_way.give_up(over.set)
        assert not over.is_set()
        left.set()
        assert over.wait(60)
        under_way.give_up(lambda: made.append("behind it"))

    assert made == ["given up", "call", "behind it"]


def test_nothing_is_begun_behind_a_stop_and_what_was_begun_is_done() -> None:
    aside, made = Aside(), list[int]()
    begun = aside.offer(lambda: made.append(1))
    aside.stop()

    assert aside.offer(lambda: made.append(2)) is None
    aside.begin(lambda: made.append(3)).finish()
    assert begun is not None
    begun.finish()
    aside.join(60)

    assert sorted(made) == [1, 3]


def test_what_waits_is_not_begun_once_the_block_is_left_with_an_error() -> None:
    entered, left = threading.Event(), threading.Event()
    made: list[int] = []

    def call() -> None:
        entered.set()
        assert left.wait(60)

    def leave() -> None:
        with Aside() as aside:
            aside.begin(call)
            aside.begin(lambda: made.append(1))
            assert entered.wait(60)
            threading.Timer(0.05, left.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()

    assert not made
