"""A linker over a device's pools and a memory store: what it restores came from pinned memory and is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker, LinkerOptions
from kvlinker.pinning import HostPins
from kvlinker.testing import Family, OpaqueAccess, OpaqueMemory, fake_group, page_keys
from kvlinker.testing.small_linkers import load_pages, offload_pages
from kvlinker_memory import MemoryStoreOptions, open_memory_store

KEYS = page_keys(4)
PATIENT = LinkerOptions(
    lookup_seconds=60, load_seconds=60, offload_seconds=60, hold_seconds=60, quiesce_seconds=60
)
"""Deadlines that a busy machine does not reach."""


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

    assert offload_pages(linker, pools, KEYS)
    assert max(linker.lookup("a request", pools.lookup_transfers(KEYS))) == len(KEYS)
    assert load_pages(linker, pools, KEYS, rid="a request")

    assert access.pinned_copies > 0
    assert len(pinned) == store.stats().counters["files_pinned"] > 0
    linker.close()
    store.close()
    access.close()
    assert pinned == {}
