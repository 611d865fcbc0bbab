"""What the frame uses of SGLang's objects, which have no types where the engine is not installed."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["CacheParams", "Pool", "Request", "RequestKV", "Slots", "Transfer", "WindowSlots"]


class Pool(Protocol):
    """A KVCache."""

    layer_num: int
    start_layer: int
    layer_transfer_counter: object

    def register_layer_transfer_counter(self, counter: object) -> None:
        """Let reads of a layer wait for it."""


class Slots(Protocol):
    """An allocator of one index space."""

    def alloc(self, need_size: int) -> torch.Tensor:
        """Return free slots; an engine with too few of them returns None."""

    def available_size(self) -> int:
        """Count free slots."""

    def clear(self) -> None:
        """Free all slots."""


class WindowSlots(Slots, Protocol):
    """An allocator of slots of which some have a window too."""

    full_attn_allocator: Slots
    swa_attn_allocator: Slots
    full_to_swa_index_mapping: torch.Tensor

    def set_full_to_swa_mapping(self, full: torch.Tensor, swa: torch.Tensor) -> None:
        """Say where the windows of some slots are."""

    def get_kvcache(self) -> Pool:
        """Return the pool."""


class CacheParams(Protocol):
    """A CacheInitParams."""

    page_size: int
    token_to_kv_pool_allocator: WindowSlots


class RequestKV(Protocol):
    """A ReqKvInfo."""

    component_evicted_seqlens: dict[object, int]
    """Tokens from the front that have no window, by component."""
    mamba_pool_idx: torch.Tensor | None
    """Where the state is."""


class Request(Protocol):
    """A Req."""

    rid: str
    cache_request_handle: object
    last_node: object
    kv: RequestKV


class Transfer(Protocol):
    """A PoolTransfer; names and policies are members of the engine's enumerations."""

    name: object
    keys: list[str]
    device_indices: torch.Tensor
    hit_policy: object
