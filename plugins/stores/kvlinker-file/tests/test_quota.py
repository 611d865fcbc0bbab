"""A quota around files counts what lay there before, and what every opener has written."""

from __future__ import annotations

from file_shelf import OpenStore, Shelf, make_key

from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.stores.quota import QuotaStore

WRITTEN, FULL = WriteStatus.WRITTEN, WriteStatus.FULL
MISS = ReadStatus.MISS


def test_a_store_of_files_tells_what_each_namespace_has(open_store: OpenStore) -> None:
    store, shelf = open_store(), Shelf()
    keys = [make_key(i) for i in range(5)]
    other = bytes(NAMESPACE_BYTES) + keys[0][NAMESPACE_BYTES:]
    namespace = keys[0][:NAMESPACE_BYTES]
    assert store.namespace_bytes(namespace) == 0

    shelf.put(store, [*keys, other])
    size = store.namespace_bytes(bytes(NAMESPACE_BYTES))

    assert size > 0
    assert store.namespace_bytes(namespace) == 5 * size
    store.delete(keys[:2])
    assert store.namespace_bytes(namespace) == 3 * size
    assert store.namespace_bytes(b"\xff" * NAMESPACE_BYTES) == 0


def test_t3_a_quota_holds_across_restarts_and_openers(open_store: OpenStore) -> None:
    before, shelf = open_store(), Shelf()
    keys = [make_key(i) for i in range(12)]
    namespace = keys[0][:NAMESPACE_BYTES]
    shelf.put(before, keys[:4])
    size = before.namespace_bytes(namespace) // 4
    before.close()
    first = QuotaStore(open_store(), max_bytes=8 * size, refresh_seconds=0)
    second = QuotaStore(open_store(), max_bytes=8 * size, refresh_seconds=0)

    answers = [shelf.put(first, keys[4:6]), shelf.put(second, keys[6:8])]
    late = shelf.put(first, keys[8:10]), shelf.put(second, keys[8:10])

    assert answers == [(WRITTEN,) * 2] * 2
    assert late == ((FULL,) * 2,) * 2
    assert first.namespace_bytes(namespace) == 8 * size
    assert second.delete(keys[:1]) == (True,)
    assert shelf.put(first, keys[10:12]) == (WRITTEN, FULL)
    assert shelf.get(first, keys[11:12]) == (MISS,)
