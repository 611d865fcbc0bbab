"""The object store keeps what every persistent store promises, on a real server and in a directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from s3_server import BUCKET, S3Server, settings_for

import kvlinker_s3
from kvlinker.store import ObjectKey, Store
from kvlinker.testing.stores import Damage, PersistentStoreTests
from kvlinker_s3 import S3StoreOptions
from kvlinker_s3.client import open_client
from kvlinker_s3.names import Names


def damage_through(options: S3StoreOptions) -> Damage:
    """Return what changes the first byte of an object's payload, wherever it is."""

    def flip(_store: Store, key: ObjectKey, payload: bytes) -> None:
        client = open_client(options)
        name = Names(options.prefix).of_object(key)
        value = bytearray(client.get(name).buffer())
        value[value.find(payload)] ^= 1
        client.put(name, bytes(value), use_multipart=False)

    return flip


class TestS3Store(PersistentStoreTests):
    plugin = kvlinker_s3

    @pytest.fixture
    def config(self, server: S3Server, prefix: str) -> Mapping[str, object]:
        settings = settings_for(server.port)
        return {"url": f"s3://{BUCKET}", "prefix": prefix, "settings": settings}

    @pytest.fixture
    def damage(self, config: Mapping[str, object]) -> Damage:
        return damage_through(S3StoreOptions.of_config(config))


class TestDirectoryStore(PersistentStoreTests):
    plugin = kvlinker_s3

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"url": tmp_path.as_uri()}

    @pytest.fixture
    def damage(self, config: Mapping[str, object]) -> Damage:
        return damage_through(S3StoreOptions.of_config(config))
