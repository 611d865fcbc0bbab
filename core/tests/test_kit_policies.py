"""Policies around a store keep what every store promises."""

from __future__ import annotations

import pytest

from kvlinker.errors import StoreError
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.store import ObjectKey, Store
from kvlinker.stores.admitting import AdmittingStore
from kvlinker.stores.expiring import ExpiringStore
from kvlinker.stores.pinned import PinningStore
from kvlinker.stores.quota import QuotaStore
from kvlinker.stores.retrying import RetryBounds, RetryingStore
from kvlinker.testing import Call, FaultStore, MemoryStore, Raise, Rule
from kvlinker.testing.offered_twice import OfferedTwice
from kvlinker.testing.shelves import object_keys
from kvlinker.testing.stores import Damage, OpenStore, StoreTests

CAPACITY = 32 << 10


class PolicyTests(StoreTests):
    """A policy around a store in memory, which it finds by what it holds: names may be others."""

    def wrapped(self, store: Store) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def inner(self) -> list[MemoryStore]:
        return []

    @pytest.fixture
    def open_store(self, inner: list[MemoryStore]) -> OpenStore:
        def open_it() -> Store:
            inner[:] = [MemoryStore(capacity_bytes=CAPACITY)]
            return self.wrapped(inner[0])

        return open_it

    @pytest.fixture
    def damage(self, inner: list[MemoryStore]) -> Damage:
        def flip_last_bit(_store: Store, _key: ObjectKey, payload: bytes) -> None:
            names = inner[0].keys()
            (name,) = (name for name in names if inner[0].payload(name) == payload)
            inner[0].tamper(name, payload[:-1] + bytes([payload[-1] ^ 1]))

        return flip_last_bit


class TestAdmittingStore(PolicyTests):
    def wrapped(self, store: Store) -> Store:
        return OfferedTwice(AdmittingStore(store))


class TestExpiringStore(PolicyTests):
    def wrapped(self, store: Store) -> Store:
        return ExpiringStore(store, seconds=86_400)


class TestQuotaStore(PolicyTests):
    """With less than the store evicts for, so that what it evicts must be noticed."""

    def wrapped(self, store: Store) -> Store:
        return QuotaStore(store, max_bytes=CAPACITY + 4096)


class TestRetryingStore(PolicyTests):
    def wrapped(self, store: Store) -> Store:
        return RetryingStore(store)


class TestRetryingStoreAroundOneThatFails(PolicyTests):
    """Every fourth call of the store in it fails, but for what is not made again."""

    def wrapped(self, store: Store) -> Store:
        calls = (Call.EXISTS, Call.HOLD, Call.OPEN_READ, Call.READ, Call.WRITE)
        rules = [
            Rule(call=call, fault=Raise(error=StoreError("down for a moment")), every=4)
            for call in calls
        ]
        bounds = RetryBounds(
            attempts=100, first_seconds=0.0001, lookup_seconds=60, transfer_seconds=60, share=1.0
        )
        return RetryingStore(FaultStore(store, rules), bounds)


class TestPinningStore(PolicyTests):
    """Everything that the tests write is wanted, and a twelfth of what fits is pinned."""

    def wrapped(self, store: Store) -> Store:
        namespace = object_keys(1)[0][:NAMESPACE_BYTES]
        return PinningStore(store, max_bytes=CAPACITY // 12, namespaces=[namespace], uses=5)
