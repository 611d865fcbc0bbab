"""A linker over a Redis store: whatever the server does, pages that are said to be there are right."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from conftest import OpenStore
from redis_server import RedisServer

from kvlinker.testing import page_keys
from kvlinker.testing.small_linkers import SmallLinker

KEYS = page_keys(4)
ALL = [1, 2, 3, 4]


def test_pages_of_one_engine_are_loaded_by_another(
    server: RedisServer, open_store: OpenStore
) -> None:
    with SmallLinker(open_store(server)) as one, SmallLinker(open_store(server)) as other:
        assert one.offload(KEYS)

        assert other.lookup(KEYS) == ALL
        assert other.load(KEYS)


@pytest.mark.parametrize("afterwards", ["is back", "stays away"])
def test_b71_a_server_that_dies_between_lookup_and_load_fails_the_load_alone(
    make_server: Callable[..., RedisServer], open_store: OpenStore, afterwards: str
) -> None:
    server = make_server()
    with SmallLinker(open_store(server, retry_seconds=0.05, pause_seconds=0.01)) as linker:
        assert linker.offload(KEYS)
        assert linker.lookup(KEYS) == ALL

        server.kill()
        if afterwards == "is back":
            server.start()

        assert not linker.load(KEYS)
        assert linker.lookup(KEYS) == []
        if afterwards == "stays away":
            assert not linker.offload(KEYS)
            server.start()
        time.sleep(0.1)
        assert linker.offload(KEYS)


def test_b88_an_object_that_is_evicted_between_lookup_and_load_fails_the_load_and_is_stored_again(
    server: RedisServer, open_store: OpenStore, prefix: str
) -> None:
    with SmallLinker(open_store(server)) as linker:
        assert linker.offload(KEYS)
        assert linker.lookup(KEYS) == ALL
        client = server.client()
        names: object = client.keys(f"{prefix}:*")
        assert isinstance(names, list)
        client.delete(min(names))

        assert not linker.load(KEYS)
        assert linker.offload(KEYS)
        assert len(client.keys(f"{prefix}:*")) == len(names)
