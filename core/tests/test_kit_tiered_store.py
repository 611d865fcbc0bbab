"""A tiered store keeps what every store promises, whatever the two stores are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import tiered_folder
from folder_store import FolderStore

from kvlinker.store import ObjectKey, Store
from kvlinker.stores.tiered import TieredStore, tiered
from kvlinker.stores.write_back import WriteBackLimits
from kvlinker.testing import CapabilityChoices, MemoryStore
from kvlinker.testing.stores import (
    Damage,
    OpenStore,
    PersistentStoreTests,
    StoreTests,
    flip_byte_in_files,
)


def damage_memory(store: MemoryStore | FolderStore, key: ObjectKey, payload: bytes) -> None:
    with suppress(KeyError):  # not every tier has it
        store.tamper(key, payload[:-1] + bytes([payload[-1] ^ 1]))


class TiersInMemory(StoreTests):
    @property
    def near_bytes(self) -> int | None:
        return 12 << 10

    @property
    def near(self) -> CapabilityChoices:
        return {}

    @property
    def far(self) -> CapabilityChoices:
        return {}

    @pytest.fixture
    def stores(self) -> list[MemoryStore]:
        return []

    @pytest.fixture
    def open_store(self, stores: list[MemoryStore]) -> OpenStore:
        def open_both() -> Store:
            near = MemoryStore(capacity_bytes=self.near_bytes, **self.near)
            far = MemoryStore(capacity_bytes=32 << 10, **self.far)
            stores[:] = near, far
            return TieredStore(near, far)

        return open_both

    @pytest.fixture
    def damage(self, stores: list[MemoryStore]) -> Damage:
        def damage_both(_store: Store, key: ObjectKey, payload: bytes) -> None:
            for store in stores:
                damage_memory(store, key, payload)

        return damage_both


class TestTiers(TiersInMemory):
    """As they are by default."""


class TestTiersOfUnlikeStores(TiersInMemory):
    """A near one without leases and limits, in front of a far one that overwrites, batch by batch."""

    @property
    def near_bytes(self) -> int | None:
        return None

    @property
    def near(self) -> CapabilityChoices:
        return {"leases": False, "whole_reads": False}

    @property
    def far(self) -> CapabilityChoices:
        return {
            "overwrite": True,
            "atomic_batches": False,
            "registers_memory": True,
            "max_object_bytes": 32 << 10,
        }


class TestTiersThatWriteBack(TiersInMemory):
    """The far one gets objects behind the answer."""

    @pytest.fixture
    def open_store(self, stores: list[MemoryStore]) -> OpenStore:
        def open_both() -> Store:
            near, far = MemoryStore(capacity_bytes=12 << 10), MemoryStore(capacity_bytes=32 << 10)
            stores[:] = near, far
            limits = WriteBackLimits(max_bytes=8 << 10, pause_seconds=0.01)
            return TieredStore(near, far, write_back=limits)

        return open_both


class TestThreeTiers(TiersInMemory):
    """The one behind is two itself."""

    @pytest.fixture
    def open_store(self, stores: list[MemoryStore]) -> OpenStore:
        def open_all() -> Store:
            stores[:] = [MemoryStore(capacity_bytes=size << 10) for size in (8, 16, 32)]
            return tiered(list(zip("abc", stores, strict=True)))

        return open_all


class TestMemoryInFrontOfAFolder(PersistentStoreTests):
    """What lies in the folder outlives the process, and what lies in memory does not."""

    plugin = tiered_folder

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"path": str(tmp_path), "capacity": 32 << 10}

    @pytest.fixture
    def stores(self) -> list[MemoryStore | FolderStore]:
        return []

    @pytest.fixture
    def open_store(
        self, config: Mapping[str, object], stores: list[MemoryStore | FolderStore]
    ) -> OpenStore:
        def open_both() -> Store:
            near, far = tiered_folder.open_both(config)
            stores[:] = near, far
            return TieredStore(near, far)

        return open_both

    @pytest.fixture
    def damage(self, tmp_path: Path, stores: list[MemoryStore | FolderStore]) -> Damage:
        def change(_store: Store, key: ObjectKey, payload: bytes) -> None:
            for store in stores:
                damage_memory(store, key, payload)
            flip_byte_in_files(tmp_path, payload)

        return change
