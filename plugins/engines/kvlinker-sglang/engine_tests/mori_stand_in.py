"""A stand-in for mori's client behind SGLang's own mori linker: objects in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from sglang.srt.mem_cache.storage.umbp.umbp_direct_linker import UMBPDirectLinker
from sglang.srt.mem_cache.storage.umbp.umbp_store import UMBPStore

from kvlinker_sglang import install

__all__ = ["MoriLinker", "RangedClient"]


class _Mode(Enum):
    Local = 1
    StandaloneProcess = 2


@dataclass
class RangedClient:
    """mori's `UMBPClient`, as far as SGLang's linker uses it."""

    objects: dict[str, bytes] = field(default_factory=dict)
    registered: set[tuple[int, int]] = field(default_factory=set)
    """Address and size of each allocation."""

    def get_deployment_mode(self) -> Enum:
        """Be a client within the process."""
        return _Mode.Local

    def supports_ranged_io(self) -> bool:
        """Read and write parts of objects."""
        return True

    def register_memory(self, address: int, size: int) -> bool:
        """Allow transfers from and to an allocation."""
        self.registered.add((address, size))
        return True

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """Say which objects are there."""
        return [key in self.objects for key in keys]

    def batch_put_ranges_from_ptr(
        self,
        keys: Sequence[str],
        totals: Sequence[int],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[bool]:
        """Store objects, each of ranges that tile it."""
        for key, total, *ranges in zip(keys, totals, addresses, sizes, offsets, strict=True):
            content = bytearray(total)
            parts = sorted(zip(*ranges, strict=True), key=lambda part: part[2])
            end = 0
            for address, size, offset in parts:
                assert offset == end
                content[offset : offset + size] = self._at(address, size)
                end += size
            assert end == total
            self.objects[key] = bytes(content)
        return [True] * len(keys)

    def batch_get_ranges_into_ptr(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[bool]:
        """Copy ranges of objects to memory."""
        for key, *ranges in zip(keys, addresses, sizes, offsets, strict=True):
            for address, size, offset in zip(*ranges, strict=True):
                content = self.objects[key][offset : offset + size]
                assert len(content) == len(self._at(address, size))
                ctypes.memmove(address, content, size)
        return [True] * len(keys)

    def _at(self, address: int, size: int) -> bytes:
        assert any(
            start <= address and address + size <= start + length
            for start, length in self.registered
        )
        return ctypes.string_at(address, size)


class _Store(UMBPStore):  # type: ignore[misc, no-any-unimported]  # SGLang is untyped where it is not installed
    """SGLang's store, which names the objects, with a client that needs no mori."""

    def __init__(self, client: RangedClient) -> None:
        self.client = client
        self.config_prefix = None
        self.is_mla_backend = True

    def close(self) -> None:
        """Have nothing to close."""


class MoriLinker(UMBPDirectLinker):  # type: ignore[misc, no-any-unimported]  # SGLang is untyped where it is not installed
    """SGLang's mori linker, with the stand-in for its client as `client`."""

    def __init__(
        self,
        server_args: object,
        params: object,
        *,
        components: object,
        extra_config: object,
        forward_stream: object,
    ) -> None:
        """See `UMBPDirectLinker`."""
        install()
        self.client = RangedClient()
        super().__init__(
            server_args,
            params,
            components=components,
            extra_config=extra_config,
            _storage=_Store(self.client),
            forward_stream=forward_stream,
        )
