"""Encrypted and compressed objects are read whole and by layer from stores that cut what they read into pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from redis_server import BINARY, RedisServer

import kvlinker_redis
import kvlinker_s3
from kvlinker.store import ReadStatus, Store
from kvlinker.stores.compressed import CompressedStore
from kvlinker.stores.encrypted import EncryptedStore
from kvlinker.testing.shelves import LAYERS, Shelf, object_keys

OK = ReadStatus.OK
PAGE = 8 * 144 << 10
"""Ranges of nine blocks; more than the object store asks for at once."""
CODECS: Mapping[str, Callable[[Store], Store]] = {
    "encrypted": lambda store: EncryptedStore(store, bytes(32)),
    "compressed": CompressedStore,
    "both": lambda store: CompressedStore(EncryptedStore(store, bytes(32))),
}


@pytest.fixture
def directory(tmp_path: Path) -> Store:
    return kvlinker_s3.open_store({"url": tmp_path.as_uri(), "call_bytes": 1 << 20})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if BINARY is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    server = RedisServer(BINARY, tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def redis(server: RedisServer) -> Store:
    return kvlinker_redis.open_store({"url": server.url})


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("inside", ["directory", "redis"])
def test_large_objects_come_back_whole_and_by_layer(
    request: pytest.FixtureRequest, inside: str, codec: str
) -> None:
    shelf = Shelf(CODECS[codec](request.getfixturevalue(inside)), page_bytes=PAGE)
    keys = object_keys(2, chain=codec)

    shelf.stock(keys)

    assert shelf.read(keys) == (OK,) * 2
    with shelf.open(keys) as session:
        for layer in (0, LAYERS - 1):
            assert shelf.read(keys, session=session, layer=layer) == (OK,) * 2
    shelf.store.close()
