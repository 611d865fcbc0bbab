"""A stand-in for Mooncake's client, for SGLang's own store and linker: objects in memory, and what was read."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import pytest

__all__ = ["CONFIG", "RecordingClient", "install_client"]

CONFIG = {"master_server_address": "127.0.0.1:1", "metadata_server": "P2PHANDSHAKE"}
"""Options of SGLang's Mooncake store: an address that nobody asks."""


@dataclass
class RecordingClient:
    """Mooncake's `MooncakeDistributedStore`, as far as SGLang's linker uses it."""

    objects: dict[str, bytes] = field(default_factory=dict)
    read: list[tuple[str, int, int]] = field(default_factory=list)
    """Key, offset and size of each range that was read, in order."""
    registered: set[tuple[int, int]] = field(default_factory=set)
    """Address and size of each allocation."""
    open_sessions: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self) -> RecordingClient:
        """Be the class of itself: every store of a test has this client."""
        return self

    def setup(self, *arguments: object) -> int:
        """Connect to nothing."""
        del arguments
        return 0

    def put(self, key: str, value: bytes) -> int:
        """Keep what SGLang warms up with apart from its pages."""
        self.warm = {key: value}
        return 0

    def get(self, key: str) -> bytes:
        """Return it."""
        return self.warm[key]

    def is_exist(self, key: str) -> int:
        """Say whether it is there."""
        return int(key in self.warm)

    def register_buffer(self, address: int, size: int) -> int:
        """Allow transfers from and to an allocation."""
        self.registered.add((address, size))
        return 0

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Say which objects are there."""
        return [int(key in self.objects) for key in keys]

    def batch_put_from(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Store objects of one range each."""
        lists = [[address] for address in addresses], [[size] for size in sizes]
        return self.batch_put_from_multi_buffers(keys, *lists, None)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        config: object,
    ) -> list[int]:
        """Store objects, each of its ranges one after the other."""
        del config
        for key, starts, lengths in zip(keys, addresses, sizes, strict=True):
            ranges = list(zip(starts, lengths, strict=True))
            for start, length in ranges:
                self._require_registered(start, length)
            self.objects[key] = b"".join(ctypes.string_at(*part) for part in ranges)
        return [0] * len(keys)

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Hold objects until the session's end."""
        assert all(key in self.objects for key in keys)
        self.open_sessions.append(tuple(keys))
        return [0] * len(keys)

    def batch_get_session_end(self, keys: Sequence[str]) -> None:
        """Let go of them."""
        self.open_sessions.remove(tuple(keys))

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Copy ranges of objects to memory, and return the bytes of each object that were."""
        for key, *ranges in zip(keys, addresses, sizes, offsets, strict=True):
            for start, length, offset in zip(*ranges, strict=True):
                self._require_registered(start, length)
                content = self.objects[key][offset : offset + length]
                assert len(content) == length
                ctypes.memmove(start, content, length)
                self.read.append((key, offset, length))
        return [sum(lengths) for lengths in sizes]

    def _require_registered(self, start: int, length: int) -> None:
        assert any(
            address <= start and start + length <= address + size
            for address, size in self.registered
        )


class ReplicateConfig:
    """Mooncake's."""


def install_client(monkeypatch: pytest.MonkeyPatch) -> RecordingClient:
    """Let `import mooncake` find the stand-in alone until the test ends, and return its client."""
    client = RecordingClient()
    package, module = ModuleType("mooncake"), ModuleType("mooncake.store")
    vars(module).update(MooncakeDistributedStore=client, ReplicateConfig=ReplicateConfig)
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    return client
