"""Objects of a bucket: what a server does wrong is a miss or an error in time, and never a wrong byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from bucket_server import BUCKET, BucketServer

from kvlinker.errors import StoreError, StoreTimeoutError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker_nixl import NixlStoreOptions, open_nixl_store
from kvlinker_nixl.object_store import ObjectStore

OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
OpenStore = Callable[..., ObjectStore]


@pytest.fixture
def open_store(prefix: str) -> Iterator[OpenStore]:
    """Give what opens a store on a server, impatient; it is closed after the test."""
    stores: list[ObjectStore] = []

    def open_it(server: BucketServer, **options: object) -> ObjectStore:
        place = {"backend": "OBJ", "bucket": BUCKET, "prefix": prefix, "endpoint": server.endpoint}
        keys = {"access_key": "kv", "secret_key": "${env:KV_NIXL_TEST_SECRET}"}
        quick = {"connect_seconds": 1.0, "transfer_seconds": 1.0, "pause_seconds": 0.5}
        config = {**place, **keys, **quick, "close_seconds": 0.5, **options}
        store = open_nixl_store(NixlStoreOptions.of_config(config))
        assert isinstance(store, ObjectStore)
        stores.append(store)
        return store

    yield open_it
    for store in stores:
        store.close()


@pytest.fixture
def own_bucket() -> Iterator[BucketServer]:
    """Give a server that a test may stop."""
    server = BucketServer()
    yield server
    server.kill()


def names_of(bucket: BucketServer, prefix: str) -> list[str]:
    """Return the names of a store's objects."""
    return sorted(item["path"] for page in bucket.client().list(prefix) for item in page)


def test_t1_a_shorter_object_is_no_object(
    bucket: BucketServer, prefix: str, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(bucket))
    keys = object_keys(3)
    shelf.stock(keys)
    client = bucket.client()
    for name, size in zip(names_of(bucket, prefix), (0, 100, 700), strict=True):
        client.put(name, bytes(client.get(name).buffer())[:size])

    statuses = shelf.read(keys)

    assert OK not in statuses
    shelf.stock(keys)
    assert shelf.read(keys) == (OK,) * 3


def test_b71_an_object_that_goes_between_its_header_and_its_payload_is_a_miss(
    bucket: BucketServer, prefix: str, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(bucket))
    keys = object_keys(3)
    shelf.stock(keys)
    with shelf.open(keys) as session:
        assert shelf.read(keys, session=session, layer=0) == (OK,) * 3
        bucket.client().delete(names_of(bucket, prefix)[1])

        statuses = shelf.read(keys, session=session, layer=3)

    assert sorted(status.value for status in statuses) == ["miss", "ok", "ok"]


def test_t6_a_dead_server_costs_one_wait(own_bucket: BucketServer, open_store: OpenStore) -> None:
    shelf = Shelf(open_store(own_bucket))
    keys = object_keys(3)
    shelf.stock(keys)
    own_bucket.kill()

    began = time.monotonic()
    with pytest.raises(StoreTimeoutError):
        shelf.read(keys)
    assert time.monotonic() - began < 20

    with pytest.raises(StoreTimeoutError, match="not asked again yet"):
        shelf.read(keys)


def test_l5_a_server_that_is_silent_within_a_transfer_is_answered_for_in_time(
    own_bucket: BucketServer, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(own_bucket))
    keys = object_keys(2)
    shelf.stock(keys)
    with shelf.open(keys) as session:
        assert shelf.read(keys, session=session, layer=0) == (OK, OK)
        own_bucket.freeze()

        began = time.monotonic()
        with pytest.raises(StoreTimeoutError, match="transfer_seconds"):
            shelf.read(keys, session=session, layer=1)

        assert time.monotonic() - began < 20
        own_bucket.thaw()
        time.sleep(0.6)
        assert shelf.read(keys, session=session, layer=1) == (OK, OK)


def test_a_write_that_no_server_takes_is_failed_and_counted(
    own_bucket: BucketServer, open_store: OpenStore
) -> None:
    store = open_store(own_bucket)
    shelf = Shelf(store)
    keys = object_keys(2)

    def stop_and_allow() -> bool:
        own_bucket.freeze()
        return True

    statuses = shelf.write(keys, may_publish=stop_and_allow)
    own_bucket.thaw()

    assert set(statuses) == {WriteStatus.FAILED}
    assert store.capabilities.shared


def test_a_secret_is_in_no_message(
    bucket: BucketServer, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KV_NIXL_TEST_SECRET")
    with pytest.raises(StoreError, match="KV_NIXL_TEST_SECRET is not set"):
        open_store(bucket)
    monkeypatch.setenv("KV_NIXL_TEST_SECRET", "hunter2 hunter2")

    with pytest.raises(StoreError, match="look at bucket, endpoint, region and keys") as caught:
        open_store(bucket, bucket="no-such-bucket")

    assert "hunter2" not in f"{caught.value!r}{NixlStoreOptions(backend='OBJ', bucket='b')!r}"  # type: ignore[arg-type]  # as configurations say it
