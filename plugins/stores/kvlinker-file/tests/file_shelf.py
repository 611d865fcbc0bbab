"""Pools whose pages hold what their key says, to be moved to and from a store and checked byte by byte."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from kvlinker.device import DeviceAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.moving import current_mover
from kvlinker.plans import PreparedPages, TransferPlan
from kvlinker.store import ReadRequest, ReadSession, ReadStatus, Store, WriteBatch, WriteStatus
from kvlinker.testing import HostMemory, PoolMemory
from kvlinker_file import FileStore

__all__ = ["CHECKED_BEFORE", "OpenStore", "Shelf", "make_key"]

CHECKED_BEFORE = 7
"""Up to so many objects are checked before a byte is copied, without a mover; others are checked as they are copied."""

OpenStore: TypeAlias = Callable[..., FileStore]
"""What the fixture `open_store` gives: options as keywords."""
FINGERPRINT = b"a layout"


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
        self, store: Store, keys: Sequence[bytes], *, allowed: bool = True
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
        """Read into poisoned pages, and check that those that are OK hold the right bytes, and few others any."""
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
            elif not by_layer and count <= CHECKED_BEFORE and current_mover() is None:
                assert {self.memory.read(span, page).strip(b"\xff") for span in self.spans} == {b""}
        return statuses

    def get(
        self, store: Store, keys: Sequence[bytes], *, by_layer: bool = False
    ) -> tuple[ReadStatus, ...]:
        """Open a session and read."""
        with store.open_read(self.request(keys)) as session:
            return self.read(session, keys, by_layer=by_layer)
