"""Parameters: what SGLang tells a linker of its worker, and the request that its pools are described with."""

from __future__ import annotations

from typing import Protocol

from sglang.srt.runtime_context import get_parallel

from kvlinker.description import DescribeRequest, Fact
from kvlinker_sglang.describe.requests import (
    DRAFT_STATES,
    DRAFTS_BESIDE,
    DRAFTS_PACKED,
    SLIDING_WINDOW,
    STATES_BESIDE,
)
from kvlinker_sglang.engine.host import chunk_facts, shared_index_facts
from kvlinker_sglang.metrics import WorkerPlace, worker_place

__all__ = ["WorkerParameters", "describe_request", "place_of"]


class _Allocator(Protocol):
    def get_kvcache(self) -> object: ...


class WorkerParameters(Protocol):
    """SGLang's `CacheInitParams`, as far as it is read here."""

    page_size: int
    pp_rank: int
    pp_size: int
    swa_retain_window: int | None
    req_to_token_pool: object
    token_to_kv_pool_allocator: _Allocator
    tp_cache_group: object
    tree_components: tuple[object, ...] | None
    mtp_draft_device_pools: tuple[object, ...]
    sidecar_draft_device_pools: tuple[object, ...]
    mtp_draft_mamba_pools: tuple[object, ...]


def describe_request(params: WorkerParameters) -> DescribeRequest:
    """Return what is stated beside the worker's pool."""
    facts: dict[str, Fact] = shared_index_facts(params.token_to_kv_pool_allocator.get_kvcache())
    if params.swa_retain_window is not None:
        facts |= {SLIDING_WINDOW: params.swa_retain_window, **chunk_facts()}
    return DescribeRequest(
        page_size=params.page_size,
        facts=facts,
        extras={
            STATES_BESIDE: params.req_to_token_pool,
            DRAFTS_PACKED: tuple(params.mtp_draft_device_pools),
            DRAFTS_BESIDE: tuple(params.sidecar_draft_device_pools),
            DRAFT_STATES: tuple(params.mtp_draft_mamba_pools),
        },
    )


def place_of(params: WorkerParameters) -> WorkerPlace:
    """Return this worker's place; SGLang knows a rank only where there are several."""
    parallel = get_parallel()
    replicas = parallel.dp_size > 1 and parallel.attn_dp_size == 1
    return worker_place(
        replica=(parallel.dp_rank or 0) if replicas else 0,
        stage=params.pp_rank,
        stages=params.pp_size,
        rank=parallel.tp_rank if parallel.tp_size > 1 else 0,
        ranks=parallel.tp_size,
        attention_group=parallel.attn_dp_rank if parallel.attn_dp_size > 1 else None,
    )
