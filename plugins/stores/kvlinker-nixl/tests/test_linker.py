"""A linker over a NIXL store: pages of one engine are restored by another, byte for byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from peer_process import PeerProcess

from kvlinker.errors import RegistrationError
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker, LinkerOptions
from kvlinker.store import Store
from kvlinker.testing import FakePools, Family, HostMemory, fake_group, page_keys
from kvlinker.testing.small_linkers import load_pages, offload_pages
from kvlinker_nixl import NixlStoreOptions, open_nixl_store

DEADLINE_S = 60.0
MakeLinker = Callable[[Store], tuple[Linker, FakePools]]


@pytest.fixture
def make_linker() -> Iterator[MakeLinker]:
    linkers: list[tuple[Linker, Store]] = []

    def make(store: Store) -> tuple[Linker, FakePools]:
        memory = HostMemory() if store.capabilities.device_memory else None
        pools = fake_group(Family.DSA, pages=16, memory=memory)
        linker = Linker(
            pools.group,
            store,
            KeyNamespace(model_id="model", producer="tests"),
            device=pools.access(),
            options=LinkerOptions(breaker_seconds=0.05, lookup_seconds=60),
        )
        linkers.append((linker, store))
        return linker, pools

    yield make
    for linker, store in linkers:
        linker.close()
        store.close()


@pytest.mark.parametrize("staged", [True, False])
def test_pages_are_restored_from_the_file_by_the_next_engine(
    tmp_path: Path, make_linker: MakeLinker, *, staged: bool
) -> None:
    config = {"backend": "POSIX", "path": str(tmp_path / "store"), "capacity": "8MiB"}
    keys = page_keys(4)

    def open_store() -> Store:
        return open_nixl_store(NixlStoreOptions.of_config({**config, "staged": staged}))

    first = open_store()
    linker, pools = make_linker(first)
    assert offload_pages(linker, pools, keys)
    linker.close()
    first.close()

    other, others = make_linker(open_store())
    assert other.lookup("request", others.lookup_transfers(keys)) == [1, 2, 3, 4]
    assert load_pages(other, others, keys, rid="request")


@pytest.mark.parametrize("staged", [True, False])
def test_pages_of_one_engine_are_restored_by_another_from_the_memory_of_a_server(
    empty_peer: PeerProcess, make_linker: MakeLinker, *, staged: bool
) -> None:
    config: Mapping[str, object] = {"backend": "UCX", "server": empty_peer.server, "staged": staged}
    keys = page_keys(4)
    linker, pools = make_linker(open_nixl_store(NixlStoreOptions.of_config(config)))
    other, others = make_linker(open_nixl_store(NixlStoreOptions.of_config(config)))

    assert offload_pages(linker, pools, keys)

    assert other.lookup("request", others.lookup_transfers(keys)) == [1, 2, 3, 4]
    assert load_pages(other, others, keys, rid="request")


def test_b87_a_server_that_is_restarted_between_lookup_and_load_fails_the_load_and_is_used_again(
    peer: PeerProcess, make_linker: MakeLinker
) -> None:
    config = {
        "backend": "UCX",
        "server": peer.server,
        "connect_seconds": 0.5,
        "pause_seconds": 0.05,
    }
    keys = page_keys(4)
    linker, pools = make_linker(open_nixl_store(NixlStoreOptions.of_config(config)))
    assert offload_pages(linker, pools, keys)
    assert linker.lookup("request", pools.lookup_transfers(keys)) == [1, 2, 3, 4]

    peer.kill()
    peer.start()

    assert not load_pages(linker, pools, keys, rid="request")
    end = time.monotonic() + DEADLINE_S
    while not offload_pages(linker, pools, keys):
        assert time.monotonic() < end
    while linker.lookup("again", pools.lookup_transfers(keys)) != [1, 2, 3, 4]:
        assert time.monotonic() < end


def test_b84_regions_over_the_limit_keep_the_linker_from_starting(
    tmp_path: Path, make_linker: MakeLinker
) -> None:
    config = {"backend": "POSIX", "path": str(tmp_path / "store"), "capacity": "8MiB"}
    options = NixlStoreOptions.of_config({**config, "staged": False, "max_regions": 1})
    store = open_nixl_store(options)

    with pytest.raises(RegistrationError, match="max_regions"):
        make_linker(store)

    store.close()
