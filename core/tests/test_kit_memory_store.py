"""The memory store keeps what every store promises, with and without each capability."""

from __future__ import annotations

import pytest

from kvlinker.store import Integrity, ObjectKey, Store
from kvlinker.testing import CapabilityChoices, MemoryStore
from kvlinker.testing.stores import Damage, OpenStore, StoreTests


class MemoryStoreTests(StoreTests):
    @property
    def choices(self) -> CapabilityChoices:
        return {}

    @property
    def capacity_bytes(self) -> int | None:
        return 32 << 10

    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda: MemoryStore(capacity_bytes=self.capacity_bytes, **self.choices)

    @pytest.fixture
    def damage(self) -> Damage:
        def flip_last_bit(store: Store, key: ObjectKey, payload: bytes) -> None:
            assert isinstance(store, MemoryStore)
            store.tamper(key, payload[:-1] + bytes([payload[-1] ^ 1]))

        return flip_last_bit


class TestMemoryStore(MemoryStoreTests):
    """As it is by default."""


class TestPlainStore(MemoryStoreTests):
    """Whole objects alone, one by one, without leases or checksums."""

    @property
    def choices(self) -> CapabilityChoices:
        return {
            "ranged_reads": False,
            "atomic_batches": False,
            "leases": False,
            "integrity": Integrity.LENGTH,
            "max_object_bytes": 32 << 10,
        }


class TestRangedStore(MemoryStoreTests):
    """Ranges alone, new objects in the place of old ones, registered memory, no limit."""

    capacity_bytes = None

    @property
    def choices(self) -> CapabilityChoices:
        return {"whole_reads": False, "overwrite": True, "registers_memory": True}
