"""Pages of real pools come back whole, to other slots of other pools, and touch nothing else."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from described_pools import DESCRIBED
from engine_reads import Rows, contents, fill_at_random, overwrite, rows_of, state_rows
from pool_groups import KEYS, PoolGroup, group_of, load, offload

from kvlinker.description import IndexerKind, KVCacheDescription
from kvlinker.testing.engines import PoolExample
from kvlinker.testing.memory_store import MemoryStore
from kvlinker.transfers import HitPolicy, PoolTransfer

POLICIES = {
    "kv": HitPolicy.ALL_PAGES,
    "swa": HitPolicy.TRAILING_PAGES,
    "mamba": HitPolicy.TRAILING_PAGES,
}
STORED = {"kv": (3, 1), "swa": (2, 4), "mamba": (5, 2)}
LOADED = {"kv": (1, 4), "swa": (3, 1), "mamba": (2, 7)}
"""Pages of the index spaces, in the order of the keys; a state is a page of one slot."""

Pages = Mapping[str, tuple[int, ...]]


def slots(worker: PoolGroup, pages: tuple[int, ...], size: int | None = None) -> torch.Tensor:
    size = size or worker.group.page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def transfers(worker: PoolGroup, pages: Pages) -> list[PoolTransfer]:
    return [
        PoolTransfer(
            name=name,
            keys=KEYS,
            device_indices=slots(worker, pages[name], 1 if name == "mamba" else None),
            hit_policy=POLICIES[name],
        )
        for name in sorted(set(worker.group.sources.values()))
    ]


def rows(worker: PoolGroup, pages: Pages) -> list[Rows]:
    kv, swa = slots(worker, pages["kv"]), slots(worker, pages["swa"])
    layers = worker.description.layers
    indexers = [facts.indexer for facts in layers if facts.indexer is not IndexerKind.NONE]
    shared = [place for place, kind in enumerate(indexers) if kind is IndexerKind.SHARED]
    states = slots(worker, pages["mamba"], 1)
    return [
        *rows_of(worker.target, kv, swa, without_index=shared),
        *(found for draft in worker.drafts for found in rows_of(draft, kv, swa)),
        *state_rows(worker.requests, states),
    ]


@pytest.fixture(params=DESCRIBED, ids=operator.attrgetter("name"))
def example(request: pytest.FixtureRequest) -> PoolExample:
    assert isinstance(request.param, PoolExample)
    return request.param


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore()
    yield store
    store.close()


@pytest.mark.supports(engine="sglang", level="pool")
def test_pages_come_back_to_other_slots_of_another_process(
    example: PoolExample, store: MemoryStore, proves: Callable[[KVCacheDescription], None]
) -> None:
    first = group_of(example)
    proves(first.description)
    fill_at_random(rows(first, STORED), seed=1)
    offload(first.group, transfers(first, STORED), store)
    second = group_of(example)
    overwrite(rows(second, LOADED), 0xFF)

    load(second.group, transfers(second, LOADED), store)

    expected, restored = contents(rows(first, STORED)), contents(rows(second, LOADED))
    assert len(restored) == len(expected) > 0
    assert all(map(torch.equal, restored, expected))


def test_nothing_else_is_written(example: PoolExample, store: MemoryStore) -> None:
    first = group_of(example)
    fill_at_random(rows(first, STORED), seed=2)
    offload(first.group, transfers(first, STORED), store)
    second = group_of(example)
    overwrite(rows(second, LOADED), 0xFF)

    load(second.group, transfers(second, LOADED), store)

    assert all(bool((found.read_others() == 0xFF).all()) for found in rows(second, LOADED))


def test_g5_every_way_of_keeping_values_has_keys_of_its_own() -> None:
    fingerprints = {one.name: group_of(one).group.fingerprint for one in DESCRIBED}

    same = {
        "mha-second_stage": "its layers are in the keys beside the fingerprint",
        "mha-fp8_on_cpu": "the same values as mha-fp8, under another type",
        "mha-fp4_by_method": "the same blocks as mha-fp4, in a pool of another class",
        "mha-fp4_by_method_draft": "the same blocks as mha-fp4_draft, in pools of another class",
        "swa-drafts_full": "a draft without windows is addressed alike",
        "hybrid-mha-extra_buffer": "states are tracked at other times",
        "hybrid-mha-replay": "rings of updates are no part of a state",
        "hybrid-mla-envelope": "states lie elsewhere, and have the same bytes",
        "minimax-nvfp4_second_stage": "its layers are in the keys beside the fingerprint",
        "dsa-dead_indexer": "a dead index is left out like an absent one",
    }
    different = {name: digest for name, digest in fingerprints.items() if name not in same}

    assert len(set(different.values())) == len(different)
