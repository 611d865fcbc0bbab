"""A prefix comes back with all its pages and the one state at its end, and ends nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvlinker_mamba
from kvlinker.description import (
    Fact,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
    PoolKind,
    RankAxis,
    Replication,
)
from kvlinker.device_access import device_access_for
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker, LinkerOptions
from kvlinker.spans import BufferSpan
from kvlinker.testing import MemoryStore
from kvlinker.testing.pool_memory import HostMemory
from kvlinker.testing.waiting import wait_for
from kvlinker.transfers import HitPolicy, PoolTransfer

PAGE, SLOT, STATES = 4, 8, 6
PATIENT = LinkerOptions(lookup_seconds=60)
STATE_BYTES = {"ssm_state": 16, "conv_state_0": 8, "side_short_conv": 12, "side_ngram": 24}
FACTS: dict[str, Fact] = {
    "kv_family": "mla",
    "kv_format": "bf16",
    "latent_values": SLOT // 2,
    "ssm_format": "fp32",
    "ssm_layout": "value_major",
    "conv_states": 1,
    "conv_format": "bf16",
    "conv_layout": "window_major",
    "conv_window": 2,
    "side_short_conv_format": "bf16",
    "side_ngram_format": "int64",
}
"""A layer of attention between two with states; the last one keeps a side state too, the request another."""


class Rank:
    """One rank's pools, whose bytes say which token, which boundary and which rank they are of."""

    def __init__(self, *, pages: int, rank: int = 0, size: int = 1) -> None:
        self.pages, self.rank = pages, rank
        self.memory = HostMemory()
        self.latent = self.memory.allocate((pages + 1) * PAGE, SLOT, label="latent")
        self.states = {
            role: tuple(
                self.memory.allocate(STATES, size, label=f"{role}[{i}]")
                for i in range(2 if role in ("ssm_state", "conv_state_0") else 1)
            )
            for role, size in STATE_BYTES.items()
        }
        self.group = kvlinker_mamba.build_direct_linker_pool_group(self._description(rank, size))
        self.keys = tuple(f"page-{number}" for number in range(pages))

    def _description(self, rank: int, size: int) -> KVCacheDescription:
        absent = BufferSpan(base_ptr=0, rows=0, row_bytes=12, row_stride=12)
        replicas = dict.fromkeys(("latent", "side_short_conv", "side_ngram"), frozenset[str]())
        (short_conv,) = self.states["side_short_conv"]
        return KVCacheDescription(
            family="mamba",
            page_size=PAGE,
            buffers={
                **self.states,
                "latent": (self.latent,),
                "side_short_conv": (absent, absent, short_conv),
            },
            layers=tuple(
                LayerFacts(layer=i, global_layer=i, kind=kind)
                for i, kind in enumerate(("mamba", "attention", "mamba"))
            ),
            logical_pools=(
                LogicalPool(name="kv", page_size=PAGE),
                LogicalPool(name="mamba", page_size=1, kind=PoolKind.SLOT),
            ),
            facts=FACTS,
            replication=Replication(
                axes=(RankAxis(name="tp", rank=rank, size=size),), sharded_over=replicas
            ),
        )

    @contextmanager
    def linked(self, store: MemoryStore) -> Iterator[Linker]:
        namespace = KeyNamespace(model_id="hybrid", producer="test")
        device = device_access_for(self.group)
        linker = Linker(self.group, store, namespace, device=device, options=PATIENT)
        try:
            yield linker
        finally:
            linker.close()

    # ---- what a model computes ----------------------------------------------------------------

    def compute(self, page: int, slot: int) -> None:
        """Write a page's latents, and the state behind its last token into a slot."""
        for token in range(page * PAGE, (page + 1) * PAGE):
            self.memory.write(self.latent, self.row(token), self.latent_of(token))
        for number, span in enumerate(self.state_spans()):
            self.memory.write(span, slot, self.state_of(page + 1, number, span))

    def state_spans(self) -> list[BufferSpan]:
        return [span for spans in self.states.values() for span in spans]

    def row(self, token: int) -> int:
        """Return where a token is: pages are in descending order, so that none is where it would be by itself."""
        return (self.pages - token // PAGE) * PAGE + token % PAGE

    def latent_of(self, token: int) -> bytes:
        return (1 + token).to_bytes(SLOT, "little")

    def state_of(self, boundary: int, number: int, span: BufferSpan) -> bytes:
        """Return what a state holds: the same on all ranks where it is a replica."""
        rank = 0 if span.label.startswith("side_") else self.rank
        return (1 + boundary * 100 + number * 10 + rank).to_bytes(span.row_bytes, "little")

    def is_restored(self, boundary: int, slot: int) -> bool:
        """Say whether all a forward reads behind a boundary is there."""
        latents = all(
            self.memory.read(self.latent, self.row(token)) == self.latent_of(token)
            for token in range(boundary * PAGE)
        )
        return latents and all(
            self.memory.read(span, slot) == self.state_of(boundary, number, span)
            for number, span in enumerate(self.state_spans())
        )

    # ---- what an engine asks for --------------------------------------------------------------

    def transfers(self, pages: range, slot: int | None) -> list[PoolTransfer]:
        """Return the transfers of some pages, and of the state behind the last of them if it is in a slot."""
        rows = [self.row(token) for token in range(pages.start * PAGE, pages.stop * PAGE)]
        kv = PoolTransfer(name="kv", keys=self.keys[pages.start : pages.stop], device_indices=rows)
        if slot is None:
            return [kv]
        state = PoolTransfer(
            name="mamba",
            keys=(self.keys[pages.stop - 1],),
            device_indices=[slot],
            hit_policy=HitPolicy.TRAILING_PAGES,
        )
        return [kv, state]

    def found(self, linker: Linker, pages: int) -> list[int]:
        asked = [
            PoolTransfer(name="kv", keys=self.keys[:pages]),
            PoolTransfer(
                name="mamba", keys=(self.keys[pages - 1],), hit_policy=HitPolicy.TRAILING_PAGES
            ),
        ]
        return linker.lookup(f"of {pages} pages", asked)


def offload(linker: Linker, transfers: Sequence[PoolTransfer]) -> None:
    assert linker.offload(transfers)
    wait_for(linker.num_completed_offloads, "the offload")
    assert linker.pop_completed_offload()


def stored(rank: Rank, boundaries: Sequence[int], store: MemoryStore | None = None) -> MemoryStore:
    """Return a store with a prompt's pages up to the last of some boundaries, and with the states at all of them."""
    store = store or MemoryStore(capacity_bytes=1 << 22)
    with rank.linked(store) as linker:
        start = 0
        for number, boundary in enumerate(boundaries):
            slot = number % STATES
            for page in range(start, boundary):
                rank.compute(page, slot)
            offload(linker, rank.transfers(range(start, boundary), slot))
            start = boundary
    return store


def restore(rank: Rank, store: MemoryStore, boundary: int, *, slot: int) -> bool:
    """Restore a boundary into pools full of 0xFF, layer by layer, and say whether all of it is there."""
    rank.memory.poison()
    with rank.linked(store) as linker:
        transfers = rank.transfers(range(boundary), slot)
        if boundary not in linker.lookup("request", transfers):
            return False
        assert linker.load("request", transfers)
        assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    return rank.is_restored(boundary, slot)


@pytest.mark.parametrize("boundary", [2, 5])
def test_a_prefix_comes_back_with_all_its_pages_and_the_state_at_its_end(boundary: int) -> None:
    rank = Rank(pages=6)
    store = stored(rank, [2, 5])

    assert restore(rank, store, boundary, slot=4)


def test_b06_side_states_come_back_with_the_states_of_layers() -> None:
    rank = Rank(pages=2)
    store = stored(rank, [2])

    assert restore(rank, store, 2, slot=3)
    for role in ("side_short_conv", "side_ngram"):
        (span,) = rank.states[role]
        number = rank.state_spans().index(span)
        assert rank.memory.read(span, 3) == rank.state_of(2, number, span)


def test_other_slots_and_pages_stay_as_they_were() -> None:
    rank = Rank(pages=4)
    store = stored(rank, [2])

    assert restore(rank, store, 2, slot=3)
    for span in rank.state_spans():
        others = [rank.memory.read(span, slot) for slot in range(STATES) if slot != 3]
        assert others == [b"\xff" * span.row_bytes] * (STATES - 1)
    behind = [rank.memory.read(rank.latent, rank.row(token)) for token in range(2 * PAGE, 4 * PAGE)]
    assert set(behind) == {b"\xff" * SLOT}


def test_l2_boundaries_without_a_stored_state_are_not_offered() -> None:
    rank = Rank(pages=8)
    store = stored(rank, [2, 5])

    with rank.linked(store) as linker:
        assert rank.found(linker, 8) == [2, 5]
        assert rank.found(linker, 4) == [2]
        assert rank.found(linker, 1) == []


def test_l2_a_state_behind_a_hole_in_the_pages_is_not_offered() -> None:
    rank = Rank(pages=6)
    store = stored(rank, [2])
    with rank.linked(store) as linker:
        rank.compute(4, 0)
        offload(linker, rank.transfers(range(4, 5), 0))
        assert rank.found(linker, 6) == [2]


def test_pages_without_any_state_are_no_prefix_until_one_is_stored() -> None:
    rank = Rank(pages=3)
    store = MemoryStore(capacity_bytes=1 << 20)
    for page in range(3):
        rank.compute(page, 0)

    with rank.linked(store) as linker:
        offload(linker, rank.transfers(range(3), None))
        assert rank.found(linker, 3) == []
        offload(linker, rank.transfers(range(3), 0)[1:])
    assert restore(rank, store, 3, slot=5)


def test_a_hit_ends_before_the_last_token_where_the_engine_asks_for_no_more() -> None:
    # A state cannot step back: an engine that must compute the last token anew asks for the pages before it.
    rank = Rank(pages=4)
    store = stored(rank, [3, 4])
    tokens = 4 * PAGE

    with rank.linked(store) as linker:
        assert rank.found(linker, (tokens - 1) // PAGE) == [3]
        assert rank.found(linker, tokens // PAGE) == [3, 4]


@settings(max_examples=25, deadline=None)
@given(boundaries=st.sets(st.integers(1, 7), min_size=1), asked=st.integers(1, 8))
def test_l2_exactly_the_boundaries_with_states_are_offered(
    boundaries: set[int], asked: int
) -> None:
    rank = Rank(pages=8)
    store = stored(rank, sorted(boundaries))

    with rank.linked(store) as linker:
        assert rank.found(linker, asked) == sorted(b for b in boundaries if b <= asked)


def test_g6_replicated_latents_are_stored_once_beside_each_ranks_states() -> None:
    store = MemoryStore(capacity_bytes=1 << 20)
    ranks = [Rank(pages=3, rank=rank, size=2) for rank in range(2)]
    for rank in ranks:
        stored(rank, [3], store)

    # Three pages of latents and two side states once, the states of layers from each rank.
    assert store.stats().objects == 3 + 2 + 2
    assert [restore(rank, store, 3, slot=1) for rank in ranks] == [True, True]


def test_k3_another_number_of_ranks_finds_no_state() -> None:
    store = stored(Rank(pages=3), [3])
    half = Rank(pages=3, rank=0, size=2)

    with half.linked(store) as linker:
        assert half.found(linker, 3) == []
