"""Load: threads that write, read and delete while the server dies and comes back, and a store of very many keys."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import OpenStore
from redis_server import RedisServer

from kvlinker.device import HostAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import StoreError
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.spans import BufferSpan
from kvlinker.store import ReadRequest, ReadStatus, WriteBatch, WriteStatus
from kvlinker.testing.shelves import Shelf, allow, object_keys

MILLION = 1_000_000
PAGES = 4096
PAGE_BYTES = 64


class Users:
    """Threads on one store, each of which checks every byte that it is told is right."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.is_over = threading.Event()
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()

    def use(self, number: int) -> None:
        with self._lock:
            self._shelf = shelf = self._shelf.beside()
        choice = random.Random(number)  # noqa: S311  # which calls are made
        keys = object_keys(48)
        while not self.is_over.is_set():
            some = choice.sample(keys, 8)
            action = choice.choice(["write", "write", "read", "read", "read", "delete"])
            try:
                if action == "write":
                    found: list[str] = [status.value for status in shelf.write(some)]
                elif action == "read":
                    found = [status.value for status in shelf.read(some)]
                else:
                    shelf.store.delete(some)
                    found = ["deleted"]
            except StoreError:
                found = ["error"]
                time.sleep(0.005)
            with self._lock:
                self.outcomes.update(found)


def run_users(server: RedisServer, shelf: Shelf, *, seconds: float) -> Counter[str]:
    """Let three threads use a store while its server is killed and started again."""
    users = Users(shelf)
    choice = random.Random(0)  # noqa: S311  # when the server dies
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(users.use, number) for number in range(3)]
        try:
            while time.monotonic() < end and not any(task.done() for task in tasks):
                time.sleep(choice.uniform(0.1, 0.6))
                server.kill()
                time.sleep(choice.uniform(0.0, 0.2))
                server.start()
        finally:
            users.is_over.set()
        for task in tasks:
            task.result()
    return users.outcomes


@pytest.mark.parametrize(
    "seconds", [pytest.param(2, id="short"), pytest.param(600, id="long", marks=pytest.mark.soak)]
)
def test_b71_b87_threads_on_a_server_that_dies_again_and_again_see_whole_objects_or_none(
    make_server: Callable[..., RedisServer], open_store: OpenStore, seconds: float
) -> None:
    server = make_server()
    store = open_store(server, retry_seconds=0.05, pause_seconds=0.01)

    outcomes = run_users(server, Shelf(store), seconds=seconds)

    assert {"ok", "written"} <= outcomes.keys()
    assert "corrupt" not in outcomes
    assert store.stats().counters.get("corrupt", 0) == 0
    shelf = Shelf(store)
    shelf.stock(object_keys(4))
    assert shelf.read(object_keys(4)) == (ReadStatus.OK,) * 4


@pytest.mark.soak
def test_a_million_objects_are_written_found_counted_read_and_cleared(
    make_server: Callable[..., RedisServer], open_store: OpenStore
) -> None:
    store = open_store(make_server(), answer_seconds=60)
    memory = np.arange(2 * PAGES * PAGE_BYTES, dtype=np.uint8).reshape(2 * PAGES, PAGE_BYTES)
    span = BufferSpan(
        base_ptr=memory.ctypes.data,
        rows=2 * PAGES,
        row_bytes=PAGE_BYTES,
        row_stride=PAGE_BYTES,
        label="rows",
    )
    entry = DevicePoolEntry(
        name="kv",
        indices_from_pool="kv",
        components=[[span]],
        layer_mapping={0: 0},
        page_size=1,
        rows_are_pages=True,
    )
    source = entry.page_plan(entry.prepare_locations(range(PAGES)))
    target = entry.page_plan(entry.prepare_locations(range(PAGES, 2 * PAGES)))
    calls = -(-MILLION // PAGES)
    keys = [
        tuple(b"%012d%020d" % (7, call * PAGES + page) for page in range(PAGES))
        for call in range(calls)
    ]

    for some in keys:
        batch = WriteBatch(keys=some, plan=source, fingerprint=b"rows")
        (statuses,) = store.write([batch], HostAccess(), may_publish=allow)
        assert set(statuses) == {WriteStatus.WRITTEN}

    assert store.stats().objects == calls * PAGES
    assert all(all(store.exists(some)) for some in keys)
    request = ReadRequest(keys=keys[-1], object_bytes=PAGE_BYTES, fingerprint=b"rows")
    with store.open_read(request) as session:
        assert set(session.read(target, HostAccess())) == {ReadStatus.OK}
    assert (memory[PAGES:] == memory[:PAGES]).all()
    assert store.clear(keys[0][0][:NAMESPACE_BYTES]) == calls * PAGES
    assert store.stats().objects == 0
