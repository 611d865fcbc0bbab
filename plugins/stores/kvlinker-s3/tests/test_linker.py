"""A linker over an object store: whatever the server does, pages that are said to be there are right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from http_proxy import Answer, proxy_to
from s3_server import BUCKET, OpenStore, S3Server, settings_for

from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker, LinkerOptions
from kvlinker.store import Store
from kvlinker.testing import FakePools, Family, fake_group, page_keys
from kvlinker_s3.client import open_client
from kvlinker_s3.options import S3StoreOptions

DEADLINE_S = 60.0
MakeLinker = Callable[[Store], tuple[Linker, FakePools]]


@pytest.fixture
def make_linker() -> Iterator[MakeLinker]:
    linkers: list[Linker] = []

    def make(store: Store) -> tuple[Linker, FakePools]:
        pools = fake_group(Family.DSA, pages=16)
        linkers.append(
            Linker(
                pools.group,
                store,
                KeyNamespace(model_id="model", producer="tests"),
                device=pools.access(),
                options=LinkerOptions(breaker_seconds=0.05),
            )
        )
        return linkers[-1], pools

    yield make
    for linker in linkers:
        linker.close()


def offload(linker: Linker, pools: FakePools, keys: Sequence[bytes]) -> bool:
    """Store pages, and return what the completion says."""
    transfers = pools.page_transfers(keys, {"kv": range(len(keys))})
    pools.fill(transfers)
    assert linker.offload(transfers)
    end = time.monotonic() + DEADLINE_S
    while not linker.num_completed_offloads():
        assert time.monotonic() < end
        time.sleep(0.001)
    return linker.pop_completed_offload()


def load(linker: Linker, pools: FakePools, keys: Sequence[bytes]) -> bool:
    """Load pages that were looked up, and return whether they came; those that came are right."""
    transfers = pools.page_transfers(keys, {"kv": range(8, 8 + len(keys))})
    pools.memory.poison()
    assert linker.load("request", transfers)
    has_landed = linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    assert not has_landed or pools.wrong_pages(transfers) == ()
    return has_landed


def test_pages_of_one_engine_are_loaded_by_another(
    server: S3Server, open_store: OpenStore, make_linker: MakeLinker
) -> None:
    keys = page_keys(4)
    linker, pools = make_linker(open_store(server.port))
    other, others = make_linker(open_store(server.port))

    assert offload(linker, pools, keys)

    assert other.lookup("request", others.lookup_transfers(keys)) == [1, 2, 3, 4]
    assert load(other, others, keys)


def test_b71_a_server_that_goes_between_lookup_and_load_fails_the_load_and_is_used_when_it_is_back(
    server: S3Server, open_store: OpenStore, make_linker: MakeLinker
) -> None:
    keys, more = page_keys(4), page_keys(2, chain="more")
    with proxy_to(server.port) as proxy:
        store = open_store(proxy.port, retry_seconds=0.05, pause_seconds=0.01)
        linker, pools = make_linker(store)
        assert offload(linker, pools, keys)
        assert linker.lookup("request", pools.lookup_transfers(keys)) == [1, 2, 3, 4]

        proxy.before = lambda _: Answer(status=503, is_reset=True)
        assert not load(linker, pools, keys)
        assert linker.lookup("again", pools.lookup_transfers(keys)) == []
        assert not offload(linker, pools, more)
        proxy.before = None
        time.sleep(0.1)

        assert offload(linker, pools, [*keys, *more])
        assert linker.lookup("request", pools.lookup_transfers(keys)) == [1, 2, 3, 4]
        assert load(linker, pools, keys)


def test_b88_an_object_that_expires_between_lookup_and_load_fails_the_load_and_is_stored_again(
    server: S3Server, open_store: OpenStore, make_linker: MakeLinker, prefix: str
) -> None:
    keys = page_keys(4)
    store = open_store(server.port)
    linker, pools = make_linker(store)
    assert offload(linker, pools, keys)
    assert linker.lookup("request", pools.lookup_transfers(keys)) == [1, 2, 3, 4]
    options = {"url": f"s3://{BUCKET}", "prefix": prefix, "settings": settings_for(server.port)}
    client = open_client(S3StoreOptions.of_config(options))
    names = [item["path"] for page in client.list(prefix) for item in page]

    client.delete([min(names)])

    assert not load(linker, pools, keys)
    assert offload(linker, pools, keys)
    assert store.stats().objects == len(names)
