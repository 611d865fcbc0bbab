"""Usage of a namespace: what is counted while a store is asked, written to and removed from at once."""

from __future__ import annotations

from collections.abc import Callable

from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.stores.usage import CountedUsage, ToldUsage
from kvlinker.testing import MemoryStore
from kvlinker.testing.shelves import object_keys

KEY, OTHER = object_keys(2)
NAMESPACE = KEY[:NAMESPACE_BYTES]


class _Answering(MemoryStore):
    """Says how much there is, after something has happened."""

    happen: Callable[[], object] = staticmethod(lambda: None)

    def namespace_bytes(self, namespace: bytes) -> int | None:
        del namespace
        self.happen()
        return 100


def write(usage: CountedUsage | ToldUsage, key: bytes, size: int) -> None:
    assert usage.reserve(key, size, limit=1 << 20)
    usage.settle(key, size, is_new=True, is_stored=True)


def test_what_is_written_while_the_store_is_asked_counts_besides_its_answer() -> None:
    store = _Answering()
    usage = ToldUsage(store, NAMESPACE, 0)
    store.happen = lambda: write(usage, KEY, 30)

    usage.recount()

    assert usage.reserve(OTHER, 70, limit=200)
    assert not usage.reserve(OTHER, 1, limit=200)


def test_an_object_that_was_written_again_since_its_removal_began_still_counts() -> None:
    usage = CountedUsage(MemoryStore())
    write(usage, KEY, 60)
    before = usage.writes
    write(usage, KEY, 60)

    usage.forget(KEY, since=before)

    assert not usage.reserve(OTHER, 50, limit=100)
    usage.forget(KEY, since=usage.writes)
    assert usage.reserve(OTHER, 50, limit=100)
