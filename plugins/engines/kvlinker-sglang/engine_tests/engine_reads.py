"""Reads pools as SGLang does: by slots, through the pools' own buffers, without any description of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MHATokenToKVPoolMXFP8,
    MiniMaxSparseKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.minimax_m3_nvfp4_pool import MiniMaxM3Nvfp4KVPool
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

__all__ = ["Rows", "contents", "fill_at_random", "overwrite", "rows_of", "state_rows"]


@dataclass(frozen=True)
class Rows:
    """Some rows of one of a pool's buffers: what holds the bytes of some slots."""

    buffer: torch.Tensor
    numbers: torch.Tensor

    def read(self) -> torch.Tensor:
        """Return their bytes: uint8 [rows, bytes]."""
        return _bytes(self.buffer)[self.numbers]

    def write(self, content: torch.Tensor) -> None:
        """Write their bytes: uint8 [rows, bytes]."""
        _bytes(self.buffer)[self.numbers] = content

    def read_others(self) -> torch.Tensor:
        """Return the bytes of all other rows of the buffer."""
        others = torch.ones(len(self.buffer), dtype=torch.bool)
        others[self.numbers] = False
        return _bytes(self.buffer)[others]


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.uint8).reshape(len(buffer), -1)


def rows_of(
    pool: object, kv: torch.Tensor, swa: torch.Tensor, *, without_index: Collection[int] = ()
) -> Iterator[Rows]:
    """Yield the rows that hold whole pages of slots, buffer by buffer in an order of its own.

    Args:
        pool: target or draft.
        kv: int64 [slots] of whole pages, of the full index space.
        swa: int64 [slots] of whole pages, of the windows' index space.
        without_index: layers, counted in the stage, whose index nobody reads.
    """
    if isinstance(pool, SWAKVPool):
        yield from rows_of(pool.full_kv_pool, kv, swa)
        windows = kv if pool.swa_uses_full_indices else swa
        yield from rows_of(pool.swa_kv_pool, windows, windows)
    elif isinstance(pool, HybridLinearKVPool):
        yield from rows_of(pool.full_kv_pool, kv, swa, without_index=without_index)
        if isinstance(pool, QSATokenToKVPool):
            # The key of a group is where SGLang's indexer looks for it: at the slots over the ratio.
            keys = kv[:: pool.qsa_compress_ratio] // pool.qsa_compress_ratio
            yield from (Rows(buffer, keys) for buffer in pool.qsa_compressed_k_buffer_pool)
    elif isinstance(pool, MHATokenToKVPool):
        yield from _head_rows(pool, kv)
    elif isinstance(pool, DSATokenToKVPool):
        yield from (Rows(buffer, kv) for buffer in pool.kv_buffer)
        for layer, buffer in enumerate(pool.index_k_with_scale_buffer):
            if len(buffer) and layer not in without_index:
                yield Rows(buffer, _pages(kv, pool.page_size))
    elif isinstance(pool, MLATokenToKVPool):
        yield from _latent_rows(pool, kv)
    elif isinstance(pool, DeepSeekV4TokenToKVPool):
        yield from _v4_rows(pool, kv, swa)
    else:
        yield from _minimax_rows(pool, kv)


def _latent_rows(pool: object, kv: torch.Tensor) -> Iterator[Rows]:
    assert isinstance(pool, MLATokenToKVPool)
    yield from (Rows(buffer, kv) for buffer in (*pool.kv_buffer, *(pool.kv_scale_buffer or ())))


def _head_rows(pool: object, kv: torch.Tensor) -> Iterator[Rows]:
    assert isinstance(pool, MHATokenToKVPool)
    numbers = _pages(kv, pool.page_size) if pool.use_hnd else kv
    yield from (Rows(buffer, numbers) for buffer in (*pool.k_buffer, *pool.v_buffer))
    if pool.k_scale_buffer is not None:
        # Interleaved scales are found by page, the others by slot.
        paged = isinstance(pool, MHATokenToKVPoolMXFP8) and pool.mxfp8_sf_interleaved
        numbers = _pages(kv, pool.page_size) if paged else kv
        scales = (*pool.k_scale_buffer, *pool.v_scale_buffer)
        yield from (Rows(buffer, numbers) for buffer in scales)


def _minimax_rows(pool: object, kv: torch.Tensor) -> Iterator[Rows]:
    if not isinstance(pool, MiniMaxSparseKVPool):
        raise TypeError(type(pool))
    main, index = pool.main_pool, pool.index_k_pool
    if isinstance(pool, MiniMaxM3Nvfp4KVPool):
        # Each is a view of a slab in which a page's parts lie side by side.
        parts = (main.k_buffer, main.v_buffer, main.k_scale_buffer, main.v_scale_buffer)
        pages = _pages(kv, pool.page_size)
        for part in (*parts, index.k_buffer, index.k_scale_buffer):
            yield from (Rows(buffer, pages) for buffer in part)
        return
    yield from _head_rows(main, kv)
    if pool.index_kv_pool is not None:
        yield from _head_rows(pool.index_kv_pool, kv)
    if index is not None:
        yield from (Rows(buffer, kv) for buffer in index.k_buffer)


def state_rows(requests: object, slots: torch.Tensor) -> Iterator[Rows]:
    """Yield the rows that hold whole states: int64 [slots]; none where requests have no states."""
    if not isinstance(requests, HybridReqToTokenPool):
        return
    kept = [requests.mamba_pool.mamba_cache.temporal, *requests.mamba_pool.mamba_cache.conv]
    if requests.short_conv_pool.enabled:
        kept.append(requests.short_conv_pool.conv_state)
    for layers in kept:
        yield from (Rows(layer, slots) for layer in layers if layer.numel())
    if requests.ngram_pool.enabled:
        yield Rows(requests.ngram_pool.context, slots)


def _v4_rows(pool: object, kv: torch.Tensor, swa: torch.Tensor) -> Iterator[Rows]:
    assert isinstance(pool, DeepSeekV4TokenToKVPool)
    for buffer in pool.swa_kv_pool.kv_buffer:
        yield Rows(buffer, _pages(swa, pool.swa_page_size))
    for part in pool.kv_pools.values():
        yield from (Rows(buffer, _pages(kv, pool.page_size)) for buffer in part.kv_buffer)
    for ratio, part in pool.index_pools.items():
        # The key of some tokens is where SGLang's indexer looks for it: at the slots over the ratio, row by row.
        numbers = _pages(kv, ratio * part.page_size)
        yield from (Rows(buffer, numbers) for buffer in part.index_k_with_scale_buffer)
    for part in (*pool.compress_state_pools, *pool.indexer_compress_state_pools):
        if part is not None and part.ratio == 4:
            # The ring of a page is what the positions in it are written to, one after the other.
            first = swa.reshape(-1, pool.swa_page_size)[:, : part.ring_size].flatten()
            numbers = part.translate_from_swa_loc_to_state_loc(first)
            yield Rows(part.kv_score_buffer.kv_score, numbers)


def _pages(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    return slots[::page_size] // page_size


def contents(rows: Sequence[Rows]) -> list[torch.Tensor]:
    """Return the bytes of each buffer's rows."""
    return [part.read() for part in rows]


def fill_at_random(rows: Sequence[Rows], seed: int) -> None:
    """Write random bytes over every buffer, rows of other slots included."""
    generator = torch.Generator().manual_seed(seed)
    for part in rows:
        buffer = _bytes(part.buffer)
        noise = torch.randint(256, buffer.shape, dtype=torch.uint8, generator=generator)
        buffer.copy_(noise)


def overwrite(rows: Sequence[Rows], byte: int) -> None:
    """Write one byte over every buffer, as a new process would find it."""
    for part in rows:
        part.buffer.view(torch.uint8).fill_(byte)
