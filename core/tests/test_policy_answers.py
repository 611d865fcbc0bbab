"""T4 inside policies: a store that answers with the wrong count is refused, and its answers are nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import pytest

from kvlinker.errors import StoreContractError
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.store import ObjectKey, ReadStatus, Store
from kvlinker.stores.admitting import AdmittingStore
from kvlinker.stores.expiring import ExpiringStore
from kvlinker.stores.pinned import PinningStore
from kvlinker.stores.quota import QuotaStore
from kvlinker.stores.read_only import ReadOnlyStore
from kvlinker.stores.retrying import RetryingStore
from kvlinker.testing import Call, FaultStore, MemoryStore, Miscount, Rule
from kvlinker.testing.shelves import Shelf, object_keys

Ask: TypeAlias = Callable[[Shelf, Sequence[ObjectKey]], object]

PAGE = 640
MINE = object_keys(1)[0][:NAMESPACE_BYTES]
COUNTED = (Call.EXISTS, Call.HOLD, Call.WRITE, Call.READ, Call.DELETE)


def miscount(inner: FaultStore, change: int) -> None:
    """Answer with another count from now on."""
    for call in COUNTED:
        inner.script.add(Rule(call=call, fault=Miscount(change=change)))


def write_some_more(shelf: Shelf, keys: Sequence[ObjectKey]) -> object:
    return shelf.write([*keys, *object_keys(3, chain="more")])


def read(shelf: Shelf, keys: Sequence[ObjectKey]) -> object:
    with shelf.open(keys) as session:
        return session.read(shelf.plan(range(len(keys))), shelf.access)


WRITES: Sequence[Ask] = (Shelf.write, write_some_more)
LOOKS: Sequence[Ask] = (
    lambda shelf, keys: shelf.store.exists(keys),
    lambda shelf, keys: shelf.store.delete(keys),
    lambda shelf, _: read(shelf, object_keys(3, chain="unknown")),
)
POLICIES: Mapping[str, tuple[Callable[[Store], Store], Sequence[Ask]]] = {
    "admission": (AdmittingStore, [write_some_more]),
    "expiring": (lambda store: ExpiringStore(store, seconds=86_400), [*WRITES, *LOOKS]),
    "pinned": (lambda store: PinningStore(store, max_bytes=PAGE, namespaces=[MINE]), WRITES),
    "quota": (lambda store: QuotaStore(store, max_bytes=4 * PAGE), WRITES),
    "read_only": (ReadOnlyStore, WRITES),
    "retrying": (RetryingStore, [read]),
}


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", POLICIES)
def test_t4_a_policy_refuses_answers_of_another_count(name: str, change: int) -> None:
    inner, keys = FaultStore(MemoryStore()), object_keys(3)
    wrap, calls = POLICIES[name]
    store = wrap(inner)
    shelf = Shelf(store)
    shelf.write(keys)
    miscount(inner, change)

    for call in calls:
        with pytest.raises(StoreContractError, match=r"FaultStore\.\w+.* at fault"):
            call(shelf, keys)

    store.close()


@pytest.mark.parametrize("change", [-1, 1])
def test_t4_a_hold_of_another_count_pins_nothing_and_is_let_go_of(change: int) -> None:
    memory, keys = MemoryStore(), object_keys(3)
    inner = FaultStore(memory)
    store = PinningStore(inner, max_bytes=8 * PAGE, namespaces=[MINE], uses=1)
    Shelf(memory).stock(keys)
    inner.script.add(Rule(call=Call.HOLD, fault=Miscount(change=change)))

    pinned = store.pin(keys, object_bytes=PAGE)

    assert (pinned, store.pinned_bytes, memory.kept()) == (0, 0, 0)
    assert store.stats().counters["pin_failed"] == 3
    assert Shelf(store).read(keys) == (ReadStatus.OK,) * 3
    store.close()
