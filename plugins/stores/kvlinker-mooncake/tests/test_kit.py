"""The Mooncake store keeps what every persistent store promises, on a real cluster, direct and staged."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from mooncake_cluster import MooncakeCluster

import kvlinker_mooncake
from kvlinker.store import ObjectKey, Store
from kvlinker.testing.stores import Damage, OpenStore, PersistentStoreTests
from kvlinker_mooncake import MooncakeStoreOptions
from kvlinker_mooncake.names import Names


class _OnCluster(PersistentStoreTests):
    plugin = kvlinker_mooncake

    @pytest.fixture
    def open_store(self, cluster: MooncakeCluster, config: Mapping[str, object]) -> OpenStore:
        options = MooncakeStoreOptions.of_config(config)
        return lambda: cluster.open_quickly(options)


class TestDirectStore(_OnCluster):
    @pytest.fixture
    def config(self, cluster: MooncakeCluster, prefix: str) -> Mapping[str, object]:
        return {**cluster.options, "prefix": prefix, "reads": "ranged"}


class TestStagedStore(_OnCluster):
    @pytest.fixture
    def config(self, cluster: MooncakeCluster, prefix: str) -> Mapping[str, object]:
        return {**cluster.options, "prefix": prefix, "staged": True}

    @pytest.fixture
    def damage(self, cluster: MooncakeCluster, prefix: str) -> Damage:
        def flip(_store: Store, key: ObjectKey, payload: bytes) -> None:
            cluster.alter(Names(prefix).of_object(key), payload)

        return flip
