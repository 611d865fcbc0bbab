"""A linker over stores with policies: what is stored comes back byte for byte, and what is kept out is a miss."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from linker_rig import NAMESPACE, PATIENT

from kvlinker.errors import StoreError
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.linker import Linker
from kvlinker.store import Store
from kvlinker.stores.admitting import AdmittingStore
from kvlinker.stores.compressed import CompressedStore
from kvlinker.stores.encrypted import EncryptedStore
from kvlinker.stores.expiring import ExpiringStore
from kvlinker.stores.pinned import PinningStore
from kvlinker.stores.quota import QuotaStore
from kvlinker.stores.retrying import RetryBounds, RetryingStore
from kvlinker.stores.tiered import TieredStore
from kvlinker.stores.write_back import WriteBackLimits
from kvlinker.testing import (
    Call,
    Family,
    FaultStore,
    MemoryStore,
    Raise,
    Rule,
    fake_group,
    page_keys,
)
from kvlinker.testing.small_linkers import load_pages, offload_pages


def shaky(store: Store) -> Store:
    """Fail every third call but for those that a retrying store does not make again."""
    calls = (Call.EXISTS, Call.HOLD, Call.OPEN_READ, Call.READ, Call.WRITE)
    return FaultStore(
        store,
        [Rule(call=call, fault=Raise(error=StoreError("not now")), every=3) for call in calls],
    )


POLICIES: Mapping[str, Callable[[Store], Store]] = {
    "admission": AdmittingStore,
    "expiring": lambda store: ExpiringStore(store, seconds=86_400),
    "pinned": lambda store: PinningStore(
        store, max_bytes=1 << 20, namespaces=[NAMESPACE.digest], uses=1
    ),
    "quota": lambda store: QuotaStore(store, max_bytes=1 << 30),
    "retrying": lambda store: RetryingStore(
        shaky(store), RetryBounds(attempts=50, first_seconds=0.001, lookup_seconds=15, share=1.0)
    ),
    "all": lambda store: QuotaStore(
        AdmittingStore(
            PinningStore(ExpiringStore(store, seconds=86_400), max_bytes=1 << 20, uses=2)
        ),
        max_bytes=1 << 30,
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_what_was_stored_through_a_policy_is_restored_byte_for_byte(name: str) -> None:
    inner, pools = MemoryStore(), fake_group(Family.MHA, pages=16)
    store = POLICIES[name](inner)
    linker = Linker(pools.group, store, NAMESPACE, device=pools.access(), options=PATIENT)

    first = offload_pages(linker, pools, page_keys(4))
    stored = first or offload_pages(linker, pools, page_keys(4))
    found = linker.lookup("a", pools.lookup_transfers(page_keys(4)))
    assert load_pages(linker, pools, page_keys(4), rid="a")

    assert first is (name not in ("admission", "all"))
    assert stored
    assert found == [1, 2, 3, 4]
    names = inner.keys()
    assert {name[:NAMESPACE_BYTES] for name in names} == {NAMESPACE.digest}
    linker.close()
    store.close()


def deep(store: Store) -> Store:
    """Put policies and codecs around a store that is far, behind pins in memory, and a quota around both."""
    expiring = ExpiringStore(RetryingStore(store), seconds=86_400)
    far = CompressedStore(EncryptedStore(expiring, b"\x01" * 32))
    near = PinningStore(MemoryStore(capacity_bytes=1 << 20), max_bytes=1 << 16, uses=1)
    return QuotaStore(TieredStore(near, far, write_back=WriteBackLimits()), max_bytes=1 << 30)


@pytest.mark.parametrize("family", [Family.MHA, Family.DSA])
def test_what_went_through_everything_at_once_is_restored_layer_by_layer_near_and_far(
    family: Family,
) -> None:
    inner, pools = MemoryStore(), fake_group(family, pages=16)
    store = deep(FaultStore(inner, [Rule(call=Call.CLOSE, fault=Raise(error=StoreError("stay")))]))
    linker = Linker(pools.group, store, NAMESPACE, device=pools.access(), options=PATIENT)
    assert offload_pages(linker, pools, page_keys(4))
    assert linker.lookup("near", pools.lookup_transfers(page_keys(4))) == [1, 2, 3, 4]
    assert load_pages(linker, pools, page_keys(4), rid="near")
    linker.close()
    with pytest.raises(StoreError, match="stay"):
        store.close()  # behind what is written back

    again = deep(inner)
    linker = Linker(pools.group, again, NAMESPACE, device=pools.access(), options=PATIENT)
    assert linker.lookup("far", pools.lookup_transfers(page_keys(4))) == [1, 2, 3, 4]
    assert load_pages(linker, pools, page_keys(4), rid="far")

    assert again.stats().counters["far_hits"] == 4 * len(pools.group.entries)
    linker.close()
    again.close()


def test_l8_pages_over_a_quota_are_a_failed_tail_and_those_before_it_are_restored() -> None:
    pools = fake_group(Family.MHA, pages=16)
    size = pools.group.entries[0].part_bytes[0]
    store = QuotaStore(MemoryStore(), max_bytes=3 * size)
    linker = Linker(pools.group, store, NAMESPACE, device=pools.access(), options=PATIENT)

    assert not offload_pages(linker, pools, page_keys(5))

    assert linker.lookup("a", pools.lookup_transfers(page_keys(5))) == [1, 2, 3]
    assert load_pages(linker, pools, page_keys(3), rid="a")
    assert linker.metrics.snapshot().events["offload_errors"] == 1
    linker.close()
    store.close()
