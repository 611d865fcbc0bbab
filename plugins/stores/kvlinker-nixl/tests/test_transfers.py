"""Transfers that are late or fail, and memory that is not registered: what is answered, and what is never touched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_client import FakeClient

from kvlinker.errors import (
    ContractError,
    RegistrationError,
    StoreError,
    StoreTimeoutError,
    UnsupportedOperationError,
)
from kvlinker.spans import MemoryRegion
from kvlinker.store import ReadStatus
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker_nixl import NixlStoreOptions, open_nixl_store
from kvlinker_nixl.store import SlotStore

OK = ReadStatus.OK
OpenStore = Callable[..., SlotStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Give what opens a store with a client of the test's; it is closed after the test."""
    stores: list[SlotStore] = []

    def open_it(client: FakeClient, **options: object) -> SlotStore:
        place = {"backend": "POSIX", "path": str(tmp_path / "store"), "capacity": "4MiB"}
        quick = {"transfer_seconds": 0.2, "pause_seconds": 0.3, "close_seconds": 0.5}
        found = NixlStoreOptions.of_config({**place, **quick, **options})
        store = open_nixl_store(found, client=client)
        assert isinstance(store, SlotStore)
        stores.append(store)
        return store

    yield open_it
    for store in stores:
        store.close()


def region(number: int, size: int = 4096, device: str = "cpu") -> MemoryRegion:
    """Return made-up memory."""
    return MemoryRegion(base_ptr=0x10000 + number * 0x10000, size_bytes=size, device=device)


# ---- late -------------------------------------------------------------------------------------


def test_t6_a_late_staged_read_is_answered_in_time_and_the_next_one_at_once(
    open_store: OpenStore,
) -> None:
    stuck = threading.Event()
    client = FakeClient(is_stuck=stuck.is_set)
    store = open_store(client)
    shelf = Shelf(store)
    keys = object_keys(3)
    shelf.stock(keys)
    stuck.set()

    began = time.monotonic()
    with pytest.raises(StoreTimeoutError, match="transfer_seconds"):
        shelf.read(keys)
    first = time.monotonic() - began
    with pytest.raises(StoreTimeoutError, match="did not end lately"):
        shelf.read(keys)

    assert 0.2 <= first < 30
    assert store.exists(keys) == (True,) * 3
    stuck.clear()
    time.sleep(0.35)
    assert shelf.read(keys) == (OK,) * 3
    assert store.state.reads.agent.transfers == 0


def test_l5_memory_of_a_late_staged_read_is_used_by_nobody_else_until_it_ends(
    open_store: OpenStore,
) -> None:
    stuck = threading.Event()
    client = FakeClient(is_stuck=stuck.is_set)
    store = open_store(client, pause_seconds=0.05)
    shelf = Shelf(store)
    keys = object_keys(3)
    shelf.stock(keys)
    assert shelf.read(keys) == (OK,) * 3
    blocks = store.state.reads.blocks
    stuck.set()
    with pytest.raises(StoreTimeoutError):
        shelf.read(keys)

    assert blocks.sweep() == 1
    with blocks.borrow(1) as block:
        assert not block.is_late
    stuck.clear()
    assert blocks.sweep() == 0
    time.sleep(0.1)
    assert shelf.read(keys) == (OK,) * 3


def test_l5_a_late_read_into_pool_memory_does_not_answer_before_its_last_write(
    open_store: OpenStore,
) -> None:
    stuck = threading.Event()
    client = FakeClient(is_stuck=stuck.is_set)
    store = open_store(client, staged=False)
    shelf = Shelf(store)
    keys = object_keys(3)
    shelf.stock(keys)
    with shelf.open(keys) as session, ThreadPoolExecutor(1) as pool:
        assert shelf.read(keys, session=session) == (OK,) * 3
        stuck.set()
        plan = shelf.plan(range(32, 35))
        task = pool.submit(session.read, plan, shelf.access)
        time.sleep(0.5)

        assert not task.done()
        assert not store.capabilities.revocable
        stuck.clear()
        with pytest.raises(StoreTimeoutError):
            task.result(timeout=60)
        assert store.state.reads.agent.transfers == 0


def test_t6_loads_go_on_while_an_offload_is_late(open_store: OpenStore) -> None:
    writes = threading.Event()
    client = FakeClient()
    store = open_store(client, transfer_seconds=0.5)
    shelf = Shelf(store)
    beside = shelf.beside()
    stored, late = object_keys(2)
    shelf.stock([stored])
    offloads = store.state.writes.agent.name
    client.is_stuck = lambda: writes.is_set() and threading.current_thread().name == offloads
    writes.set()

    def write() -> None:
        threading.current_thread().name = offloads
        with pytest.raises(StoreTimeoutError):
            shelf.write([late])

    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(write)
        assert beside.read([stored]) == (OK,)
        task.result(timeout=60)
    assert store.exists([late]) == (False,)
    writes.clear()


def test_close_is_bounded_while_a_transfer_hangs(open_store: OpenStore) -> None:
    stuck = threading.Event()
    store = open_store(FakeClient(is_stuck=stuck.is_set))
    shelf = Shelf(store)
    keys = object_keys(1)
    shelf.stock(keys)
    stuck.set()
    with pytest.raises(StoreTimeoutError):
        shelf.read(keys)

    began = time.monotonic()
    store.close()

    assert time.monotonic() - began < 30
    stuck.clear()


def test_a_failed_transfer_fails_the_call_and_leaves_nothing_under_way(
    open_store: OpenStore,
) -> None:
    failing = threading.Event()
    client = FakeClient(fails=failing.is_set)
    store = open_store(client)
    shelf = Shelf(store)
    kept, lost = object_keys(2)
    shelf.stock([kept])
    failing.set()

    with pytest.raises(StoreError, match="NIXL_ERR_BACKEND"):
        shelf.read([kept])
    with pytest.raises(StoreError, match="NIXL_ERR_BACKEND"):
        shelf.write([lost])

    failing.clear()
    assert store.exists([kept, lost]) == (True, False)
    assert shelf.read([kept]) == (OK,)
    shelf.stock([lost])
    assert store.state.reads.agent.transfers == store.state.writes.agent.transfers == 0
    assert not store.state.depot.stats().counters.get("evicted")


# ---- registration -----------------------------------------------------------------------------


def test_b84_a_refused_region_is_named_and_the_ones_before_it_are_rolled_back(
    open_store: OpenStore,
) -> None:
    client = FakeClient()
    store = open_store(client, staged=False)
    before = [list(agent.regions) for agent in client.agents]
    client.most_regions = len(before[0]) + 2

    with pytest.raises(RegistrationError) as caught:
        store.register([region(number, size=4096 * (number + 1)) for number in range(4)])

    text = str(caught.value)
    assert "region 2 of 4" in text
    assert "12288 B" in text
    assert "NIXL_ERR_BACKEND" in text
    assert [agent.regions for agent in client.agents] == before
    client.most_regions = 100
    store.register([region(0)])
    with pytest.raises(RegistrationError, match="unregister"):
        store.register([region(1)])
    store.unregister()
    store.unregister()
    assert [agent.regions for agent in client.agents] == before


def test_b84_limits_of_regions_and_of_their_bytes_are_kept(open_store: OpenStore) -> None:
    client = FakeClient()
    store = open_store(client, staged=False, max_regions=2, max_region_bytes=8192)
    before = [list(agent.regions) for agent in client.agents]

    with pytest.raises(RegistrationError, match="max_regions"):
        store.register([region(number) for number in range(3)])
    with pytest.raises(RegistrationError, match=r"region 1 of 2 .*8193 B.*max_region_bytes"):
        store.register([region(0), region(1, size=8193)])

    assert [agent.regions for agent in client.agents] == before


def test_b84_memory_that_the_backend_cannot_reach_is_refused_by_name(open_store: OpenStore) -> None:
    store = open_store(FakeClient(), staged=False)

    with pytest.raises(RegistrationError, match=r"cuda:0.*GDS"):
        store.register([region(0, device="cuda:0")])
    with pytest.raises(RegistrationError, match="xpu"):
        store.register([region(0, device="xpu:1")])


def test_b84_a_staged_store_registers_nothing(open_store: OpenStore) -> None:
    store = open_store(FakeClient())

    assert not store.capabilities.registers_memory
    with pytest.raises(UnsupportedOperationError, match="staged: false"):
        store.register([region(0)])


def test_a_namespace_of_another_length_removes_nothing(open_store: OpenStore) -> None:
    store = open_store(FakeClient())
    shelf = Shelf(store)
    keys = object_keys(2)
    shelf.stock(keys)

    with pytest.raises(ContractError):
        store.clear(b"")

    assert store.exists(keys) == (True, True)
