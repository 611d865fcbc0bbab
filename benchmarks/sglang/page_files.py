"""A linker as people write them: one file for each page. It is a peer, and does no more than it must.

It copies whole pages, reads and writes in threads of its own, and publishes a file by renaming it. It checks
nothing that it reads, evicts nothing, and knows plain multi-head attention alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from kvlinker_sglang.transfers import EngineTransfer

if TYPE_CHECKING:
    import torch

__all__ = ["FILES", "PageFilesLinker"]


class PageFiles(ABC):
    """Pages on a disk, a file each."""

    @abstractmethod
    def has(self, key: str) -> bool:
        """Say whether a page is stored."""

    @abstractmethod
    def put(self, key: str, page: torch.Tensor) -> None:
        """Store a page."""

    @abstractmethod
    def get(self, key: str, like: torch.Tensor) -> torch.Tensor:
        """Return a stored page; `like` has its shape, and may be read into.

        Raises:
            OSError: it cannot be read.
        """


class TorchFiles(PageFiles):
    """Files of `torch.save`, mapped by `torch.load`: the faster of its ways."""

    def __init__(self, folder: Path) -> None:
        """Keep files in the folder."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, key: str) -> bool:
        """See PageFiles."""
        return self._path(key).exists()

    def put(self, key: str, page: torch.Tensor) -> None:
        """See PageFiles."""
        import torch

        path = self._path(key)
        part = path.with_suffix(".part")
        torch.save(page, part)
        part.replace(path)

    def get(self, key: str, like: torch.Tensor) -> torch.Tensor:
        """See PageFiles."""
        import torch

        del like
        page: torch.Tensor = torch.load(self._path(key), weights_only=True, mmap=True)
        return page

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.pt"


class _Backend(Protocol):
    """What is used of SGLang's HiCacheFile."""

    def exists(self, key: str) -> bool: ...
    def set(self, key: str, value: torch.Tensor) -> bool: ...
    def get(self, key: str, target_location: torch.Tensor) -> torch.Tensor | None: ...


class HiCacheFiles(PageFiles):
    """Files of the storage backend `file` of SGLang's hierarchical cache: its class, as it is."""

    def __init__(self, folder: Path) -> None:
        """Keep files in the folder."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="model",
        )
        self._backend: _Backend = HiCacheFile(config, str(folder))

    def has(self, key: str) -> bool:
        """See PageFiles."""
        return self._backend.exists(key)

    def put(self, key: str, page: torch.Tensor) -> None:
        """See PageFiles."""
        if not self._backend.set(key, page):
            msg = f"HiCacheFile did not store page {key}"
            raise OSError(msg)

    def get(self, key: str, like: torch.Tensor) -> torch.Tensor:
        """See PageFiles."""
        page = self._backend.get(key, like)
        if page is None:
            msg = f"HiCacheFile does not have page {key}"
            raise OSError(msg)
        return page


FILES: Mapping[str, Callable[[Path], PageFiles]] = MappingProxyType(
    {"hicache": HiCacheFiles, "torch": TorchFiles}
)
"""Every kind of files, by the name that an option has for it."""


class _Pool(Protocol):
    """SGLang's pool of multi-head attention."""

    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]


class _Allocator(Protocol):
    def get_kvcache(self) -> _Pool: ...


class Parameters(Protocol):
    """SGLang's `CacheInitParams`, as far as it is read here."""

    page_size: int
    token_to_kv_pool_allocator: _Allocator


class _Counter(Protocol):
    """SGLang's `LayerWiseLoadCounter`."""

    def update_producer(self) -> int: ...
    def complete(self, index: int, layer: int) -> None: ...
    def fail(self, index: int, error: BaseException) -> None: ...
    def finish(self, index: int) -> bool: ...
    def set_consumer(self, index: int) -> None: ...
    def wait_until(self, threshold: int) -> None: ...
    def reset(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages that move: the key and the first slot of each."""

    keys: Sequence[str]
    first_slots: Sequence[int]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return zip(self.keys, self.first_slots, strict=True)


class PageFilesLinker:
    """Moves pages between a pool and files, a page at a time."""

    def __init__(self, parameters: Parameters, files: PageFiles) -> None:
        """Link the pool of a worker."""
        import torch
        from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

        pool = parameters.token_to_kv_pool_allocator.get_kvcache()
        self._files = files
        self._page_size = parameters.page_size
        self._layers = len(pool.k_buffer)
        self._buffers = [*pool.k_buffer, *pool.v_buffer]
        self._incoming = torch.stack(self._rows(0))
        self._counter: _Counter = LayerWiseLoadCounter(self._layers)
        self.layer_done_counter = self._counter
        self._queued: dict[str, _Pages] = {}
        self._offloads: deque[Future[bool]] = deque()
        self._reader = ThreadPoolExecutor(1)
        self._writer = ThreadPoolExecutor(1)

    # ---- loads --------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[EngineTransfer]) -> list[int]:
        """Return the lengths of the stored prefix, in pages."""
        del rid
        stored = sum(1 for _ in takewhile(self._files.has, _of_kv(transfers).keys or ()))
        return list(range(1, stored + 1))

    def load(self, rid: str, transfers: list[EngineTransfer]) -> bool:
        """Queue a load."""
        self._queued[rid] = self._pages(transfers)
        return True

    def start_layer_wise_loading(self) -> int:
        """Begin to load what is queued; a file has all layers of a page, so that all of them end together."""
        if not self._queued:
            return -1
        index = self._counter.update_producer()
        queued, self._queued = list(self._queued.values()), {}
        self._reader.submit(self._read, index, queued)
        return index

    def _read(self, index: int, queued: Sequence[_Pages]) -> None:
        try:
            for pages in queued:
                for key, slot in pages:
                    page = self._files.get(key, self._incoming)
                    for rows, layer in zip(self._rows(slot), page, strict=True):
                        rows.copy_(layer)
        except Exception as error:  # noqa: BLE001  # whatever it is, the requests fail
            self._counter.fail(index, error)
            return
        for layer in range(self._layers):
            self._counter.complete(index, layer)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait for a batch."""
        return self._counter.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        """Take back a load that has not begun."""
        return self._queued.pop(rid, None) is not None

    # ---- offloads -----------------------------------------------------------------------------

    def offload(self, transfers: list[EngineTransfer], session_id: str | None = None) -> bool:
        """Store pages that are not stored yet, in the background: the engine keeps them meanwhile."""
        del session_id
        self._offloads.append(self._writer.submit(self._write, self._pages(transfers)))
        return True

    def _write(self, pages: _Pages) -> bool:
        import torch

        for key, slot in pages:
            if not self._files.has(key):
                self._files.put(key, torch.stack(self._rows(slot)))
        return True

    def num_completed_offloads(self) -> int:
        """Return how many offers have ended, in their order."""
        return sum(1 for _ in takewhile(Future.done, tuple(self._offloads)))

    def pop_completed_offload(self) -> bool:
        """Take the oldest one."""
        return self._offloads.popleft().result()

    # ---- life cycle ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Wait for everything under way and forget it."""
        self._queued.clear()
        for offload in self._offloads:
            offload.exception()
        self._offloads.clear()
        self._reader.submit(int).result()
        self._counter.reset()

    def close(self) -> None:
        """End."""
        self._reader.shutdown()
        self._writer.shutdown()

    def _rows(self, slot: int) -> list[torch.Tensor]:
        """Return a page's rows in every buffer; its slots lie side by side."""
        return [buffer[slot : slot + self._page_size] for buffer in self._buffers]

    def _pages(self, transfers: list[EngineTransfer]) -> _Pages:
        import torch

        transfer = _of_kv(transfers)
        slots = transfer.device_indices
        if not isinstance(slots, torch.Tensor):
            msg = f"the pages of {len(transfer.keys or ())} keys have no slots"
            raise TypeError(msg)
        return _Pages(transfer.keys or (), slots[:: self._page_size].tolist())


def _of_kv(transfers: list[EngineTransfer]) -> EngineTransfer:
    """Return the only transfer that plain multi-head attention has."""
    (transfer,) = transfers
    return transfer
