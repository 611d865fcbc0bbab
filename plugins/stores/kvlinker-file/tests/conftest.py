"""Pools whose pages hold what their key says, and a file store to move them to and from."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvlinker.device import DeviceAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.plans import PreparedPages, TransferPlan
from kvlinker.store import ReadRequest, ReadSession, ReadStatus, WriteBatch, WriteStatus
from kvlinker.testing import HostMemory, PoolMemory
from kvlinker_file import FileStore, FileStoreOptions

FINGERPRINT = b"a layout"
OpenStore = Callable[..., FileStore]


def make_key(number: int, namespace: int = 1) -> bytes:
    """Return the object key with a number in a namespace."""
    return bytes([namespace]) * 12 + number.to_bytes(20, "little")


class Shelf:
    """One pool of equal layers, whose pages can be filled by key, stored, and checked after a read."""

    def __init__(
        self,
        *,
        layers: int = 4,
        row_bytes: int = 1024,
        pages: int = 32,
        memory: PoolMemory | None = None,
        fingerprint: bytes = FINGERPRINT,
    ) -> None:
        """Make a pool of `pages` pages of `layers * row_bytes` bytes."""
        self.memory = memory or HostMemory()
        self.access: DeviceAccess = self.memory.access()
        self.fingerprint = fingerprint
        self.pages = pages
        self.spans = [
            self.memory.allocate(pages, row_bytes, label=f"k[{i}]") for i in range(layers)
        ]
        self.object_bytes = layers * row_bytes
        self.entry = DevicePoolEntry(
            name="kv",
            indices_from_pool="kv",
            components=[self.spans],
            layer_mapping={i: i for i in range(layers)},
            page_size=1,
            rows_are_pages=True,
        )

    # ---- pages --------------------------------------------------------------------------------

    def content(self, key: bytes, layer: int) -> bytes:
        """Return what a layer of a key's page holds."""
        seed = hashlib.blake2b(key + bytes([layer]), digest_size=32).digest()
        size = self.spans[layer].row_bytes
        return (seed * (size // len(seed) + 1))[:size]

    def fill(self, keys: Sequence[bytes], first_page: int = 0) -> None:
        """Fill pages from `first_page` on with what the keys stand for."""
        for page, key in enumerate(keys, start=first_page):
            for layer, span in enumerate(self.spans):
                self.memory.write(span, page, self.content(key, layer))

    def locate(self, count: int, first_page: int = 0) -> PreparedPages:
        """Return some pages."""
        return self.entry.prepare_locations(np.arange(first_page, first_page + count))

    def plan(self, count: int, first_page: int = 0) -> TransferPlan:
        """Return the plan of some whole pages."""
        return self.entry.page_plan(self.locate(count, first_page))

    def layer_plan(self, count: int, layer: int, first_page: int = 0) -> TransferPlan:
        """Return the plan of one layer of some pages."""
        plan = self.entry.layer_plan(self.locate(count, first_page), layer)
        assert plan is not None
        return plan

    def holds(self, page: int, key: bytes) -> bool:
        """Return whether a page holds exactly what a key stands for."""
        return all(
            self.memory.read(span, page) == self.content(key, layer)
            for layer, span in enumerate(self.spans)
        )

    # ---- the store ----------------------------------------------------------------------------

    def batch(self, keys: Sequence[bytes]) -> WriteBatch:
        """Fill pages from 0 on and return the batch that stores them."""
        self.fill(keys)
        return WriteBatch(keys=tuple(keys), plan=self.plan(len(keys)), fingerprint=self.fingerprint)

    def put(
        self, store: FileStore, keys: Sequence[bytes], *, allowed: bool = True
    ) -> tuple[WriteStatus, ...]:
        """Store the pages of some keys."""
        return store.write([self.batch(keys)], self.access, may_publish=lambda: allowed)[0]

    def request(self, keys: Sequence[bytes]) -> ReadRequest:
        """Return the request for the pages of some keys."""
        return ReadRequest(
            keys=tuple(keys), object_bytes=self.object_bytes, fingerprint=self.fingerprint
        )

    def read(
        self, session: ReadSession, keys: Sequence[bytes], *, by_layer: bool = False
    ) -> tuple[ReadStatus, ...]:
        """Read into poisoned pages, and check that exactly the pages that are OK hold the right bytes."""
        self.memory.poison()
        count = len(keys)
        statuses: tuple[ReadStatus, ...] = ()
        if by_layer:
            for layer in range(len(self.spans)):
                statuses = session.read(self.layer_plan(count, layer), self.access)
        else:
            statuses = session.read(self.plan(count), self.access)
        for page, (key, status) in enumerate(zip(keys, statuses, strict=True)):
            if status is ReadStatus.OK:
                assert self.holds(page, key)
            elif not by_layer:
                assert {self.memory.read(span, page).strip(b"\xff") for span in self.spans} == {b""}
        return statuses

    def get(
        self, store: FileStore, keys: Sequence[bytes], *, by_layer: bool = False
    ) -> tuple[ReadStatus, ...]:
        """Open a session and read."""
        with store.open_read(self.request(keys)) as session:
            return self.read(session, keys, by_layer=by_layer)


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
