"""The memory store keeps what every store promises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import kvlinker_memory
from kvlinker.testing.stores import Damage, StoreTests, flip_byte_in_files


class TestMemoryStore(StoreTests):
    plugin = kvlinker_memory

    @pytest.fixture
    def config(self, in_memory: Path) -> Mapping[str, object]:
        return {"path": str(in_memory / "store"), "capacity": "4MiB"}

    @pytest.fixture
    def damage(self, in_memory: Path) -> Damage:
        return lambda _store, _key, payload: flip_byte_in_files(in_memory, payload)
