"""The kit on a store that has its looks, reads and writes from core, and says of its wire alone."""

from __future__ import annotations

import pytest
from framed_dictionary import DictionaryStore

from kvlinker.named_values import digits_of_key
from kvlinker.store import ObjectKey, Store
from kvlinker.testing.stores import Damage, OpenStore, StoreTests


class TestFramedStore(StoreTests):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        return DictionaryStore

    @pytest.fixture
    def damage(self) -> Damage:
        def flip(store: Store, key: ObjectKey, payload: bytes) -> None:
            assert isinstance(store, DictionaryStore)
            values, name = store.values.values, digits_of_key(key)
            at = values[name].find(payload)
            value = bytearray(values[name])
            value[at] ^= 1
            values[name] = bytes(value)

        return flip
