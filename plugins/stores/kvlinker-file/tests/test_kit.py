"""The file store keeps what every persistent store promises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import kvlinker_file
from kvlinker.testing.stores import Damage, PersistentStoreTests, flip_byte_in_files


class TestFileStore(PersistentStoreTests):
    plugin = kvlinker_file

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"path": str(tmp_path / "store"), "capacity": "4MiB"}

    @pytest.fixture
    def damage(self, tmp_path: Path) -> Damage:
        return lambda _store, _key, payload: flip_byte_in_files(tmp_path, payload)
