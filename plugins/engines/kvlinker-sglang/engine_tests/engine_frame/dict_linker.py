"""The smallest linker that is right: pages in a dictionary, moved at once and by the engine's own thread.

It proves that trees and servers of these tests move what they should, without any of the linker that is tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from engine_reads import Rows, rows_of
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)

from engine_frame.engine_types import CacheParams, Transfer

__all__ = ["DictLinker"]


class DictLinker(UnifiedCacheLinker):  # type: ignore[misc,no-any-unimported]  # the engine has no types
    """Keeps each page of each pool under its key."""

    def __init__(
        self,
        server_args: object,
        params: CacheParams,
        *,
        components: object,
        extra_config: Mapping[str, object],
        forward_stream: object,
    ) -> None:
        del server_args, components, forward_stream
        self.page_size = params.page_size
        self.pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.layer_done_counter = LayerWiseLoadCounter(self.pool.layer_num)
        names = extra_config.get("pools", (PoolName.KV, PoolName.SWA))
        assert isinstance(names, tuple)
        self.pools = dict.fromkeys(names, self)
        self.pages: dict[tuple[object, str], list[torch.Tensor]] = {}
        self.queued: dict[str, list[Transfer]] = {}
        self.completed: deque[bool] = deque()
        self.fails = bool(extra_config.get("fails"))

    def lookup(self, rid: str, transfers: Sequence[Transfer]) -> list[int]:
        """Return the boundaries up to which all pages, and the windows there, are kept."""
        del rid
        keys = transfers[0].keys
        return [
            end
            for end in range(1, len(keys) + 1)
            if all(
                (transfer.name, key) in self.pages
                for transfer in transfers
                for key in keys[self._first(transfer, end) : end]
            )
        ]

    def load(self, rid: str, transfers: Sequence[Transfer]) -> bool:
        """Queue what has to be kept."""
        self.queued[rid] = list(transfers)
        return True

    def start_layer_wise_loading(self) -> int:
        """Write all pages."""
        if not self.queued:
            return -1
        batch: int = self.layer_done_counter.update_producer()
        for transfers in self.queued.values():
            for transfer in transfers:
                self._write(transfer)
        self.queued.clear()
        for layer in range(self.layer_done_counter.num_layers):
            self.layer_done_counter.complete(batch, layer)
        return batch

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Say that all has arrived, unless this linker is told to fail."""
        return bool(self.layer_done_counter.finish(counter_index)) and not self.fails

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load."""
        return self.queued.pop(rid, None) is not None

    def offload(self, transfers: Sequence[Transfer], session_id: str | None = None) -> bool:
        """Read all pages."""
        del session_id
        for transfer in transfers:
            for key, rows in self._pages_of(transfer):
                self.pages[transfer.name, key] = [part.read() for part in rows]
        self.completed.append(True)
        return True

    def num_completed_offloads(self) -> int:
        """Count offloads."""
        return len(self.completed)

    def pop_completed_offload(self) -> bool:
        """Return that the oldest was right."""
        return self.completed.popleft()

    def reset(self) -> None:
        """Forget what is under way, and no page."""
        self.queued.clear()
        self.completed.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Forget what is under way."""
        self.reset()

    def _first(self, transfer: Transfer, end: int) -> int:
        """Return the first page that a pool needs for a boundary."""
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            return max(0, end - len(transfer.keys))
        return 0

    def _write(self, transfer: Transfer) -> None:
        for key, rows in self._pages_of(transfer):
            for part, content in zip(rows, self.pages[transfer.name, key], strict=True):
                part.write(content)

    def _pages_of(self, transfer: Transfer) -> Iterator[tuple[str, list[Rows]]]:
        """Yield each key of a transfer with the rows of its pool's buffers."""
        nothing = torch.empty(0, dtype=torch.int64)
        for key, slots in zip(
            transfer.keys, transfer.device_indices.split(self.page_size), strict=True
        ):
            is_kv = transfer.name == PoolName.KV
            kv, swa = (slots, nothing) if is_kv else (nothing, slots)
            yield key, list(rows_of(self.pool, kv, swa))
