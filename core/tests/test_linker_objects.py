"""What a page's objects are to a linker: all of them or none, and one rank's never another's."""

from __future__ import annotations

import pytest
from linker_rig import NAMESPACE, PATIENT, linked, wait_for

from kvlinker.description import RankAxis
from kvlinker.device import HostAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.linker import Linker
from kvlinker.pool_keys import GroupKeys
from kvlinker.pools import KV, DevicePoolGroup
from kvlinker.store import Store
from kvlinker.testing import Family, HostMemory, MemoryStore, page_keys
from kvlinker.transfers import PoolTransfer

KEYS = page_keys(4)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("page", [0, 2])
def test_b80_a_page_of_which_half_was_evicted_is_a_miss(part: int, page: int) -> None:
    with linked(Family.MHA_UNPACKED) as rig:
        rig.keep(KEYS)
        objects = GroupKeys(rig.pools.group, NAMESPACE).of_part(KV, part, KEYS)

        rig.memory_store.delete([objects[page]])

        assert rig.linker.lookup("a", rig.asked(KEYS)) == list(range(1, page + 1))


def test_b40_ranks_that_share_a_store_share_no_sharded_object() -> None:
    store = MemoryStore()
    held = [len(store.keys())]

    for rank in range(2):
        offload(store, entry_of(RankAxis(name="tp", rank=rank, size=2)))
        held.append(len(store.keys()))

    assert held == [0, 4, 8]


def test_b40_a_rank_that_comes_again_finds_its_own() -> None:
    store = MemoryStore()
    offload(store, entry_of(RankAxis(name="tp", rank=1, size=2)))

    again = offload(store, entry_of(RankAxis(name="tp", rank=1, size=2)))

    assert again.metrics.snapshot().events["objects_skipped"] == 4
    assert len(store.keys()) == 4


def entry_of(axis: RankAxis) -> DevicePoolEntry:
    span = HostMemory().allocate(rows=16, row_bytes=32, label="kv[0]")
    return DevicePoolEntry(
        name=KV,
        indices_from_pool=KV,
        components=[[span]],
        layer_mapping={0: 0},
        page_size=4,
        rows_are_pages=False,
        rank_axes=[axis],
    )


def offload(store: Store, entry: DevicePoolEntry) -> Linker:
    group = DevicePoolGroup([entry], 1, 4, layout="test/1")
    linker = Linker(group, store, NAMESPACE, device=HostAccess(), options=PATIENT)
    assert linker.offload([PoolTransfer(name=KV, keys=KEYS, device_indices=range(16))])
    wait_for(lambda: linker.num_completed_offloads() == 1, "the offload")
    assert linker.pop_completed_offload()
    linker.close()
    return linker
