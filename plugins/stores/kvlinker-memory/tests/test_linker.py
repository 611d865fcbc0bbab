"""A linker over a device's pools and a memory store: what it restores came from pinned memory and is right."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker, LinkerOptions
from kvlinker.pinning import HostPins
from kvlinker.testing import FakePools, Family, OpaqueAccess, OpaqueMemory, fake_group, page_keys
from kvlinker.transfers import PageKey, PoolTransfer
from kvlinker_memory import MemoryStoreOptions, open_memory_store

KEYS = page_keys(4)
PATIENT = LinkerOptions(
    lookup_seconds=60, load_seconds=60, offload_seconds=60, hold_seconds=60, quiesce_seconds=60
)
"""Deadlines that a busy machine does not reach."""


def transfers(
    pools: FakePools, keys: tuple[PageKey, ...], first_page: int
) -> tuple[PoolTransfer, ...]:
    windows = pools.windows
    pages = {
        name: range(first_page, first_page + min(len(keys), windows.get(name, len(keys))))
        for name in pools.logical_pools
    }
    return pools.page_transfers(keys, pages)


@pytest.mark.parametrize("family", [Family.MHA, Family.DSA, Family.V4], ids=lambda f: f.value)
def test_l13_a_linker_restores_from_pinned_memory_and_closing_lets_go_of_it(
    in_memory: Path, family: Family
) -> None:
    pinned: dict[int, int] = {}
    memory = OpaqueMemory()
    pools = fake_group(family, memory=memory)
    access = OpaqueAccess(
        memory, pins=HostPins(pinned.__setitem__, pinned.__delitem__), pinned_run_bytes=1
    )
    store = open_memory_store(MemoryStoreOptions(path=in_memory / "store", capacity="8MiB"))
    namespace = KeyNamespace(model_id="tiny", producer="test", weights_version="1")
    linker = Linker(pools.group, store, namespace, device=access, options=PATIENT)

    offered = transfers(pools, KEYS, 0)
    pools.fill(offered)
    assert linker.offload(offered)
    while not linker.num_completed_offloads():
        time.sleep(0.001)
    assert linker.pop_completed_offload()
    memory.poison()
    assert max(linker.lookup("a request", pools.lookup_transfers(KEYS))) == len(KEYS)
    wanted = transfers(pools, KEYS, 8)
    assert linker.load("a request", wanted)
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())

    assert not pools.wrong_pages(wanted)
    assert access.pinned_copies > 0
    assert len(pinned) == store.stats().counters["files_pinned"] > 0
    linker.close()
    store.close()
    access.close()
    assert pinned == {}
