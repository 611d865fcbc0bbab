"""The NIXL store keeps what every persistent store promises, with pages staged and where they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from bucket_server import BUCKET, BucketServer
from foreign_memory import flip_byte_in_memory
from peer_process import PeerProcess

import kvlinker_nixl
from kvlinker.store import ObjectKey, Store
from kvlinker.testing.stores import Damage, PersistentStoreTests, flip_byte_in_files


class FileKit(PersistentStoreTests):
    plugin = kvlinker_nixl
    options: Mapping[str, object] = {}

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        place = {"backend": "POSIX", "path": str(tmp_path / "store"), "capacity": "4MiB"}
        return {**place, **self.options}

    @pytest.fixture
    def damage(self, tmp_path: Path) -> Damage:
        def flip(_store: Store, _key: ObjectKey, payload: bytes) -> None:
            flip_byte_in_files(tmp_path, payload)

        return flip


class TestStagedFileStore(FileKit):
    options: Mapping[str, object] = {"staged": True}


class TestDirectFileStore(FileKit):
    options: Mapping[str, object] = {"staged": False}


@pytest.mark.soak
class TestStagedFileStorePastThePageCache(FileKit):
    options: Mapping[str, object] = {"direct_io": True, "io": "uring"}


class PeerKit(PersistentStoreTests):
    plugin = kvlinker_nixl
    options: Mapping[str, object] = {}

    @pytest.fixture
    def config(self, empty_peer: PeerProcess) -> Mapping[str, object]:
        return {"backend": "UCX", "server": empty_peer.server, **self.options}

    @pytest.fixture
    def damage(self, empty_peer: PeerProcess) -> Damage:
        def flip(_store: Store, _key: ObjectKey, payload: bytes) -> None:
            flip_byte_in_memory(empty_peer.pid, payload)

        return flip


@pytest.mark.soak
class TestStagedPeerStore(PeerKit):
    options: Mapping[str, object] = {"staged": True}


class TestDirectPeerStore(PeerKit):
    options: Mapping[str, object] = {"staged": False}


class TestObjectStore(PersistentStoreTests):
    plugin = kvlinker_nixl

    @pytest.fixture
    def config(self, bucket: BucketServer, prefix: str) -> Mapping[str, object]:
        return {
            "backend": "OBJ",
            "bucket": BUCKET,
            "prefix": prefix,
            "endpoint": bucket.endpoint,
            "access_key": "kv",
            "secret_key": "${env:KV_NIXL_TEST_SECRET}",
        }

    @pytest.fixture
    def damage(self, bucket: BucketServer, prefix: str) -> Damage:
        def flip(_store: Store, key: ObjectKey, payload: bytes) -> None:
            name = f"{prefix}/{key[:12].hex()}/{key[12:13].hex()}/{key[13:].hex()}"
            client = bucket.client()
            value = bytearray(client.get(name).buffer())
            value[value.find(payload)] ^= 1
            client.put(name, bytes(value))

        return flip
