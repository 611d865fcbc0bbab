"""Fixtures: pools, and a file store to move their pages to and from."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvlinker_file import FileStore, FileStoreOptions

sys.path.insert(0, str(Path(__file__).parent))

from file_shelf import OpenStore, Shelf, make_key


@pytest.fixture
def key() -> Callable[..., bytes]:
    """Give `make_key`."""
    return make_key


@pytest.fixture
def shelf() -> Shelf:
    """Give pools with 32 pages of 4 KiB."""
    return Shelf()


@pytest.fixture
def make_shelf() -> type[Shelf]:
    """Give the class, for pools of other sizes."""
    return Shelf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give where the store lies."""
    return tmp_path / "store"


@pytest.fixture
def open_store(folder: Path) -> Iterator[OpenStore]:
    """Give a function that opens the store with some options; it is closed after the test."""
    opened: list[FileStore] = []

    def open_it(*, clock: Callable[[], float] | None = None, **options: object) -> FileStore:
        config = {"path": folder, "capacity": "4MiB", **options}
        checked = FileStoreOptions.of_config(config)
        store = FileStore(checked) if clock is None else FileStore(checked, clock=clock)
        opened.append(store)
        return store

    yield open_it
    for store in opened:
        store.close()
    opened.clear()
    gc.collect()


@pytest.fixture
def disk_bytes(folder: Path) -> Callable[[], int]:
    """Give a function that returns the bytes that all files of the store take on the disk."""

    def measure() -> int:
        total = 0
        for path in folder.rglob("*"):
            try:
                total += path.lstat().st_blocks * 512 if path.is_file() else 0
            except FileNotFoundError:  # a segment or a log that went meanwhile
                continue
        return total

    return measure
