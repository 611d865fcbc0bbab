"""Memory in front of a Redis server: what is near is read without it, also when it is gone."""

from __future__ import annotations

import time
from collections.abc import Callable

from conftest import OpenStore
from redis_server import RedisServer

from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.stores.tiered import TieredStore
from kvlinker.testing import MemoryStore
from kvlinker.testing.shelves import Shelf, object_keys

OK, FAILED = ReadStatus.OK, ReadStatus.FAILED


def test_what_is_near_outlives_the_server_s_outage_and_the_rest_comes_back_with_it(
    make_server: Callable[..., RedisServer], open_store: OpenStore
) -> None:
    server, near = make_server(), MemoryStore()
    store = TieredStore(near, open_store(server), names=("memory", "redis"), pause_seconds=0.01)
    shelf, keys = Shelf(store), object_keys(4)
    shelf.stock(keys)
    near.delete(keys[2:])

    server.freeze()
    without = shelf.read(keys)
    refused = shelf.write(object_keys(1, chain="new"))
    server.thaw()

    assert without == (OK, OK, FAILED, FAILED)
    assert refused == (WriteStatus.FAILED,)
    end = time.monotonic() + 60
    while store.exists(keys) != (True,) * 4 and time.monotonic() < end:
        time.sleep(0.01)  # until the server is asked again
    assert shelf.read(keys) == (OK,) * 4
    assert store.wait_for_promotions(60)
    assert near.exists(keys) == (True,) * 4
