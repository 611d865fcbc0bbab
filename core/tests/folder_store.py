"""A right persistent store in few lines, one file an object, that tests of the kit make wrong in one way each."""

from __future__ import annotations

import fcntl
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvlinker.device import DeviceAccess, HostAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import StoreBusyError
from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import (
    Hold,
    ObjectKey,
    ReadRequest,
    ReadSession,
    Store,
    StoreCapabilities,
    StoreStats,
    WriteBatch,
    WriteStatus,
)
from kvlinker.testing import MemoryStore

__all__ = ["FolderStore", "describe_plugin", "open_store"]


class FolderStore(Store):
    """Objects in memory, and in files that are read again when the folder is opened."""

    def __init__(self, folder: Path, *, capacity_bytes: int, wrong: str = "") -> None:
        """Open a folder; `wrong` names what it does wrong."""
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._wrong = wrong
        self._mutex = threading.Lock()
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
        self._is_open = True
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if wrong != "no lock":
                os.close(self._lock)
                msg = f"{folder} is open elsewhere"
                raise StoreBusyError(msg) from error
        keeps_all = wrong == "evicted objects come back"
        self._memory = MemoryStore(
            capacity_bytes=None if keeps_all else capacity_bytes, atomic_batches=False
        )
        self._capacity = capacity_bytes
        for path in sorted(folder.glob("*.object")):
            self._load(path)

    def _load(self, path: Path) -> None:
        content = path.read_bytes()
        fingerprint, rest = content[1 : 1 + content[0]], content[1 + content[0] :]
        checksum, payload = rest[:4], rest[4:]
        is_right = zlib.crc32(payload).to_bytes(4, "little") == checksum
        if not is_right and self._wrong not in {"no checksum", "files before permission"}:
            path.unlink()
            return
        key = bytes.fromhex(path.stem)
        buffer = np.frombuffer(payload, dtype=np.uint8).copy()  # a plan does not keep it alive
        batch = WriteBatch(keys=(key,), plan=_plan(buffer), fingerprint=fingerprint)
        self._memory.write([batch], HostAccess(), may_publish=lambda: True)

    @property
    def capabilities(self) -> StoreCapabilities:
        return replace(self._memory.capabilities, persistent=True)

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        return self._memory.exists(keys)

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        if self._wrong == "files before permission":
            for batch in batches:
                for key in batch.keys:
                    self._save(key, batch.fingerprint, bytes(batch.plan.object_bytes))
        statuses = self._memory.write(batches, memory, may_publish=may_publish)
        written = {
            key: batch.fingerprint
            for batch, answers in zip(batches, statuses, strict=True)
            for key, status in zip(batch.keys, answers, strict=True)
            if status is WriteStatus.WRITTEN and self._wrong != "nothing is saved"
        }
        self._sync(written)
        return statuses

    def _sync(self, written: Mapping[ObjectKey, bytes]) -> None:
        """Save what was written, and remove what is in memory no more, deleted or evicted."""
        with self._mutex:
            for key, fingerprint in written.items():
                with suppress(KeyError):  # another thread deleted it already
                    self._save(key, fingerprint, self._memory.payload(key))
            kept = {key.hex() for key in self._memory.keys()}  # noqa: SIM118 - a store is no mapping
            for path in self._folder.glob("*.object"):
                if path.stem not in kept:
                    path.unlink()

    def _save(self, key: ObjectKey, fingerprint: bytes, payload: bytes) -> None:
        checksum = zlib.crc32(payload).to_bytes(4, "little")
        temporary = self._folder / f"{key.hex()}.new"
        temporary.write_bytes(bytes([len(fingerprint)]) + fingerprint + checksum + payload)
        temporary.rename(self._folder / f"{key.hex()}.object")

    def open_read(self, request: ReadRequest) -> ReadSession:
        return self._memory.open_read(request)

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        return self._memory.hold(keys, seconds=seconds)

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        removed = self._memory.delete(keys)
        self._sync({})
        return removed

    def clear(self, namespace: bytes) -> int:
        removed = self._memory.clear(namespace)
        self._sync({})
        return removed

    def stats(self) -> StoreStats:
        return replace(self._memory.stats(), capacity_bytes=self._capacity)

    def tamper(self, key: ObjectKey, payload: bytes) -> None:
        """Change an object in memory; see MemoryStore."""
        self._memory.tamper(key, payload)

    def close(self) -> None:
        if self._wrong != "old handles":
            self._memory.close()
        if self._is_open:
            self._is_open = False
            os.close(self._lock)


def _plan(buffer: NDArray[np.uint8]) -> TransferPlan:
    """Return the plan of a buffer that is one page."""
    address, size = buffer.ctypes.data, len(buffer)
    span = BufferSpan(base_ptr=address, rows=1, row_bytes=size, row_stride=size)
    entry = DevicePoolEntry(
        name="kv",
        indices_from_pool="kv",
        components=[[span]],
        layer_mapping={0: 0},
        page_size=1,
        rows_are_pages=True,
    )
    return entry.page_plan(entry.prepare_locations([0]))


@hookimpl
def describe_plugin() -> PluginInfo:
    return PluginInfo(api_version=1, summary="objects in files, for tests of the kit")


@hookimpl
def open_store(config: Mapping[str, object]) -> Store:
    capacity = config["capacity"]
    assert isinstance(capacity, int)
    return FolderStore(
        Path(str(config["path"])), capacity_bytes=capacity, wrong=str(config.get("wrong", ""))
    )
