"""Stand-ins for the classes of SGLang that the linker relies on: as they are, and changed."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvlinker_sglang.compatibility import Host, HostKey

__all__ = ["CacheInitParams", "Key", "UnifiedCacheLinker", "Updater", "make_host", "page_hash"]


class UnifiedCacheLinker(ABC):
    """SGLang's, in its tested form."""

    def record_offload_ready(self) -> list[object]:
        return []

    @abstractmethod
    def lookup(self, rid: str, transfers: list[object]) -> list[int]: ...
    @abstractmethod
    def load(self, rid: str, transfers: list[object]) -> bool: ...
    @abstractmethod
    def start_layer_wise_loading(self) -> int: ...
    @abstractmethod
    def finish_layer_wise_loading(self, counter_index: int) -> bool: ...
    @abstractmethod
    def cancel_queued_load(self, rid: str) -> bool: ...
    @abstractmethod
    def offload(self, transfers: list[object], session_id: str | None = None) -> bool: ...
    @abstractmethod
    def num_completed_offloads(self) -> int: ...
    @abstractmethod
    def pop_completed_offload(self) -> bool: ...
    @abstractmethod
    def reset(self) -> None: ...
    @abstractmethod
    def close(self) -> None: ...


@dataclass
class PoolTransfer:
    """SGLang's."""

    name: object
    keys: list[str] | None = None
    device_indices: object = None
    hit_policy: object = None


@dataclass
class CacheInitParams:
    """SGLang's."""

    req_to_token_pool: object
    token_to_kv_pool_allocator: object
    page_size: int
    pp_rank: int = 0
    pp_size: int = 1
    tree_components: object = None
    tp_cache_group: object = None
    mtp_draft_device_pools: tuple[object, ...] = ()
    sidecar_draft_device_pools: tuple[object, ...] = ()
    mtp_draft_mamba_pools: tuple[object, ...] = ()

    @property
    def swa_retain_window(self) -> int | None:
        return None


class PoolHitPolicy(StrEnum):
    """SGLang's."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"


class PoolName(StrEnum):
    """SGLang's."""

    KV = "kv"
    SWA = "swa"
    MAMBA = "mamba"


class UnifiedRadixCache:
    """SGLang's."""

    def __init__(self) -> None:
        self.linker: object = None

    def init_cache_linker(self, cache_linker: object) -> None: ...
    def reset(self) -> None: ...
    def total_size(self) -> tuple[int, int]:
        return (0, 0)


class UnifiedCacheLinkerWrapper:
    """SGLang's."""

    def __init__(self, cache: object, cache_linker: object) -> None:
        self.cache = cache
        self.cache_linker = cache_linker


@dataclass
class Updater:
    """SGLang's `SchedulerWeightUpdaterManager`."""

    is_fully_idle: object
    scheduler: object = None

    def begin_weight_update(self, recv_req: object) -> None: ...
    def check_weights(self, recv_req: object) -> None: ...
    def end_weight_update(self, recv_req: object) -> None: ...
    def update_weights_from_disk(self, recv_req: object) -> None: ...
    def update_weights_from_distributed(self, recv_req: object) -> None: ...
    def update_weights_from_ipc(self, recv_req: object) -> None: ...
    def update_weights_from_tensor(self, recv_req: object) -> None: ...
    def flush_cache_after_weight_update(
        self, recv_req: object, success: object, message: object
    ) -> None: ...


@dataclass(frozen=True)
class Key:
    """SGLang's `RadixKey`."""

    tokens: Sequence[int]
    extra_key: str | None = None
    cache_salt: str | None = None


def page_hash(
    key: HostKey, prior_hash: str | None = None, page_size: int | None = None
) -> list[str]:
    """Chain pages as SGLang does."""
    assert isinstance(key, Key)
    last = prior_hash or repr((key.extra_key, key.cache_salt))
    keys = []
    for start in range(0, len(key.tokens), page_size or 1):
        page = tuple(key.tokens[start : start + (page_size or 1)])
        last = hashlib.sha256(repr((last, page)).encode()).hexdigest()
        keys.append(last)
    return keys


def make_host(**changed: object) -> Host:
    """Return a host of stand-ins, some of them changed."""
    parts: dict[str, object] = {
        "version": "0.5.23",
        "linker": UnifiedCacheLinker,
        "transfer": PoolTransfer,
        "parameters": CacheInitParams,
        "policies": PoolHitPolicy,
        "pools": PoolName,
        "updater": Updater,
        "tree": UnifiedRadixCache,
        "wrapper": UnifiedCacheLinkerWrapper,
        "page_hash": page_hash,
        "make_key": Key,
        **changed,
    }
    return Host(**parts)  # type: ignore[arg-type]  # parts by name
