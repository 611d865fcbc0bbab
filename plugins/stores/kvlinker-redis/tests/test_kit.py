"""The Redis store keeps what every persistent store promises, on a real server."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from redis_server import RedisServer

import kvlinker_redis
from kvlinker.store import ObjectKey, Store
from kvlinker.testing.stores import Damage, PersistentStoreTests


class TestRedisStore(PersistentStoreTests):
    plugin = kvlinker_redis

    @pytest.fixture
    def config(self, server: RedisServer, prefix: str) -> Mapping[str, object]:
        return {"url": server.url, "prefix": prefix}

    @pytest.fixture
    def damage(self, server: RedisServer, prefix: str) -> Damage:
        def flip(_store: Store, key: ObjectKey, payload: bytes) -> None:
            client = server.client()
            name = f"{prefix}:{{{key.hex()}}}"
            value: object = client.get(name)
            assert isinstance(value, bytes)
            at = value.find(payload)
            client.setrange(name, at, bytes([payload[0] ^ 1]))

        return flip
