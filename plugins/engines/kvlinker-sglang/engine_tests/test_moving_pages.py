"""Why unified memory and interleaved pages are refused: tried on the real SGLang's views, translators and placements.

Slots of a dense view lie as far apart as all layers of a slot are wide, so that a page of several is not one range.
K and V in pages of one slot are spans whose rows are pages, with the engine's translation as index map, and come back;
but pages move while a transfer waits, and a linker of SGLang's has no say in that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import numpy as np
import pool_groups
import pytest
import torch
from pool_groups import KEYS, installed_plugins
from real_pools import heads_pool
from sglang.srt.arg_groups.kv_cache_hook import handle_unified_memory_pool
from sglang.srt.arg_groups.kv_shard_hook import handle_kv_cache_sharding
from sglang.srt.mem_cache.page_interleave import PageInterleavePlacement, PageShardSpec
from sglang.srt.mem_cache.page_interleave_pool import PageInterleaveMHATokenToKVPool
from sglang.srt.mem_cache.unified_memory_pool import UnifiedMHATokenToKVPool
from sglang.srt.server_args import ServerArgs
from unified_pools import UnifiedMemory, heads_memory, latent_memory, windows_memory

import kvlinker_sglang
from kvlinker.description import DescribeRequest, IndexArray, KVCacheDescription
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError
from kvlinker.pools import DevicePoolGroup
from kvlinker.selection import build_group, select_strategy
from kvlinker.testing.memory_store import MemoryStore
from kvlinker.transfers import HitPolicy, PoolTransfer

PAGE = 4
each_memory = pytest.mark.parametrize(
    "make", [heads_memory, windows_memory], ids=["mha-bf16", "swa-bf16"]
)
Make = Callable[..., UnifiedMemory]
Refused = Callable[..., AbstractContextManager[None]]


class Forward:
    """An event of the engine's stream: done when the test says so."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def finish(self) -> None:
        self._done.set()

    def query(self) -> bool:
        return self._done.is_set()


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore()
    yield store
    store.close()


def group_over(description: KVCacheDescription) -> DevicePoolGroup:
    return build_group(select_strategy(description, installed_plugins()), description)


def transfers(memory: UnifiedMemory, slots: torch.Tensor) -> list[PoolTransfer]:
    policies = {"kv": HitPolicy.ALL_PAGES, "swa": HitPolicy.TRAILING_PAGES}
    return [
        PoolTransfer(name=name, keys=KEYS, device_indices=slots, hit_policy=policies[name])
        for name in memory.translators
    ]


def offload(
    memory: UnifiedMemory, slots: torch.Tensor, store: MemoryStore, *, until: Callable[[], None]
) -> None:
    """Store pages behind a forward that still runs, and do something meanwhile."""
    forward = Forward()

    def finish() -> None:
        until()
        forward.finish()

    pool_groups.offload(
        group_over(memory.description),
        transfers(memory, slots),
        store,
        ready=[forward],
        until=finish,
    )


def load(memory: UnifiedMemory, slots: torch.Tensor, store: MemoryStore) -> None:
    pool_groups.load(group_over(memory.description), transfers(memory, slots), store)


def values(memory: UnifiedMemory, slots: torch.Tensor) -> list[torch.Tensor]:
    return [rows for role in memory.views for rows in memory.rows(role, slots)]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


def test_pages_behind_a_forward_that_never_ends_are_waited_for_within_a_limit(
    store: MemoryStore,
) -> None:
    memory = heads_memory()
    stored = transfers(memory, memory.allocator.alloc(2))

    with pytest.raises(TimeoutError, match="the end of an offload"):
        pool_groups.offload(
            group_over(memory.description), stored, store, ready=[Forward()], limit_seconds=0.1
        )


# ---- unified memory ---------------------------------------------------------------------------


@each_memory
def test_dense_views_come_back_through_the_translator_while_no_page_moves(
    make: Make, store: MemoryStore
) -> None:
    first, second = make(), make()
    first.allocator.alloc(3)
    stored = first.allocator.alloc(2)
    first.fill(seed=1)
    offload(first, stored, store, until=lambda: None)
    second.allocator.alloc(5)
    loaded = second.allocator.alloc(2)
    second.fill(seed=2)
    others = second.allocator.alloc(2)
    untouched = [rows.clone() for rows in values(second, others)]

    load(second, loaded, store)

    assert not set(stored.tolist()) & set(loaded.tolist())
    assert same(values(second, loaded), values(first, stored))
    assert same(values(second, others), untouched)


@each_memory
def test_a_page_that_moves_before_it_is_read_is_stored_with_anothers_bytes(
    make: Make, store: MemoryStore
) -> None:
    first = make()
    freed, stored = first.allocator.alloc(4), first.allocator.alloc(2)
    first.fill(seed=1)
    expected = [rows.clone() for rows in values(first, stored)]

    def move() -> None:
        # What SGLang's scheduler does between two forwards, and when a neighbour needs room.
        first.allocator.free(freed)
        assert first.allocator.flush_opportunistic() > 0
        newcomer = first.allocator.alloc(6)
        first.overwrite(newcomer)

    offload(first, stored, store, until=move)
    second = make()
    loaded = second.allocator.alloc(2)
    load(second, loaded, store)

    # The page is as it was, elsewhere; what was stored under its key is not the page.
    assert same(values(first, stored), expected)
    assert not same(values(second, loaded), expected)


@pytest.mark.parametrize(
    ("make", "page_size"),
    [(heads_memory, PAGE), (windows_memory, PAGE), (latent_memory, PAGE), (latent_memory, 1)],
    ids=["mha-bf16", "swa-bf16", "mla-bf16", "mla-bf16-page_of_one"],
)
def test_slots_that_lie_apart_make_no_page_of_a_strategy(make: Make, page_size: int) -> None:
    memory = make(page_size)

    with pytest.raises(ContractError, match="rows that are slots must be dense, got row"):
        group_over(memory.description)


@pytest.mark.refuses(engine="sglang")
def test_unified_memory_is_refused_by_name(refused: Refused) -> None:
    pool: object = object.__new__(UnifiedMHATokenToKVPool)

    with refused(
        "unified memory (`--enable-unified-memory`)",
        match=r"UnifiedMHATokenToKVPool is not described: .* pages move .*without --enable-unified-memory",
    ):
        kvlinker_sglang.describe_kv_cache("sglang", pool, DescribeRequest(page_size=PAGE))


def test_sglang_starts_no_linker_beside_unified_memory() -> None:
    arguments = ServerArgs(
        model_path="dummy",
        device="cpu",
        enable_unified_memory=True,
        enable_unified_cache_external_linker=True,
    )

    with pytest.raises(
        AssertionError, match="do not preserve unified page-envelope indices and compaction"
    ):
        handle_unified_memory_pool(arguments)


# ---- interleaved pages ------------------------------------------------------------------------


PLACEMENT = PageInterleavePlacement(
    PageShardSpec(
        shard_rank=0, shard_size=2, page_size=PAGE, max_prefix_tokens=2 * PAGE, chunk_tokens=PAGE
    )
)


def interleaved(
    place: Callable[[torch.Tensor], torch.Tensor],
) -> DevicePoolEntry:
    """Return an entry over a rank's pages, with slots translated as SGLang places them on two ranks."""

    def index_map(slots: IndexArray) -> IndexArray:
        return np.asarray(place(torch.from_numpy(slots)), dtype=np.int64)

    pool, request = heads_pool(page_size=PAGE), DescribeRequest(page_size=PAGE)
    description = kvlinker_sglang.describe_kv_cache("sglang", pool, request)
    assert description is not None
    return group_over(replace(description, index_maps={"kv": index_map})).entry_map["kv"]


TWO_PAGES = torch.arange(2 * PAGE, 4 * PAGE)
"""One on each of two ranks."""


def test_pages_of_two_ranks_are_one_place_to_a_translation_of_slots() -> None:
    entry = interleaved(PLACEMENT.local_index)

    with pytest.raises(ContractError, match="pool 'kv': page 1 is named 2 times"):
        entry.prepare_locations(entry.translate_indices(TWO_PAGES))


def test_a_rank_that_keeps_every_second_page_turns_slots_into_fewer() -> None:
    entry = interleaved(partial(PLACEMENT.filter_local, rank=0))

    with pytest.raises(ContractError, match="turned 8 slots into 4"):
        entry.translate_indices(TWO_PAGES)


@pytest.mark.refuses(engine="sglang")
def test_interleaved_pages_are_refused_by_name(refused: Refused) -> None:
    pool: object = object.__new__(PageInterleaveMHATokenToKVPool)

    with refused(
        "pages interleaved over ranks (`--enable-kv-cache-sharding`)",
        match=r"PageInterleaveMHATokenToKVPool is not described: each rank keeps .*without --enable-kv-cache-sharding",
    ):
        kvlinker_sglang.describe_kv_cache("sglang", pool, DescribeRequest(page_size=PAGE))


def test_sglang_starts_no_linker_beside_interleaved_pages() -> None:
    arguments = ServerArgs(
        model_path="dummy",
        device="cpu",
        disaggregation_mode="prefill",
        enable_kv_cache_sharding=True,
        enable_unified_cache_external_linker=True,
    )

    with pytest.raises(ValueError, match="load-back allocates through the flat allocator API"):
        handle_kv_cache_sharding(arguments)
