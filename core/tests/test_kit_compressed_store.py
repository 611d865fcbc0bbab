"""A compressed store keeps what every store promises, whatever the store in it is."""

from __future__ import annotations

import pytest

from kvlinker.store import Integrity, ObjectKey, Store
from kvlinker.stores.compressed import CompressedStore
from kvlinker.stores.encrypted import EncryptedStore
from kvlinker.testing import CapabilityChoices, MemoryStore
from kvlinker.testing.stores import Damage, OpenStore, StoreTests


class CompressedStoreTests(StoreTests):
    @property
    def choices(self) -> CapabilityChoices:
        return {}

    def wrap(self, store: Store) -> Store:
        return CompressedStore(store)

    @pytest.fixture
    def inner(self) -> list[MemoryStore]:
        return []

    @pytest.fixture
    def open_store(self, inner: list[MemoryStore]) -> OpenStore:
        def open_compressed() -> Store:
            inner[:] = [MemoryStore(capacity_bytes=64 << 10, **self.choices)]
            return self.wrap(inner[0])

        return open_compressed

    @pytest.fixture
    def damage(self, inner: list[MemoryStore]) -> Damage:
        def flip_a_bit(_store: Store, key: ObjectKey, _payload: bytes) -> None:
            stream = inner[0].payload(key)
            inner[0].tamper(key, stream[:40] + bytes([stream[40] ^ 1]) + stream[41:])

        return flip_a_bit


class TestCompressedStore(CompressedStoreTests):
    """As it is by default."""


class TestCompressedStoreOfAnUnlikeOne(CompressedStoreTests):
    """The store in it tells lengths alone, reads whole objects alone, overwrites, and has no leases."""

    @property
    def choices(self) -> CapabilityChoices:
        return {
            "integrity": Integrity.LENGTH,
            "ranged_reads": False,
            "overwrite": True,
            "atomic_batches": False,
            "leases": False,
            "max_object_bytes": 50 << 10,
        }


class TestCompressedAndEncryptedStore(CompressedStoreTests):
    """Streams are sealed, and what a bad disk changes is noticed by that."""

    @property
    def choices(self) -> CapabilityChoices:
        return {"integrity": Integrity.LENGTH}

    def wrap(self, store: Store) -> Store:
        return CompressedStore(EncryptedStore(store, bytes(range(32))))
