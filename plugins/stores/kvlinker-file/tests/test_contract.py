"""Every method of the store contract, as a caller of the contract sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from file_shelf import OpenStore, Shelf

from kvlinker.errors import (
    ContractError,
    StoreClosedError,
    TransferRevokedError,
    UnsupportedOperationError,
)
from kvlinker.store import Integrity, ReadStatus, WriteStatus
from kvlinker.testing import FaultAccess, OpaqueMemory, Raise, Rule
from kvlinker.testing.script import Call
from kvlinker_file import FileStore

Key = Callable[..., bytes]
OK, MISS = ReadStatus.OK, ReadStatus.MISS
WRITTEN, EXISTS = WriteStatus.WRITTEN, WriteStatus.EXISTS


def test_capabilities_say_what_the_store_can_do(open_store: OpenStore) -> None:
    can = open_store().capabilities

    assert (can.persistent, can.shared, can.ranged_reads, can.whole_reads) == (
        True,
        True,
        True,
        True,
    )
    assert (can.atomic_batches, can.overwrite, can.leases, can.revocable) == (
        True,
        False,
        True,
        True,
    )
    assert (can.device_memory, can.registers_memory) == (False, False)
    assert can.integrity is Integrity.CHECKSUM
    assert can.max_object_bytes is not None
    assert 0 < can.max_object_bytes < 4 << 20


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("verify", [True, False])
def test_what_was_written_is_read_whole_or_layer_by_layer(
    open_store: OpenStore, shelf: Shelf, key: Key, *, by_layer: bool, verify: bool
) -> None:
    store = open_store(verify=verify)
    keys = [key(i) for i in range(20)]

    assert shelf.put(store, keys) == (WRITTEN,) * 20
    assert store.exists([*keys, key(99)]) == (True,) * 20 + (False,)
    assert shelf.get(store, keys, by_layer=by_layer) == (OK,) * 20


def test_l13_pool_memory_that_the_host_cannot_reach_is_moved_through_its_access(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    shelf = make_shelf(memory=OpaqueMemory())
    store = open_store()
    keys = [key(i) for i in range(32)]  # in three files

    assert shelf.put(store, keys) == (WRITTEN,) * 32
    assert shelf.get(store, keys) == (OK,) * 32
    assert shelf.get(store, keys, by_layer=True) == (OK,) * 32


def test_objects_outlive_a_restart(open_store: OpenStore, shelf: Shelf, key: Key) -> None:
    keys = [key(i) for i in range(20)]
    store = open_store()
    shelf.put(store, keys)
    store.close()

    store = open_store()

    assert store.exists(keys) == (True,) * 20
    assert shelf.get(store, keys) == (OK,) * 20


def test_t4_statuses_match_the_keys_by_position(
    open_store: OpenStore, shelf: Shelf, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(1), key(3)])

    assert shelf.put(store, [key(0), key(1), key(2), key(3)]) == (WRITTEN, EXISTS, WRITTEN, EXISTS)
    assert shelf.get(store, [key(7), key(2), key(8), key(1)]) == (MISS, OK, MISS, OK)
    assert store.delete([key(7), key(2)]) == (False, True)


def test_an_existing_object_is_not_written_again(
    open_store: OpenStore, shelf: Shelf, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    batch = shelf.batch([key(0)])
    shelf.memory.poison()

    answer = store.write([batch], shelf.access, may_publish=lambda: True)

    assert answer == ((EXISTS,),)
    assert shelf.get(store, [key(0)]) == (OK,)


def test_a_key_named_twice_in_one_call_is_stored_once(
    open_store: OpenStore, shelf: Shelf, key: Key
) -> None:
    store = open_store()

    assert shelf.put(store, [key(0), key(1), key(0)]) == (WRITTEN, WRITTEN, EXISTS)
    assert store.stats().objects == 2
    assert shelf.get(store, [key(0), key(1), key(0)]) == (OK, OK, OK)


def test_several_batches_of_different_sizes_become_visible_together(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    store = open_store()
    small, large = make_shelf(row_bytes=100), make_shelf(row_bytes=5000)
    seen = []

    def look() -> bool:
        seen.append(store.exists([key(0), key(1)]))
        return True

    batches = [small.batch([key(0)]), large.batch([key(1)])]
    answer = store.write(batches, small.access, may_publish=look)

    assert answer == ((WRITTEN,), (WRITTEN,))
    assert seen == [(False, False)]
    assert small.get(store, [key(0)]) == (OK,)
    assert large.get(store, [key(1)]) == (OK,)


def test_l7_without_the_permission_to_publish_nothing_stays(
    open_store: OpenStore, shelf: Shelf, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    used = store.stats().used_bytes

    answer = shelf.put(store, [key(0), key(1), key(2)], allowed=False)

    assert answer == (EXISTS, WriteStatus.DISCARDED, WriteStatus.DISCARDED)
    assert store.exists([key(0), key(1), key(2)]) == (True, False, False)
    assert store.stats().objects == 1
    assert store.stats().used_bytes == used
    assert store.stats().counters["discarded"] == 2


def test_the_permission_to_publish_is_asked_once(
    open_store: OpenStore, shelf: Shelf, key: Key
) -> None:
    store = open_store()
    asked = []
    batches = [shelf.batch([key(0)]), shelf.batch([key(0)])]

    def allow() -> bool:
        asked.append(True)
        return True

    for _ in range(2):
        store.write(batches, shelf.access, may_publish=allow)

    assert len(asked) == 2


def test_a_revoked_write_leaves_nothing_and_passes_the_error_on(
    open_store: OpenStore, shelf: Shelf, key: Key
) -> None:
    store = open_store()
    revoked = FaultAccess(
        shelf.access,
        [Rule(fault=Raise(error=TransferRevokedError("taken back")), call=Call.COPY_OUT)],
    )
    batch = shelf.batch([key(0)])

    with pytest.raises(TransferRevokedError):
        store.write([batch], revoked, may_publish=lambda: True)

    assert store.exists([key(0)]) == (False,)
    assert shelf.put(store, [key(0)]) == (WRITTEN,)
    assert shelf.get(store, [key(0)]) == (OK,)


def test_a_revoked_read_passes_the_error_on_and_the_object_stays(
    open_store: OpenStore, shelf: Shelf, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    revoked = FaultAccess(
        shelf.access,
        [Rule(fault=Raise(error=TransferRevokedError("taken back")), call=Call.COPY_IN)],
    )

    with (
        store.open_read(shelf.request([key(0)])) as session,
        pytest.raises(TransferRevokedError),
    ):
        session.read(shelf.plan(1), revoked)

    assert shelf.get(store, [key(0)]) == (OK,)
    assert store.delete([key(0)]) == (True,)


def test_dh9_an_object_of_another_length_or_layout_is_a_miss_and_can_be_replaced(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    store = open_store()
    old, longer = make_shelf(row_bytes=1024), make_shelf(row_bytes=1152)
    renamed = make_shelf(row_bytes=1152, fingerprint=b"another layout")
    old.put(store, [key(0)])

    for shelf, previous in ((longer, old), (renamed, longer)):
        assert shelf.get(store, [key(0)]) == (MISS,)
        assert previous.get(store, [key(0)]) == (OK,)
        assert shelf.put(store, [key(0)]) == (WRITTEN,)
        assert shelf.get(store, [key(0)]) == (OK,)
        assert previous.get(store, [key(0)]) == (MISS,)
    assert store.stats().objects == 1
    store.close()
    assert renamed.get(open_store(), [key(0)]) == (OK,)


def test_ranges_that_cut_across_the_written_ones_are_vouched_for_by_all_they_touch(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    store = open_store()
    writer, reader = make_shelf(layers=4, row_bytes=600), make_shelf(layers=3, row_bytes=800)
    writer.put(store, [key(0)])
    reader.memory.poison()

    with store.open_read(reader.request([key(0)])) as session:
        statuses = session.read(reader.layer_plan(1, 1), reader.access)

    stored = b"".join(writer.content(key(0), layer) for layer in range(4))
    assert statuses == (OK,)
    assert reader.memory.read(reader.spans[1], 0) == stored[800:1600]
    assert reader.memory.read(reader.spans[0], 0) == b"\xff" * 800


def test_b81_an_absent_object_is_a_miss_in_every_form(
    open_store: OpenStore, shelf: Shelf, key: Key
) -> None:
    store = open_store()

    assert shelf.get(store, [key(0)]) == (MISS,)
    assert shelf.get(store, [key(0)], by_layer=True) == (MISS,)
    assert store.delete([key(0)]) == (False,)
    with store.open_read(shelf.request([])) as session:
        assert session.read(shelf.plan(0), shelf.access) == ()


def test_empty_calls_are_answered(open_store: OpenStore, shelf: Shelf) -> None:
    store = open_store()

    assert store.exists([]) == ()
    assert store.delete([]) == ()
    assert store.write([], shelf.access, may_publish=lambda: True) == ()
    assert shelf.put(store, []) == ()
    with_none = store.hold([], seconds=1)
    assert with_none.present == ()
    with_none.release()


def test_k4_clearing_touches_only_the_own_namespace(
    open_store: OpenStore, shelf: Shelf, key: Key
) -> None:
    store = open_store()
    mine, others = [key(i, 1) for i in range(5)], [key(i, 2) for i in range(5)]
    shelf.put(store, mine)
    shelf.put(store, others)

    assert store.clear(mine[0][:12]) == 5
    assert store.exists(mine) == (False,) * 5
    assert shelf.get(store, others) == (OK,) * 5
    store.close()
    assert open_store().exists([*mine, *others]) == (False,) * 5 + (True,) * 5


@pytest.mark.parametrize("prefix", [b"", b"\x01", bytes(13)])
def test_k4_a_prefix_that_is_no_namespace_clears_nothing(
    open_store: OpenStore, shelf: Shelf, key: Key, prefix: bytes
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])

    with pytest.raises(ContractError, match="a namespace has 12 bytes"):
        store.clear(prefix)
    assert store.exists([key(0)]) == (True,)


def test_a_deleted_object_stays_readable_in_an_open_session_and_its_bytes_are_not_reused(
    open_store: OpenStore, shelf: Shelf, key: Key
) -> None:
    store = open_store()
    keys = [key(i) for i in range(4)]
    shelf.put(store, keys)

    with store.open_read(shelf.request(keys)) as session:
        store.delete(keys)
        assert store.exists(keys) == (False,) * 4
        shelf.put(store, [key(i) for i in range(100, 132)])
        assert shelf.read(session, keys) == (OK,) * 4
    assert shelf.get(store, keys) == (MISS,) * 4


def test_a_plan_that_does_not_fit_the_request_is_refused(
    open_store: OpenStore, shelf: Shelf, make_shelf: type[Shelf], key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    other = make_shelf(row_bytes=512)

    with store.open_read(shelf.request([key(0)])) as session:
        with pytest.raises(ContractError, match="does not fit a request of 1 objects of 4096 B"):
            session.read(shelf.plan(2), shelf.access)
        with pytest.raises(ContractError, match="1 objects of 2048 B"):
            session.read(other.plan(1), other.access)


@pytest.mark.parametrize("bad", [b"", b"short", bytes(33)])
def test_keys_of_another_length_are_refused(
    open_store: OpenStore, shelf: Shelf, bad: bytes
) -> None:
    store = open_store()

    with pytest.raises(ContractError, match="an object key has 32 bytes"):
        shelf.put(store, [bad])
    with pytest.raises(ContractError, match="an object key has 32 bytes"):
        store.open_read(shelf.request([bad]))
    assert store.exists([bad]) == (False,)


def test_an_object_that_could_never_fit_fails_and_the_others_are_stored(
    open_store: OpenStore, shelf: Shelf, make_shelf: type[Shelf], key: Key
) -> None:
    store = open_store()
    huge = make_shelf(layers=1, row_bytes=4 << 20, pages=1)

    answer = store.write(
        [huge.batch([key(0)]), shelf.batch([key(1)])], shelf.access, may_publish=lambda: True
    )

    assert answer == ((WriteStatus.FAILED,), (WRITTEN,))


def test_stats_count_objects_bytes_and_events(
    open_store: OpenStore, shelf: Shelf, key: Key, disk_bytes: Callable[[], int]
) -> None:
    store = open_store()
    shelf.put(store, [key(0), key(1)])
    shelf.get(store, [key(0), key(5)])

    stats = store.stats()

    assert (stats.objects, stats.capacity_bytes) == (2, 4 << 20)
    assert stats.used_bytes == disk_bytes()
    assert (stats.counters["written"], stats.counters["missed"]) == (2, 1)


def test_closing_is_idempotent_and_every_later_call_says_so(
    open_store: OpenStore, shelf: Shelf, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    session, hold = store.open_read(shelf.request([key(0)])), store.hold([key(0)], seconds=9)
    store.close()
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.exists([key(0)]),
        lambda: shelf.put(store, [key(0)]),
        lambda: store.open_read(shelf.request([key(0)])),
        lambda: store.hold([key(0)], seconds=1),
        lambda: store.delete([key(0)]),
        lambda: store.clear(bytes(12)),
        store.stats,
        lambda: session.read(shelf.plan(1), shelf.access),
    ]

    for call in calls:
        with pytest.raises(StoreClosedError, match=r"closed; open"):
            call()
    session.close()
    session.close()
    hold.release()
    hold.release()


def test_a_closed_session_reads_no_more(open_store: OpenStore, shelf: Shelf, key: Key) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    session = store.open_read(shelf.request([key(0)]))
    session.close()

    with pytest.raises(StoreClosedError, match="this read session was closed"):
        session.read(shelf.plan(1), shelf.access)


def test_memory_is_not_registered_and_a_caller_who_tries_is_told(
    open_store: OpenStore, shelf: Shelf
) -> None:
    store = open_store()

    with pytest.raises(UnsupportedOperationError, match="registers no memory"):
        store.register([span.region for span in shelf.spans if span.region])

    store.unregister()
    assert not store.capabilities.registers_memory


def test_t5_the_self_test_leaves_nothing_behind(open_store: OpenStore) -> None:
    store = open_store(self_test=True)

    assert store.stats().objects == 0
    assert store.stats().counters["written"] == 1


def test_the_store_is_an_ordinary_store(open_store: OpenStore) -> None:
    assert isinstance(open_store(), FileStore)
