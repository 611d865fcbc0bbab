"""An encrypted store keeps what every store promises, and notices more than the store in it."""

from __future__ import annotations

import pytest

from kvlinker.store import Integrity, ObjectKey, Store
from kvlinker.stores.encrypted import EncryptedStore
from kvlinker.testing import CapabilityChoices, MemoryStore
from kvlinker.testing.stores import Damage, OpenStore, StoreTests


class EncryptedStoreTests(StoreTests):
    @property
    def choices(self) -> CapabilityChoices:
        return {}

    @pytest.fixture
    def inner(self) -> list[MemoryStore]:
        return []

    @pytest.fixture
    def open_store(self, inner: list[MemoryStore]) -> OpenStore:
        def open_encrypted() -> Store:
            inner[:] = [MemoryStore(capacity_bytes=64 << 10, **self.choices)]
            return EncryptedStore(inner[0], bytes(range(32)))

        return open_encrypted

    @pytest.fixture
    def damage(self, inner: list[MemoryStore]) -> Damage:
        def flip_last_bit(_store: Store, key: ObjectKey, _payload: bytes) -> None:
            sealed = inner[0].payload(key)
            inner[0].tamper(key, sealed[:-1] + bytes([sealed[-1] ^ 1]))

        return flip_last_bit


class TestEncryptedStore(EncryptedStoreTests):
    """As it is by default: the store in it finds what is damaged."""


class TestEncryptedStoreThatFindsDamageItself(EncryptedStoreTests):
    """The store in it tells lengths alone, reads whole objects alone, and has no leases."""

    @property
    def choices(self) -> CapabilityChoices:
        return {
            "integrity": Integrity.LENGTH,
            "ranged_reads": False,
            "leases": False,
            "max_object_bytes": 50 << 10,
        }
