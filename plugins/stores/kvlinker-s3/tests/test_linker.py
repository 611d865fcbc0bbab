"""A linker over an object store: whatever the server does, pages that are said to be there are right."""

from __future__ import annotations

import time

from http_proxy import Answer, proxy_to
from s3_server import BUCKET, OpenStore, S3Server, settings_for

from kvlinker.testing import page_keys
from kvlinker.testing.small_linkers import SmallLinker
from kvlinker_s3.client import open_client
from kvlinker_s3.options import S3StoreOptions

KEYS = page_keys(4)
ALL = [1, 2, 3, 4]


def test_pages_of_one_engine_are_loaded_by_another(server: S3Server, open_store: OpenStore) -> None:
    with SmallLinker(open_store(server.port)) as one, SmallLinker(open_store(server.port)) as other:
        assert one.offload(KEYS)

        assert other.lookup(KEYS) == ALL
        assert other.load(KEYS)


def test_b71_a_server_that_goes_between_lookup_and_load_fails_the_load_and_is_used_when_it_is_back(
    server: S3Server, open_store: OpenStore
) -> None:
    more = page_keys(2, chain="more")
    with proxy_to(server.port) as proxy:
        store = open_store(proxy.port, retry_seconds=0.05, pause_seconds=0.01)
        with SmallLinker(store) as linker:
            assert linker.offload(KEYS)
            assert linker.lookup(KEYS) == ALL

            proxy.before = lambda _: Answer(status=503, is_reset=True)
            assert not linker.load(KEYS)
            assert linker.lookup(KEYS) == []
            assert not linker.offload(more)
            proxy.before = None
            time.sleep(0.1)

            assert linker.offload([*KEYS, *more])
            assert linker.lookup(KEYS) == ALL
            assert linker.load(KEYS)


def test_b88_an_object_that_expires_between_lookup_and_load_fails_the_load_and_is_stored_again(
    server: S3Server, open_store: OpenStore, prefix: str
) -> None:
    store = open_store(server.port)
    with SmallLinker(store) as linker:
        assert linker.offload(KEYS)
        assert linker.lookup(KEYS) == ALL
        options = {"url": f"s3://{BUCKET}", "prefix": prefix, "settings": settings_for(server.port)}
        client = open_client(S3StoreOptions.of_config(options))
        names = [item["path"] for page in client.list(prefix) for item in page]

        client.delete([min(names)])

        assert not linker.load(KEYS)
        assert linker.offload(KEYS)
        assert store.stats().objects == len(names)
