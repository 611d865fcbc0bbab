"""Memory in front of files keeps what every persistent store promises, for all processes that share both."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import tiered_files
import wrapped_files
from file_shelf import Shelf, make_key

from kvlinker.errors import StoreClosedError
from kvlinker.store import ObjectKey, ReadStatus, Store
from kvlinker.stores.tiered import TieredStore
from kvlinker.testing.stores import Damage, PersistentStoreTests, flip_byte_in_files

OK = ReadStatus.OK


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Mapping[str, object]]:
    near = Path(tempfile.mkdtemp(prefix="kvlinker-test-", dir="/dev/shm"))  # the place under test
    yield {"near": str(near / "store"), "far": str(tmp_path / "store")}
    shutil.rmtree(near)


class TestMemoryInFrontOfFiles(PersistentStoreTests):
    plugin = tiered_files

    @pytest.fixture
    def config(self, config: Mapping[str, object]) -> Mapping[str, object]:
        return config

    @pytest.fixture
    def damage(self, config: Mapping[str, object]) -> Damage:
        def damage_both(_store: Store, _key: ObjectKey, payload: bytes) -> None:
            flip_byte_in_files(Path(str(config["far"])), payload)
            if any(Path(str(config["near"])).glob("segments/*")):  # a closed one is empty
                flip_byte_in_files(Path(str(config["near"])), payload)

        return damage_both


class TestFilesThatAreWrittenBack(PersistentStoreTests):
    """What is not far yet when a process is killed is near, in files too."""

    plugin = wrapped_files

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"wrapper": "written back", "path": str(tmp_path)}

    @pytest.fixture
    def damage(self, tmp_path: Path) -> Damage:
        def damage_both(store: Store, _key: ObjectKey, payload: bytes) -> None:
            assert isinstance(store, TieredStore)
            with suppress(StoreClosedError):
                assert store.flush(60)
            for name in ("near", "far"):
                flip_byte_in_files(tmp_path / name, payload)

        return damage_both


def test_a_restart_finds_everything_far_and_brings_it_near(config: Mapping[str, object]) -> None:
    before = tiered_files.open_store(config)
    shelf, keys = Shelf(), [make_key(i) for i in range(8)]
    shelf.put(before, keys)
    before.close()

    store = tiered_files.open_store(config)
    assert isinstance(store, TieredStore)
    first = shelf.get(store, keys)
    assert store.wait_for_promotions(60)
    second = shelf.get(store, keys)

    counters = store.stats().counters
    assert first == second == (OK,) * 8
    assert (counters["file_hits"], counters["memory_hits"], counters["promoted"]) == (8, 8, 8)
    store.close()
