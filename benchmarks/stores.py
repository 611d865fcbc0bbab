"""Other projects' stores of pages on a local disk, each asked to keep and to return whole pages.

A store hands out the host memory that it takes pages from and gives them back in; getting pages there and
back from pools is left to whoever uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from peers import LMCACHE, SGLANG

from kvlinker.device import HostObjects
from kvlinker.spans import BufferSpan, MemoryRegion

if TYPE_CHECKING:
    import torch

__all__ = ["HiCacheFiles", "LMCacheDisk", "PageStore", "TorchFiles", "slots_of"]


class PageStore(ABC):
    """Whole pages on a disk, one call for many."""

    name: str
    """As the table shows it."""

    @abstractmethod
    def pieces(self, count: int, size: int) -> list[torch.Tensor]:
        """Return host memory that the store takes pages from: `count` tensors, uint8 [size]."""

    @abstractmethod
    def put(self, keys: Sequence[str], pieces: Sequence[torch.Tensor]) -> None:
        """Store pages, and return when all of them can be read."""

    @abstractmethod
    def get(self, keys: Sequence[str]) -> list[torch.Tensor]:
        """Return stored pages: one tensor a key, uint8 [size]; `release` takes them back."""

    def release(self) -> None:  # noqa: B027  # most keep nothing back
        """Take back what the last `get` returned."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Remove pages, so that they can be stored anew."""

    def close(self) -> None:  # noqa: B027  # most have nothing to stop
        """Stop."""


def slots_of(pieces: Sequence[torch.Tensor]) -> HostObjects:
    """Return pages in host memory as slots of one span, which keeps them; they lie at equal distances, in any order.

    Raises:
        RuntimeError: they do not.
    """
    size = pieces[0].numel()
    starts = np.array([piece.data_ptr() for piece in pieces], dtype=np.int64)
    base = int(starts.min())
    steps = np.diff(np.sort(starts))
    stride = int(steps.min()) if len(steps) else size
    if stride < size or ((starts - base) % stride).any():
        msg = f"pages of {size} B do not lie at equal distances"
        raise RuntimeError(msg)
    slots = (starts - base) // stride
    rows = int(slots.max()) + 1
    region = MemoryRegion(base_ptr=base, size_bytes=(rows - 1) * stride + size, owner=tuple(pieces))
    span = BufferSpan(
        base_ptr=base,
        rows=rows,
        row_bytes=size,
        row_stride=stride,
        region=region,
        label="pieces",
    )
    return HostObjects(span=span, slots=slots)


def _one_block(count: int, size: int) -> list[torch.Tensor]:
    import torch

    return list(torch.zeros((count, size), dtype=torch.uint8))


class TorchFiles(PageStore):
    """One file for each page, written by `torch.save` and read by `torch.load`."""

    name = "torch.save, a file a page"

    def __init__(self, folder: Path) -> None:
        """Keep files in the folder."""
        self._folder = folder
        folder.mkdir()

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.pt"

    def pieces(self, count: int, size: int) -> list[torch.Tensor]:
        """See PageStore."""
        return _one_block(count, size)

    def put(self, keys: Sequence[str], pieces: Sequence[torch.Tensor]) -> None:
        """See PageStore."""
        import torch

        for key, piece in zip(keys, pieces, strict=True):
            torch.save(piece.clone(), self._path(key))  # a view would be saved with all pages

    def get(self, keys: Sequence[str]) -> list[torch.Tensor]:
        """See PageStore; the pages are copied into one block, so that they can be scattered from it."""
        import torch

        loaded = [torch.load(self._path(key), weights_only=True) for key in keys]
        return list(torch.stack(loaded))

    def remove(self, keys: Sequence[str]) -> None:
        """See PageStore."""
        for key in keys:
            self._path(key).unlink()


class _FileBackend(Protocol):
    """What is used of SGLang's HiCacheFile."""

    def batch_set(self, keys: list[str], values: list[torch.Tensor]) -> bool:
        """Store pages."""
        ...

    def batch_get(
        self, keys: list[str], target_locations: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Read pages into the given tensors."""
        ...

    def clear(self) -> bool:
        """Remove everything."""
        ...

    def batch_exists_v2(self, keys: list[str], pool_transfers: list[object]) -> object:
        """Return which prefixes can be restored."""
        ...


class HiCacheFiles(PageStore):
    """SGLang's own file backend of its hierarchical cache."""

    name = f"{SGLANG.name} HiCacheFile"

    def __init__(self, folder: Path) -> None:
        """Keep files in the folder.

        Raises:
            PeerUnavailableError: the class cannot be had.
        """
        _stand_in_for_sglang_utils()
        module = SGLANG.load("srt.mem_cache.hicache_storage")
        config = module.HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=True,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="model",
        )
        self._transfer: Callable[..., object] = module.PoolTransfer
        self._backend: _FileBackend = module.HiCacheFile(config, str(folder))
        self._block: list[torch.Tensor] = []

    def pieces(self, count: int, size: int) -> list[torch.Tensor]:
        """See PageStore; the store reads into the same kind of memory."""
        self._block = _one_block(count, size)
        return _one_block(count, size)

    def put(self, keys: Sequence[str], pieces: Sequence[torch.Tensor]) -> None:
        """See PageStore."""
        if not self._backend.batch_set(list(keys), list(pieces)):
            msg = f"{self.name} did not store every page"
            raise RuntimeError(msg)

    def get(self, keys: Sequence[str]) -> list[torch.Tensor]:
        """See PageStore."""
        found = self._backend.batch_get(list(keys), self._block[: len(keys)])
        if any(piece is None for piece in found):
            msg = f"{self.name} did not return every page"
            raise RuntimeError(msg)
        return self._block

    def remove(self, keys: Sequence[str]) -> None:
        """See PageStore; everything goes."""
        del keys
        self._backend.clear()

    def look_up(self, keys: Sequence[str], pools: Sequence[str]) -> object:
        """Return what the store says of a prefix of pages, each with an object in further pools."""
        transfers = [self._transfer(name=pool) for pool in pools]
        return self._backend.batch_exists_v2(list(keys), transfers)


def _stand_in_for_sglang_utils() -> None:
    """Stand in for a module that imports a GPU stack, of which the backend uses one function, to read sizes."""
    package, module = (types.ModuleType(f"sglang.srt.utils{end}") for end in ("", ".common"))
    package.__path__ = []
    vars(module)["human_readable_int"] = int
    for made in (package, module):
        sys.modules.setdefault(made.__name__, made)


class _MemoryObject(Protocol):
    """What is used of LMCache's host memory."""

    @property
    def tensor(self) -> torch.Tensor | None:
        """The memory as a tensor."""
        ...

    def ref_count_down(self) -> None:
        """Let go of it."""
        ...


class _DiskBackend(Protocol):
    """What is used of LMCache's LocalDiskBackend."""

    def batched_submit_put_task(
        self,
        keys: list[object],
        memory_objs: list[_MemoryObject],
        *,
        on_complete_callback: Callable[[object], None],
    ) -> None:
        """Store pages in the background."""
        ...

    def batched_get_blocking(self, keys: list[object]) -> list[_MemoryObject | None]:
        """Read pages into memory of the backend's own."""
        ...

    def remove(self, key: object) -> bool:
        """Remove a page."""
        ...

    def close(self) -> None:
        """Stop."""
        ...


class _Allocator(Protocol):
    """What is used of LMCache's LocalCPUBackend."""

    def allocate(self, shapes: object, dtypes: object, fmt: object) -> _MemoryObject | None:
        """Return host memory."""
        ...


class LMCacheDisk(PageStore):
    """LMCache's local disk backend, with its own host memory and its four threads."""

    name = f"{LMCACHE.name} local disk"

    def __init__(self, folder: Path, *, host_bytes: int) -> None:
        """Keep files in the folder.

        Args:
            folder: where.
            host_bytes: memory that pages pass through: what is stored and what is read at a time.

        Raises:
            PeerUnavailableError: the classes cannot be had.
        """
        logging.disable(logging.WARNING)  # a line a page would be timed with it
        storage = "v1.storage_backend"
        disk = LMCACHE.load(f"{storage}.local_disk_backend")
        cpu = LMCACHE.load(f"{storage}.local_cpu_backend")
        allocator = LMCACHE.load("v1.memory_allocators.mixed_memory_allocator")
        config = LMCACHE.load("v1.config").LMCacheEngineConfig.from_defaults(
            local_cpu=False, local_disk=str(folder), max_local_disk_size=8.0
        )
        self._key: Callable[..., object] = LMCACHE.load("utils").CacheEngineKey
        self._format: object = LMCACHE.load("v1.memory_management").MemoryFormat.KV_2LTD
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        memory = allocator.MixedMemoryAllocator(host_bytes)
        host = cpu.LocalCPUBackend(config, memory_allocator=memory, dst_device="cpu")
        self._allocator: _Allocator = host
        self._disk: _DiskBackend = disk.LocalDiskBackend(config, self._loop, host, dst_device="cpu")
        self._pieces: list[_MemoryObject] = []
        self._read: list[_MemoryObject] = []

    def _keys(self, keys: Sequence[str]) -> list[object]:
        import torch

        return [self._key("model", 1, 0, int(key), torch.uint8) for key in keys]

    def pieces(self, count: int, size: int) -> list[torch.Tensor]:
        """See PageStore."""
        import torch

        shape = torch.Size([size])
        made = [self._allocator.allocate(shape, torch.uint8, self._format) for _ in range(count)]
        self._pieces = [piece for piece in made if piece is not None]
        return _tensors(self._pieces, count)

    def put(self, keys: Sequence[str], pieces: Sequence[torch.Tensor]) -> None:
        """See PageStore; the pages are those of `pieces`."""
        left = len(pieces)
        lock, done = threading.Lock(), threading.Event()

        def count_down(key: object) -> None:
            del key
            nonlocal left
            with lock:
                left -= 1
                if not left:
                    done.set()

        self._disk.batched_submit_put_task(
            self._keys(keys), self._pieces, on_complete_callback=count_down
        )
        if not done.wait(timeout=60):
            msg = f"{self.name} did not store every page within a minute"
            raise RuntimeError(msg)

    def get(self, keys: Sequence[str]) -> list[torch.Tensor]:
        """See PageStore."""
        found = self._disk.batched_get_blocking(self._keys(keys))
        self._read = [piece for piece in found if piece is not None]
        return _tensors(self._read, len(keys))

    def release(self) -> None:
        """See PageStore."""
        for piece in self._read:
            piece.ref_count_down()
        self._read = []

    def remove(self, keys: Sequence[str]) -> None:
        """See PageStore."""
        for key in self._keys(keys):
            self._disk.remove(key)

    def close(self) -> None:
        """See PageStore."""
        with contextlib.suppress(RuntimeError):
            self._disk.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


def _tensors(pieces: Sequence[_MemoryObject], count: int) -> list[torch.Tensor]:
    """Return the memory of all pieces.

    Raises:
        RuntimeError: some are missing.
    """
    tensors = [piece.tensor for piece in pieces]
    found = [tensor for tensor in tensors if tensor is not None]
    if len(found) != count:
        msg = f"{len(found)} of {count} pages are there; LMCache needs more host memory"
        raise RuntimeError(msg)
    return found
