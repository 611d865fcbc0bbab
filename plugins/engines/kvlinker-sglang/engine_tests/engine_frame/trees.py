"""SGLang's real prefix tree over its real pools and allocators, driven step by step as its scheduler drives it.

This is how pools are tested whose models need a GPU; nothing of the engine is replaced but the scheduler and the model.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from engine_reads import Rows, rows_of
from minimax_pools import minimax_pool, nvfp4_pool
from pool_groups import installed_plugins
from real_pools import (
    V4_SHARED,
    heads_pool,
    latent_pool,
    publish_configuration,
    sparse_pool,
    v4_pool,
    windows_pool,
)
from real_pools_scaled import fp4_heads_pool, fp4_latent_pool, mxfp8_heads_pool
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from engine_frame.engine_types import Pool, Request, Slots, WindowSlots
from engine_frame.server import LinkerOptions
from kvlinker.description import KVCacheDescription
from kvlinker.selection import describe_cache
from kvlinker_sglang.engine.parameters import describe_request

__all__ = ["CORES", "KINDS", "PAGES", "SETTLE_SECONDS", "Kind", "Match", "Restored", "Tree"]

CORES = ("rust", "python")
"""SGLang's two trees."""
PAGES = 12
"""Pages that requests of a tree may use; the pools have one more, which belongs to padding."""
SETTLE_SECONDS = 300.0
"""Far more than anything takes, also where others keep the cores busy."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of pool and what the tree has to know of it."""

    make: Callable[[], object]
    page_size: int
    window: int | None = None
    """Slots that window layers look back; None where there are none."""
    tracks_states: bool = False
    """Keeps states at boundaries while tokens are computed, as pages of many tokens need it."""

    @property
    def window_pages(self) -> int:
        """Pages at a boundary whose windows a prompt needs to go on there."""
        return 0 if self.window is None else -(-self.window // self.page_size)


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "mha": Kind(make=partial(heads_pool, pages=PAGES), page_size=16),
        "mla": Kind(make=partial(latent_pool, pages=PAGES), page_size=16),
        "swa": Kind(
            make=partial(windows_pool, pages=PAGES, window_pages=PAGES), page_size=16, window=40
        ),
        "dsa": Kind(make=partial(sparse_pool, pages=PAGES), page_size=64),
        "v4": Kind(make=partial(v4_pool, pages=PAGES), page_size=256, window=128),
        "minimax": Kind(make=partial(minimax_pool, pages=PAGES), page_size=16),
        "minimax_nvfp4": Kind(make=partial(nvfp4_pool, pages=PAGES), page_size=128),
        "v4_shared": Kind(
            make=partial(v4_pool, V4_SHARED[0], sources=V4_SHARED[1], pages=PAGES),
            page_size=256,
            window=128,
        ),
        "mha_fp4": Kind(make=partial(fp4_heads_pool, pages=PAGES), page_size=16),
        "mha_fp4_by_method": Kind(
            make=partial(
                heads_pool,
                dtype=torch.float4_e2m1fn_x2,
                quantized_as="fp4_mx_block16",
                pages=PAGES,
            ),
            page_size=16,
        ),
        "mha_mxfp8": Kind(make=partial(mxfp8_heads_pool, pages=PAGES), page_size=128),
        "mla_fp4": Kind(make=partial(fp4_latent_pool, pages=PAGES), page_size=16),
    }
)
"""Small pools of every family, by name."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """What the tree, and the linker behind it, have of a prompt."""

    request: Request
    device_tokens: int
    """Of the prompt, in the pools."""
    host_tokens: int
    """Behind them, that the linker offers to load."""
    window_tokens: int
    """Of the windows, that it offers to load."""
    node: object
    """The tree's, up to which the prompt is in the pools."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a prompt that was matched and loaded got."""

    match: Match
    slots: torch.Tensor
    """int64 [tokens that were loaded]; they are not in the tree."""
    failed: bool
    """SGLang gives the request up, since its KV did not arrive."""


@dataclass(kw_only=True)
class Tree:
    """One worker's prefix tree."""

    name: str
    core: str = "rust"
    kind: Kind = field(init=False)
    pool: Pool = field(init=False)
    allocator: Slots = field(init=False)
    windows: WindowSlots | None = field(init=False)
    """The same allocator, for kinds with windows."""

    def __post_init__(self) -> None:
        publish_configuration()
        self.kind = self.kinds()[self.name]
        pool = self.kind.make()
        assert isinstance(pool, KVCache)
        self.pool = pool
        self.windows = None if self.kind.window is None else self._window_allocator()
        self.allocator = self.windows or self._slot_allocator()
        self.params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.make_requests(),
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.kind.page_size,
            tree_components=self.components(),
            tree_core_backend=self.core,
            sliding_window_size=self.kind.window,
            enable_mamba_extra_buffer=self.kind.tracks_states,
        )
        self.cache = UnifiedRadixCache(self.params)

    def kinds(self) -> Mapping[str, Kind]:
        """Return the pools that the tree may be over, by name."""
        return KINDS

    def make_requests(self) -> object:
        """Make the pool of requests."""
        return ReqToTokenPool(size=8, max_context_len=4096, device="cpu", enable_memory_saver=False)

    def components(self) -> tuple[object, ...]:
        """Return what the tree keeps of a prefix."""
        return (ComponentType.FULL, *([ComponentType.SWA] if self.windows else []))

    @property
    def description(self) -> KVCacheDescription:
        """What a linker is told of the pools."""
        request = describe_request(self.params)
        return describe_cache("sglang", self.pool, request, registry=installed_plugins())

    def attach(self, options: LinkerOptions, *, server_args: object = None) -> object:
        """Let SGLang make a linker and attach it, as its registry does, and return it.

        Args:
            options: the linker's module and class, and its own options.
            server_args: what the linker is told of the server; by default an SGLang ServerArgs of defaults.
        """
        linker = create_unified_cache_linker(
            get_context().server_args if server_args is None else server_args,
            self.params,
            backend="dynamic",
            config={
                "linker": options.name,
                "linker_module_path": options.module,
                "linker_extra_config": dict(options.extra_config),
            },
            components=set(self.cache.components),
            forward_stream=None,
        )
        self.cache.init_cache_linker(linker)
        self.pool.register_layer_transfer_counter(linker.layer_done_counter)
        return linker

    # ---- slots --------------------------------------------------------------------------------

    def allocate(self, pages: int) -> torch.Tensor:
        """Take free slots for a request, of windows too: int64 [pages * page size]."""
        count = pages * self.kind.page_size
        if self.windows is None:
            return self.allocator.alloc(count).to(torch.int64)
        full = self.windows.full_attn_allocator.alloc(count).to(torch.int64)
        self.windows.set_full_to_swa_mapping(full, self.windows.swa_attn_allocator.alloc(count))
        return full

    def windows_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return where the windows of the last pages of a request are: int64 [window pages * page size].

        Empty for kinds without windows.
        """
        if self.windows is None:
            return slots[:0]
        last = slots[-self.kind.window_pages * self.kind.page_size :]
        return self.windows.full_to_swa_index_mapping[last].to(torch.int64)

    def rows(self, slots: torch.Tensor) -> list[Rows]:
        """Return the rows that a prompt with these slots needs to go on: all of the kv, the last of the windows."""
        return list(rows_of(self.pool, slots, self.windows_of(slots)))

    @property
    def free_slots(self) -> tuple[int, ...]:
        """Slots that nobody holds, of each index space."""
        if self.windows is None:
            return (self.allocator.available_size(),)
        return (
            self.windows.full_attn_allocator.available_size(),
            self.windows.swa_attn_allocator.available_size(),
        )

    # ---- the tree -----------------------------------------------------------------------------

    def insert(
        self, tokens: Sequence[int], slots: torch.Tensor, *, state: torch.Tensor | None = None
    ) -> int:
        """Give a prompt's slots to the tree, which offers them to be offloaded; return the tokens that it had.

        Args:
            tokens: of the prompt.
            slots: where its KV is.
            state: where the state behind it is, for kinds with states: int64 [1].
        """
        found = self.cache.insert(InsertParams(key=_key(tokens), value=slots, mamba_value=state))
        length: int = found.prefix_len
        return length

    def adopt(self, tokens: Sequence[int], restored: Restored) -> None:
        """Give what a request matched and loaded to the tree, as the scheduler does after the forward pass.

        Of windows the tree gets those that were loaded; where the others would be it knows that there are none.
        """
        match = restored.match
        slots = torch.cat([self.slots_of(match), restored.slots])
        missing = match.request.kv.component_evicted_seqlens
        self.cache.insert(
            InsertParams(
                key=_key(tokens[: len(slots)]),
                value=slots,
                mamba_value=self.state_of(match),
                prev_prefix_len=match.device_tokens,
                component_evicted_seqlens=dict(missing),
            )
        )

    def state_of(self, match: Match) -> torch.Tensor | None:
        """Return where a request's state is: int64 [1]; None for kinds without states."""
        del match
        return None

    def slots_of(self, match: Match) -> torch.Tensor:
        """Return where the part of a prompt is that was in the pools: int64 [device tokens]."""
        found: torch.Tensor = self.cache.path_device_indices(match.request.last_node)
        return found.to(torch.int64)

    def settle(self) -> None:
        """Take in completed offloads, as the scheduler does at every step, until none is pending.

        Raises:
            TimeoutError: one never completes.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.pending_offloads:
            self.cache.check_hicache_events()
            if time.monotonic() > deadline:
                msg = f"{self.pending_offloads} offloads are pending after {SETTLE_SECONDS} s"
                raise TimeoutError(msg)
            time.sleep(0.001)

    @property
    def pending_offloads(self) -> int:
        """Offloads that hold their nodes in the tree."""
        return len(self.cache.linker.pending_offloads)

    def forget(self) -> None:
        """Empty the tree and free all slots, as `flush_cache` does; the pools keep their bytes."""
        self.cache.reset()
        self.allocator.clear()

    def evict(self, pages: int) -> None:
        """Let the tree give up pages that it has not used for longest."""
        self.cache.evict(EvictParams(num_tokens=pages * self.kind.page_size))

    # ---- a request ----------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], request_id: str, *, salt: str | None = None) -> Match:
        """Look a prompt up."""
        request = Req(request_id, "", array("q", tokens), SamplingParams(max_new_tokens=1))
        found = self.cache.match_prefix(MatchPrefixParams(key=_key(tokens, salt=salt), req=request))
        request.last_node = found.last_device_node
        request.host_hit_length = found.host_hit_length
        request.swa_host_hit_length = found.swa_host_hit_length
        return Match(
            request=request,
            device_tokens=found.device_prefix_len,
            host_tokens=found.host_hit_length,
            window_tokens=found.swa_host_hit_length,
            node=found.best_match_node,
        )

    def load_back(self, match: Match) -> torch.Tensor:
        """Queue what the linker offered: int64 [slots], none where it refuses now or there was no offer."""
        count, _ = self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=match.node, host_hit_length=match.host_tokens, req=match.request
            )
        )
        loading: Mapping[str, torch.Tensor] = self.cache.linker.private_load_indices
        nothing = torch.empty(0, dtype=torch.int64)
        return loading[match.request.rid].to(torch.int64) if count else nothing

    def start(self) -> int:
        """Start what is queued, and let the coming forward pass wait for it; return the batch's number."""
        batch: int = self.cache.ready_to_load_host_cache()
        self.cache.linker.layer_done_counter.set_consumer(batch)
        return batch

    def wait(self) -> None:
        """Wait for one layer after the other, as a forward pass does."""
        for layer in range(self.pool.start_layer, self.pool.start_layer + self.pool.layer_num):
            self.cache.linker.layer_done_counter.wait_until(layer - self.pool.start_layer)

    def finish(self, matches: Sequence[Match]) -> list[str]:
        """End the batch that ran, and return the ids of requests that SGLang gives up."""
        requests = [match.request for match in matches]
        return [request.rid for request in self.cache.finish_external_linker_loads(requests)]

    def abort(self, match: Match) -> None:
        """Tell the tree that a request is gone."""
        self.cache.release_aborted_request(match.request.cache_request_handle)

    def restore(self, tokens: Sequence[int], request_id: str) -> Restored:
        """Look a prompt up and load what is offered, in a batch of its own."""
        match = self.match(tokens, request_id)
        slots = self.load_back(match)
        self.start()
        self.wait()
        return Restored(match=match, slots=slots, failed=bool(self.finish([match])))

    # ---- allocators ---------------------------------------------------------------------------

    def _slot_allocator(self) -> Slots:
        if self.kind.page_size == 1:
            tokens: Slots = TokenToKVPoolAllocator(
                size=PAGES,
                dtype=torch.bfloat16,
                device="cpu",
                kvcache=self.pool,
                need_sort=False,
            )
            return tokens
        made: Slots = PagedTokenToKVPoolAllocator(
            size=PAGES * self.kind.page_size,
            page_size=self.kind.page_size,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=self.pool,
            need_sort=False,
        )
        return made

    def _window_allocator(self) -> WindowSlots:
        size = PAGES * self.kind.page_size
        made: WindowSlots = SWATokenToKVPoolAllocator(
            size=size,
            size_swa=size,
            page_size=self.kind.page_size,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=self.pool,
            need_sort=False,
        )
        return made


def _key(tokens: Sequence[int], *, salt: str | None = None) -> object:
    return RadixKey(array("q", tokens), cache_salt=salt)
