"""Fixtures: a Redis server of the tests' own, and stores on it; without redis-server every test says so."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvlinker_redis import RedisStore, RedisStoreOptions

sys.path.insert(0, str(Path(__file__).parent))

from redis_server import BINARY, RedisServer

MakeServer = Callable[..., RedisServer]
OpenStore = Callable[..., RedisStore]


@pytest.fixture(scope="session")
def binary() -> str:
    """Give the path of redis-server; where there is none, tests are counted as skipped, with this reason."""
    if BINARY is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    return BINARY


@pytest.fixture(scope="session")
def server(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Give the server that tests share, each with a prefix of its own."""
    server = RedisServer(binary, tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def make_server(binary: str, tmp_path: Path) -> Iterator[MakeServer]:
    """Give what starts a server for one test, with options of redis-server."""
    servers: list[RedisServer] = []

    def make(*options: str, port: int | None = None) -> RedisServer:
        servers.append(RedisServer(binary, tmp_path / f"redis{len(servers)}", *options, port=port))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def prefix() -> str:
    """Give a prefix that no other test has."""
    return uuid.uuid4().hex[:8]


@pytest.fixture
def open_store(prefix: str) -> Iterator[OpenStore]:
    """Give what opens a store on a server, impatient unless told otherwise; it is closed after the test."""
    stores: list[RedisStore] = []

    def open_it(server: RedisServer, **options: object) -> RedisStore:
        short = {"connect_seconds": 10.0, "answer_seconds": 20.0, "retry_seconds": 0.3}
        config = {"url": server.url, "prefix": prefix, "pause_seconds": 0.05, **short, **options}
        stores.append(RedisStore(RedisStoreOptions.of_config(config)))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()
