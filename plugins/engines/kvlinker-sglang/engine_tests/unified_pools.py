"""The real SGLang's unified memory, built small and on the CPU, and what its dense views are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from hybrid_pools import STATES
from real_pools import publish_configuration
from sglang.srt.mem_cache.unified_memory_pool import (
    init_unified_mamba_pools,
    init_unified_swa_pools,
)

from kvlinker.description import (
    Fact,
    IndexArray,
    IndexMap,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
)
from kvlinker.spans import BufferSpan

__all__ = ["Allocator", "UnifiedMemory", "heads_memory", "latent_memory", "windows_memory"]

SLOTS = 80
"""That requests may use of each part."""


class _Translator(Protocol):
    """SGLang's allocator of one part, which knows where each page is now."""

    def translate_kv_loc(self, virt_tokens: torch.Tensor) -> torch.Tensor:
        """Return where slots are."""


class _Pages(Protocol):
    """What keeps the layers of attention: K and V, or latents."""

    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]
    kv_buffer: list[torch.Tensor]


class Allocator(Protocol):
    """What gives out slots of all parts, and moves pages when others are freed."""

    def alloc(self, need_size: int) -> torch.Tensor:
        """Return free slots."""

    def free(self, free_index: torch.Tensor) -> None:
        """Take slots back."""

    def flush_opportunistic(self) -> int:
        """Move pages into holes; return how many."""


class _Allocators(Allocator, Protocol):
    full_attn_allocator: _Translator


@dataclass(frozen=True)
class UnifiedMemory:
    """Views of one memory, with the engine's translation of each index space."""

    allocator: Allocator
    views: dict[str, list[torch.Tensor]]
    """By role; rows are slots, as far apart as all layers of a slot are wide."""
    translators: dict[str, _Translator]
    """By logical pool."""
    description: KVCacheDescription

    def rows(self, role: str, slots: torch.Tensor) -> list[torch.Tensor]:
        """Return the values of slots as SGLang reads them, layer by layer."""
        places = self._places(role, slots)
        return [view[places] for view in self.views[role]]

    def overwrite(self, slots: torch.Tensor) -> None:
        """Write other values over slots, as their next request does."""
        for role, views in self.views.items():
            for view in views:
                view[self._places(role, slots)] = -1

    def _places(self, role: str, slots: torch.Tensor) -> torch.Tensor:
        pool = "swa" if role.startswith("swa_") else "kv"
        return self.translators[pool].translate_kv_loc(slots)

    def fill(self, seed: int) -> None:
        """Write random values over every view."""
        generator = torch.Generator().manual_seed(seed)
        for views in self.views.values():
            for view in views:
                view.copy_(torch.randn(view.shape, generator=generator).to(view.dtype))


def windows_memory(page_size: int = 1) -> UnifiedMemory:
    """Return full and window layers in one memory."""
    publish_configuration()

    bundle = init_unified_swa_pools(
        device="cpu",
        kv_cache_dtype=torch.bfloat16,
        head_num=2,
        head_dim=8,
        v_head_dim=8,
        swa_head_num=2,
        swa_head_dim=8,
        swa_v_head_dim=8,
        page_size=page_size,
        start_layer=0,
        end_layer=4,
        swa_attention_layer_ids=[1, 3],
        full_attention_layer_ids=[0, 2],
        full_max_total_num_tokens=SLOTS,
        swa_max_total_num_tokens=SLOTS,
        enable_memory_saver=False,
        need_sort=False,
        lazy_compaction=True,
    )
    pool, allocator = bundle.token_to_kv_pool, bundle.token_to_kv_pool_allocator
    return _memory(
        allocator,
        {
            "k": pool.full_kv_pool.k_buffer,
            "v": pool.full_kv_pool.v_buffer,
            "swa_k": pool.swa_kv_pool.k_buffer,
            "swa_v": pool.swa_kv_pool.v_buffer,
        },
        {"kv": allocator.full_attn_allocator, "swa": allocator.swa_attn_allocator},
        ("attention", "sliding") * 2,
        page_size,
    )


def heads_memory(page_size: int = 1) -> UnifiedMemory:
    """Return the layers of attention of a hybrid, K and V in one memory with its states."""
    pool, allocator = _beside_states(page_size, latents=False)
    views = {"k": pool.k_buffer, "v": pool.v_buffer}
    return _memory(
        allocator, views, {"kv": allocator.full_attn_allocator}, ("attention",) * 2, page_size
    )


def latent_memory(page_size: int = 1) -> UnifiedMemory:
    """Return the layers of attention of a hybrid, latents in one memory with its states."""
    pool, allocator = _beside_states(page_size, latents=True)
    views = {"latent": pool.kv_buffer}
    return _memory(
        allocator, views, {"kv": allocator.full_attn_allocator}, ("attention",) * 2, page_size
    )


def _beside_states(page_size: int, *, latents: bool) -> tuple[_Pages, _Allocators]:
    publish_configuration()

    bundle = init_unified_mamba_pools(
        device="cpu",
        kv_cache_dtype=torch.bfloat16,
        head_num=2,
        head_dim=8,
        page_size=page_size,
        start_layer=0,
        end_layer=4,
        is_draft_worker=False,
        use_mla_backend=latents,
        v_head_dim=8,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        mamba_layer_ids=[0, 2],
        full_attention_layer_ids=[1, 3],
        mamba2_cache_params=STATES["mamba2"]([0, 2]),
        model_context_len=256,
        extra_max_context_len=1,
        max_total_num_tokens=SLOTS,
        max_mamba_cache_size=8,
        max_num_reqs=4,
        enable_memory_saver=False,
        enable_mamba_extra_buffer=False,
        enable_mamba_extra_buffer_lazy=False,
        speculative_num_draft_tokens=None,
        disable_overlap_schedule=True,
        need_sort=False,
        lazy_compaction=True,
    )
    pages: _Pages = bundle.token_to_kv_pool.full_kv_pool
    allocator: _Allocators = bundle.token_to_kv_pool_allocator
    return pages, allocator


def _memory(
    allocator: Allocator,
    views: dict[str, list[torch.Tensor]],
    translators: dict[str, _Translator],
    kinds: Sequence[str],
    page_size: int,
) -> UnifiedMemory:
    latents = "latent" in views
    family = "swa" if "swa" in translators else "mla" if latents else "mha"
    facts: dict[str, Fact] = (
        {"kv_format": "bf16", "latent_values": 576}
        if latents
        # A page of one slot has the same bytes in both layouts, and rows that are pages may lie apart.
        else {
            "kv_layout": "head_major" if page_size == 1 else "token_major",
            "kv_format": "bf16",
            "kv_scaled": 0,
        }
    )
    description = KVCacheDescription(
        family=family,
        page_size=page_size,
        buffers={role: tuple(map(BufferSpan.from_tensor, held)) for role, held in views.items()},
        layers=tuple(
            LayerFacts(layer=i, global_layer=i, kind=kind) for i, kind in enumerate(kinds)
        ),
        logical_pools=tuple(
            LogicalPool(name=name, page_size=page_size, window=page_size if name == "swa" else None)
            for name in translators
        ),
        facts=facts,
        index_maps={
            name: _index_map(found.translate_kv_loc) for name, found in translators.items()
        },
    )
    return UnifiedMemory(allocator, views, translators, description)


def _index_map(translate: Callable[[torch.Tensor], torch.Tensor]) -> IndexMap:
    """Return the engine's translation as kvlinker hands slots over: NumPy in, NumPy out."""

    def index_map(slots: IndexArray) -> IndexArray:
        return np.asarray(translate(torch.from_numpy(slots)).numpy(), dtype=np.int64)

    return index_map
