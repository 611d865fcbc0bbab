"""The real prefix tree over hybrids: pages of attention, and a state behind the last token of each prompt."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
from engine_reads import Rows, rows_of, state_rows
from hybrid_pools import HybridWorker, hybrid_pool, request_pool
from indexed_pools import folded_hybrid_pool, qsa_pool
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams

from engine_frame.engine_types import Slots
from engine_frame.trees import PAGES, Kind, Match, Tree

__all__ = ["STATE_KINDS", "StateTree"]


class StateRequests(Protocol):
    """A HybridReqToTokenPool."""

    mamba_map: Mapping[int, int]
    mamba_allocator: Slots
    layer_transfer_counter: object

    def mamba2_layer_cache(self, layer_id: int) -> object:
        """Return a layer's states, waiting for those that are being loaded."""

    def copy_mamba_state(self, src_index: torch.Tensor, dst_index: torch.Tensor) -> None:
        """Copy whole states to other slots, waiting for those that are being loaded."""


class PagesBesideStates(Protocol):
    """A HybridLinearKVPool."""

    full_attention_layer_id_mapping: Mapping[int, int]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's keys or latents, waiting for those that are being loaded."""


@dataclass(frozen=True, kw_only=True)
class _StateKind:
    page_size: int
    requests: Callable[[], object]
    pool: Callable[[object], object]


_REQUESTS = partial(request_pool, slots=PAGES)
_POOL = partial(hybrid_pool, pages=PAGES)
STATE_KINDS: Mapping[str, _StateKind] = MappingProxyType(
    {
        "mha": _StateKind(page_size=1, requests=_REQUESTS, pool=partial(_POOL, page_size=1)),
        "mha_paged": _StateKind(
            page_size=16, requests=partial(_REQUESTS, extra_buffer=True), pool=_POOL
        ),
        "mla": _StateKind(
            page_size=1,
            requests=partial(_REQUESTS, states="kda"),
            pool=partial(_POOL, family="mla", page_size=1),
        ),
        "mla_envelope": _StateKind(
            page_size=1,
            requests=partial(_REQUESTS, states="kda", envelope=True),
            pool=partial(_POOL, family="mla", page_size=1),
        ),
        "dsa_paged": _StateKind(
            page_size=64,
            requests=partial(_REQUESTS, states="kda", extra_buffer=True),
            pool=partial(_POOL, family="dsa", page_size=64),
        ),
        "dsa_folded": _StateKind(
            page_size=128,
            requests=partial(_REQUESTS, states="kda", extra_buffer=True),
            pool=partial(folded_hybrid_pool, pages=PAGES),
        ),
        "qsa": _StateKind(
            page_size=16,
            requests=partial(_REQUESTS, extra_buffer=True),
            pool=partial(qsa_pool, pages=PAGES),
        ),
        "short_conv": _StateKind(
            page_size=1,
            requests=partial(_REQUESTS, states="short_conv"),
            pool=partial(_POOL, page_size=1),
        ),
        "side_states": _StateKind(
            page_size=1,
            requests=partial(_REQUESTS, side_states=True),
            pool=partial(_POOL, page_size=1),
        ),
    }
)
"""Small hybrids, by name: without an extra buffer SGLang keeps states in a tree of pages of one token alone."""


@dataclass(kw_only=True)
class StateTree(Tree):
    """One worker's prefix tree with states."""

    worker: HybridWorker = field(init=False)
    requests: StateRequests = field(init=False)

    def __post_init__(self) -> None:
        kind = STATE_KINDS[self.name]
        self.worker = HybridWorker(kind.requests, kind.pool)
        super().__post_init__()

    def kinds(self) -> Mapping[str, Kind]:
        """See Tree."""
        return {
            name: Kind(
                make=self.worker.pool, page_size=kind.page_size, tracks_states=kind.page_size > 1
            )
            for name, kind in STATE_KINDS.items()
        }

    def make_requests(self) -> object:
        """See Tree."""
        made: StateRequests = self.worker.extras()["req_to_token_pool"]  # type: ignore[assignment]  # a real pool
        self.requests = made
        return made

    def components(self) -> tuple[object, ...]:
        """See Tree."""
        return ComponentType.FULL, ComponentType.MAMBA

    # ---- states -------------------------------------------------------------------------------

    def allocate_state(self) -> torch.Tensor:
        """Take a free slot for a state: int64 [1]."""
        return self.requests.mamba_allocator.alloc(1).to(torch.int64)

    def state_of(self, match: Match) -> torch.Tensor | None:
        """See Tree."""
        place = match.request.kv.mamba_pool_idx
        return None if place is None else place.reshape(1).to(torch.int64)

    def kept(self, slots: torch.Tensor, state: torch.Tensor) -> list[Rows]:
        """Return the rows that a prompt needs to go on: all of the kv, and the state behind its end."""
        return [*rows_of(self.pool, slots, slots[:0]), *state_rows(self.requests, state)]

    @property
    def free_states(self) -> int:
        """Slots of states that nobody holds."""
        return self.requests.mamba_allocator.available_size()

    def forget(self) -> None:
        """See Tree."""
        super().forget()
        self.requests.mamba_allocator.clear()

    # ---- a request ----------------------------------------------------------------------------

    def wait(self) -> None:
        """Read one layer after the other where a forward pass does: each of its reads waits."""
        pool: PagesBesideStates = self.pool  # type: ignore[assignment]  # a real pool
        for layer in sorted({*self.requests.mamba_map, *pool.full_attention_layer_id_mapping}):
            if layer in self.requests.mamba_map:
                self.requests.mamba2_layer_cache(layer)
            if layer in pool.full_attention_layer_id_mapping:
                pool.get_key_buffer(layer)

    def schedule(self, tokens: Sequence[int], request_id: str) -> Match:
        """Look a prompt up as the scheduler does, which leaves its last token to be computed."""
        request = Req(request_id, "", array("q", tokens), SamplingParams(max_new_tokens=1))
        request.init_next_round_input(self.cache)
        return Match(
            request=request,
            device_tokens=request.prefix_len,
            host_tokens=request.host_hit_length,
            window_tokens=0,
            node=request.best_match_node,
        )
