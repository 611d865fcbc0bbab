"""A rank's prefix tree: SGLang's own, over a rank's pools, agreeing with the other ranks as in a server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from engine_frame.server import LinkerOptions
from engine_frame.state_trees import StateTree
from engine_frame.trees import PAGES, Kind, Restored, Tree
from engine_reads import Rows, contents, fill_at_random, overwrite, state_rows
from faulty_store import PATIENT, TOLD
from real_pools import heads_pool, latent_pool, publish_configuration, v4_pool
from sglang.srt.layers.dcp.layout import maybe_dcp_kernel_indices
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel

from kvlinker_sglang.engine.linker import KVLinker

__all__ = [
    "V4_RATIOS",
    "Kept",
    "Ranks",
    "StageTree",
    "Worker",
    "file_store",
    "worker_of",
]

SPOILT = 0xFF
V4_RATIOS = (0, 0, 4, 128, 4, 128, 4)
"""Compress ratios of the layers of a small DeepSeek V4, whose first layers keep windows alone, as Flash's do."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How the workers of one server share its model, and which pools each of them has.

    Every size has pools of one shape, as models with fewer KV heads than ranks have: only keys tell sizes apart.
    """

    kind: str
    """Of pools, a name of `engine_frame`'s."""
    states: bool = False
    """It is one of those with states."""
    core: str = "rust"
    tp: int = 1
    """Ranks that split attention heads."""
    cp: int = 1
    """Groups of such ranks that split the tokens of a prompt while it is computed."""
    dcp: int = 1
    """Neighbours among those that split heads that take the slots of a page in turn."""
    stages: tuple[tuple[int, int], ...] = ()
    """Global layers [start, end) of each stage of a pipeline, where there is one."""
    are_alike: bool = False
    """Pages are the same on all ranks of a stage; states never are."""

    @property
    def size(self) -> int:
        """Processes."""
        return self.stage_size * max(1, len(self.stages))

    @property
    def stage_size(self) -> int:
        """Processes of a stage."""
        return self.tp * self.cp

    def stage(self, rank: int) -> int:
        """Return the number of a rank's stage."""
        return rank // self.stage_size

    def share(self, rank: int) -> int:
        """Return the number of a rank's share of pages: groups that split tokens keep the same in the end."""
        if self.dcp > 1:
            return 1 + rank % self.dcp
        return 10 * self.stage(rank) + (1 if self.are_alike else 1 + rank % self.tp)

    def places(self, rank: int) -> Mapping[str, int]:
        """Return where SGLang places a process in its stage: attention heads are split within neighbours."""
        place = rank % self.stage_size
        return {
            "tp_size": self.stage_size,
            "tp_rank": place,
            "attn_tp_size": self.tp,
            "attn_tp_rank": place % self.tp,
            "attn_cp_size": self.cp,
            "attn_cp_rank": place // self.tp,
            "enable_prefill_cp": self.cp > 1,
            "moe_tp_size": self.stage_size,
            "dcp_size": self.dcp,
            "dcp_enabled": self.dcp > 1,
            "dcp_rank": place % self.dcp,
            "attn_dcp_size": self.dcp,
            "attn_dcp_rank": place % self.dcp,
        }

    def groups(self, rank: int) -> Mapping[str, object]:
        """Make SGLang's groups of processes, on every rank alike, and return this one's."""
        stages = [range(at, at + self.stage_size) for at in range(0, self.size, self.stage_size)]
        heads = [
            stage[at : at + self.tp] for stage in stages for at in range(0, len(stage), self.tp)
        ]
        tokens = [stage[at :: self.tp] for stage in stages for at in range(self.tp)]
        return {
            "tp_cache_group": _group_of(rank, stages),
            "attn_tp_cache_group": _group_of(rank, heads),
            "attn_cp_cache_group": _group_of(rank, tokens),
        }


def _group_of(rank: int, members: Sequence[Sequence[int]]) -> object:
    groups = {tuple(ranks): torch.distributed.new_group([*ranks]) for ranks in members}
    return next(group for ranks, group in groups.items() if rank in ranks)


@dataclass(kw_only=True)
class StageTree(Tree):
    """The tree of a stage of a pipeline."""

    layers: tuple[int, int]
    """Global layers [start, end)."""

    def kinds(self) -> Mapping[str, Kind]:
        """See Tree."""
        start, end = self.layers
        mha = partial(heads_pool, pages=PAGES, start_layer=start, layers=end - start)
        mla = partial(latent_pool, pages=PAGES, start_layer=start, layers=end - start)
        v4 = partial(v4_pool, V4_RATIOS, pages=PAGES, start=start, end=end)
        return {
            "mha": Kind(make=mha, page_size=16),
            "mla": Kind(make=mla, page_size=16),
            "v4": Kind(make=v4, page_size=256, window=128),
        }


@dataclass(kw_only=True)
class ShareTree(Tree):
    """The tree of a rank that takes the slots of a page in turn with others, as SGLang sizes pool and allocator."""

    ranks: int
    rank: int

    def kinds(self) -> Mapping[str, Kind]:
        """See Tree."""
        mla = partial(latent_pool, pages=PAGES, page_size=16)
        return {"mla": Kind(make=mla, page_size=16 * self.ranks)}

    def rows(self, slots: torch.Tensor) -> list[Rows]:
        """Return the rows in which SGLang keeps the rank's share of whole pages."""
        numbers = maybe_dcp_kernel_indices(slots, self.ranks, self.rank)
        assert isinstance(self.pool, MLATokenToKVPool)
        return [Rows(buffer, numbers) for buffer in self.pool.kv_buffer]


@dataclass(kw_only=True)
class Worker:
    """One rank: its tree, its linker, and what both have of prompts."""

    rank: int
    share: int
    """Number of its share of pages: ranks with equal bytes have equal ones."""
    tree: Tree
    linker: KVLinker

    def tokens(self, pages: int, *, first: int = 100) -> list[int]:
        """Return a prompt of whole pages."""
        return list(range(first, first + pages * self.tree.kind.page_size))

    def kept(self, slots: torch.Tensor, state: torch.Tensor | None) -> list[Rows]:
        """Return the rows that a prompt needs to go on."""
        if isinstance(self.tree, StateTree):
            assert state is not None
            return self.tree.kept(slots, state)
        return self.tree.rows(slots)

    def take(self, pages: int) -> None:
        """Take slots, so that what comes next is placed elsewhere than before."""
        self.tree.allocate(pages)
        if isinstance(self.tree, StateTree):
            self.tree.allocate_state()

    def spoil(self) -> None:
        """Write over all that the pools hold, as a new process would find it."""
        slot = torch.arange(self.tree.kind.page_size)
        overwrite(self.kept(slot, slot[:1]), SPOILT)

    def store(self, pages: int, *, first: int = 100) -> Kept:
        """Have a prompt of random bytes stored, and return what was kept of it; pools and tree are empty then."""
        tokens, slots = self.tokens(pages, first=first), self.tree.allocate(pages)
        state = self.tree.allocate_state() if isinstance(self.tree, StateTree) else None
        fill_at_random(self.kept(slots, state), seed=self.share)
        if isinstance(self.tree, StateTree) and state is not None:
            fill_at_random([*state_rows(self.tree.requests, state)], seed=100 + self.rank)
        kept = self.digest(slots, state)
        self.tree.insert(tokens, slots, state=state)
        self.tree.settle()
        self.tree.forget()
        self.spoil()
        return kept

    def restore(self, tokens: Sequence[int], request_id: str) -> tuple[Restored, Kept]:
        """Look a prompt up, load what is offered, and return that and what the pools have of it."""
        restored = self.tree.restore(tokens, request_id)
        return restored, self.digest(restored.slots, self.tree.state_of(restored.match))

    def digest(self, slots: torch.Tensor, state: torch.Tensor | None) -> Kept:
        """Return what the pools hold at some slots; nothing at none."""
        if not len(slots):
            return Kept()
        digest, rows = hashlib.sha256(), contents(self.kept(slots, state))
        for part in rows:
            digest.update(part.numpy().tobytes())
        places = [*slots.tolist(), *([] if state is None else state.tolist())]
        return Kept(digest=digest.hexdigest(), slots=tuple(places), buffers=len(rows))


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What pools hold of a prompt."""

    digest: str = ""
    """Of all bytes, buffer by buffer."""
    slots: tuple[int, ...] = ()
    """Where they are, the state's slot last."""
    buffers: int = 0

    def moved(self, other: Kept) -> bool:
        """Whether another one has every page, and the state, at another place."""
        return len(self.slots) == len(other.slots) and all(
            a != b for a, b in zip(self.slots, other.slots, strict=True)
        )


@contextmanager
def worker_of(
    ranks: Ranks,
    rank: int,
    store: Mapping[str, object],
    *,
    limits: Mapping[str, float] = PATIENT,
) -> Iterator[Worker]:
    """Give a rank its tree, linked to a store, and close the linker behind."""
    publish_configuration()
    groups = ranks.groups(rank)
    with get_parallel().override(**ranks.places(rank)):
        tree = _tree_of(ranks, rank)
        tree.params = replace(tree.params, **groups)
        tree.cache = UnifiedRadixCache(tree.params)
        kind = TOLD if store["plugin"] == "faulty" else LinkerOptions()
        linker = tree.attach(replace(kind, extra_config=_config(store, limits)))
        assert isinstance(linker, KVLinker)
        try:
            yield Worker(rank=rank, share=ranks.share(rank), tree=tree, linker=linker)
        finally:
            linker.close()


def _tree_of(ranks: Ranks, rank: int) -> Tree:
    if ranks.states:
        return StateTree(name=ranks.kind, core=ranks.core)
    if ranks.dcp > 1:
        return ShareTree(name=ranks.kind, core=ranks.core, ranks=ranks.dcp, rank=rank % ranks.dcp)
    if ranks.stages:
        return StageTree(name=ranks.kind, core=ranks.core, layers=ranks.stages[ranks.stage(rank)])
    return Tree(name=ranks.kind, core=ranks.core)


def _config(store: Mapping[str, object], limits: Mapping[str, float]) -> dict[str, object]:
    return {
        "store": dict(store),
        "namespace": {"weights_version": "1"},  # no file says which weights these workers have
        "min_hit_tokens": 1,
        "limits": dict(limits),
    }


def file_store(folder: Path) -> dict[str, object]:
    """Return the store of a server, which all of its ranks use."""
    return {"plugin": "file", "options": {"path": str(folder), "capacity": "64MiB"}}
