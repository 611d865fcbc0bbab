"""A small persistent store passes the kit: what the kit asks of one can be kept in few lines."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import folder_store
import pytest

from kvlinker.store import ObjectKey, Store
from kvlinker.testing.stores import Damage, PersistentStoreTests, flip_byte_in_files


class TestFolderStore(PersistentStoreTests):
    plugin = folder_store

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"path": str(tmp_path), "capacity": 32 << 10}

    @pytest.fixture
    def damage(self, tmp_path: Path) -> Damage:
        def change(store: Store, key: ObjectKey, payload: bytes) -> None:
            assert isinstance(store, folder_store.FolderStore)
            with suppress(KeyError):  # what is closed lies in files alone
                store.tamper(key, payload[:-1] + bytes([payload[-1] ^ 1]))
            flip_byte_in_files(tmp_path, payload)

        return change
