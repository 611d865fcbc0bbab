"""A server that is never silent for long, and never done, has its time too."""

from __future__ import annotations

import time

import pytest
from conftest import OpenStore
from proxy import proxy_to
from redis_server import RedisServer

from kvlinker.errors import StoreTimeoutError
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
