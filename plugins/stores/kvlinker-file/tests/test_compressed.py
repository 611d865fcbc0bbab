"""Compressed files keep what every persistent store promises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import wrapped_files

from kvlinker.store import ObjectKey, Store
from kvlinker.testing.stores import Damage, PersistentStoreTests, flip_byte_in_files


class TestCompressedFiles(PersistentStoreTests):
    plugin = wrapped_files

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"wrapper": "compressed", "path": str(tmp_path / "store")}

    @pytest.fixture
    def damage(self, tmp_path: Path) -> Damage:
        def change(_store: Store, _key: ObjectKey, payload: bytes) -> None:
            flip_byte_in_files(tmp_path, payload)  # which is random, and so kept as it is

        return change
