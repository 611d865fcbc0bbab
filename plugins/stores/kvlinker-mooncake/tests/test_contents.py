"""What lies in a real cluster: other objects under the same names, leases, many buffers, and two stores at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping

import numpy as np
import pytest
from fake_mooncake import wait_until
from mooncake_cluster import LEASE_SECONDS, MooncakeCluster, OpenStore
from wide_pages import WidePages

from kvlinker.device import HostAccess
from kvlinker.errors import RegistrationError, UnsupportedOperationError
from kvlinker.moving import Mover, current_mover, using_mover
from kvlinker.spans import MemoryRegion
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.stores.encrypted import EncryptedStore
from kvlinker.stores.tiered import TieredStore
from kvlinker.testing import MemoryStore
from kvlinker.testing.shelves import LAYERS, Shelf, allow, object_keys
from kvlinker_mooncake.names import Names

OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
WRITTEN, EXISTS = WriteStatus.WRITTEN, WriteStatus.EXISTS


@pytest.mark.parametrize("length", [1, 639, 641, 4096])
def test_b81_an_object_of_another_length_is_a_miss_and_is_replaced(
    cluster: MooncakeCluster, open_quickly: OpenStore, prefix: str, length: int
) -> None:
    shelf, keys = Shelf(open_quickly()), object_keys(2)
    shelf.stock(keys[1:])
    assert cluster.plain_client().put(Names(prefix).of_object(keys[0]), b"x" * length) == 0

    assert shelf.read(keys) == (MISS, OK)
    assert shelf.read(keys, layer=1) == (MISS, OK)
    assert shelf.write(keys) == (WRITTEN, EXISTS)
    assert shelf.read(keys) == (OK, OK)


def test_t1_what_is_no_object_is_corrupt_and_dropped_where_objects_have_headers(
    cluster: MooncakeCluster, prefix: str, open_quickly: OpenStore
) -> None:
    shelf = Shelf(open_quickly(staged=True))
    whole, foreign, short = object_keys(3)
    shelf.stock([whole, foreign, short])
    plain = cluster.plain_client()
    for key, value in ((foreign, b"y" * 1000), (short, b"z")):
        name = Names(prefix).of_object(key)
        assert plain.remove(name, force=True) == 0
        assert plain.put(name, value) == 0

    statuses = shelf.read([whole, foreign, short])

    assert statuses[0] is OK
    assert set(statuses[1:]) <= {MISS, CORRUPT}
    assert shelf.write([foreign, short]) == (WRITTEN, WRITTEN)
    assert shelf.read([whole, foreign, short]) == (OK,) * 3


def test_already_there_is_told_apart_from_written_between_two_clients(
    cluster: MooncakeCluster, open_store: OpenStore, open_quickly: OpenStore
) -> None:
    keys = object_keys(3)
    shelf, beside = Shelf(open_store(cluster)), Shelf(open_quickly())

    assert beside.write(keys[:1]) == (WRITTEN,)
    assert shelf.write(keys) == (EXISTS, WRITTEN, WRITTEN)
    assert beside.write(keys) == (EXISTS,) * 3
    assert beside.read(keys) == (OK,) * 3


@pytest.mark.parametrize(("ranges", "pages"), [(60, 40), (1500, 2)])
def test_more_buffers_than_a_call_may_have_come_back(
    open_quickly: OpenStore, ranges: int, pages: int
) -> None:
    wide, keys = WidePages(ranges=ranges, pages=pages), object_keys(pages)
    store = open_quickly()
    store.register([wide.region])

    (written,) = store.write([wide.batch(keys)], HostAccess(), may_publish=allow)
    with store.open_read(wide.request(keys)) as session:
        statuses = session.read(wide.target, HostAccess())

    assert (written, statuses) == ((WRITTEN,) * pages, (OK,) * pages)
    assert wide.has_landed


def test_b84_a_region_that_a_real_client_refuses_takes_the_others_with_it(
    open_quickly: OpenStore,
) -> None:
    store = open_quickly()
    memory = np.zeros(3 * 4096, dtype=np.uint8)
    first, second = (
        MemoryRegion(base_ptr=memory.ctypes.data + start, size_bytes=4096, owner=memory)
        for start in (0, 8192)
    )

    with pytest.raises(RegistrationError, match=r"region 2 of 3 .* code -600"):
        store.register([first, second, first])

    store.register([first, second])
    store.unregister()


@pytest.mark.parametrize("mover", [None, current_mover()], ids=["plain", "usual"])
def test_t1_a_changed_byte_is_told_whoever_copies_and_makes_the_checksums(
    cluster: MooncakeCluster, open_quickly: OpenStore, prefix: str, mover: Mover | None
) -> None:
    wide, keys = WidePages(ranges=16, pages=4, row_bytes=4096), object_keys(4)
    store = open_quickly(staged=True)
    with using_mover(mover):
        store.write([wide.batch(keys)], HostAccess(), may_publish=allow)
        cluster.alter(Names(prefix).of_object(keys[2]), wide.array[0, 2].tobytes())

        with store.open_read(wide.request(keys)) as session:
            statuses = session.read(wide.target, HostAccess())

    assert statuses == (OK, OK, CORRUPT, OK)
    assert wide.landed >= {0, 1, 3}
    assert store.exists(keys) == (True, True, False, True)


def test_a_session_that_outlasts_its_lease_goes_on_or_misses_what_is_gone(
    open_quickly: OpenStore,
) -> None:
    store = open_quickly()
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)

    with shelf.open(keys) as session:
        assert shelf.read(keys, session=session, layer=0) == (OK, OK)
        time.sleep(2 * LEASE_SECONDS)
        assert shelf.read(keys, session=session, layer=1) == (OK, OK)
        time.sleep(2 * LEASE_SECONDS)
        assert store.delete(keys[:1]) == (True,)
        assert set(shelf.read(keys, session=session, layer=2)) == {MISS, OK}


def test_what_is_deleted_while_it_is_leased_is_hidden_and_then_goes(
    open_quickly: OpenStore,
) -> None:
    store = open_quickly(contended_seconds=0)
    beside = open_quickly()
    shelf, numbers = Shelf(store), itertools.count()

    def was_hidden() -> bool:
        """Delete what was just found, and return whether its lease was not over by then."""
        keys = object_keys(2, chain=f"round {next(numbers)}")
        shelf.stock(keys)
        assert store.exists(keys) == (True, True)  # which leases them
        assert store.delete(keys) == (True, True)
        hidden = store.stats().counters["hidden"]
        assert store.exists(keys) == (False, False)
        assert shelf.read(keys) == (MISS, MISS)
        assert store.delete(keys) == (False, False)
        time.sleep(2 * LEASE_SECONDS)
        assert shelf.write(keys) == (WRITTEN, WRITTEN)
        assert beside.exists(keys) == (True, True)
        assert store.stats().counters["hidden"] == 0
        return hidden == len(keys)

    wait_until(was_hidden)  # a busy machine may take longer than a lease lasts


def test_a_real_client_is_measured_at_open_and_nothing_of_the_probe_stays(
    cluster: MooncakeCluster, open_store: OpenStore
) -> None:
    store = open_store(cluster, reads="auto")
    shelf, keys = Shelf(store), object_keys(2)

    shelf.stock(keys)

    assert store.stats().objects == 2
    layer = 1 if store.capabilities.ranged_reads else None
    assert shelf.read(keys, layer=layer) == (OK, OK)


def test_a_store_that_gives_memory_itself_says_that_it_is_not_persistent(
    own_cluster: MooncakeCluster, open_store: OpenStore
) -> None:
    own_cluster.kill_segments()
    store = open_store(own_cluster, segment_bytes=16 << 20, reads="whole")
    shelf, keys = Shelf(store), object_keys(4)

    wait_until(lambda: shelf.write(keys) == (EXISTS,) * 4)  # the dead segment counts for a while

    assert shelf.read(keys) == (OK,) * 4
    assert not store.capabilities.persistent
    assert not store.capabilities.ranged_reads


def test_pins_and_preferences_are_taken_by_a_real_client(
    cluster: MooncakeCluster, open_store: OpenStore
) -> None:
    pinned = open_store(cluster, soft_pin_seconds=60, segments=["nowhere:1"])
    shelf, keys = Shelf(pinned), object_keys(2)

    assert shelf.write(keys) == (WRITTEN, WRITTEN)
    assert shelf.read(keys) == (OK, OK)


def test_a_staged_store_can_be_encrypted(
    cluster: MooncakeCluster, prefix: str, open_quickly: OpenStore
) -> None:
    staged = open_quickly(staged=True)
    shelf, keys = Shelf(EncryptedStore(staged, b"s" * 32)), object_keys(3)

    assert shelf.write(keys) == (WRITTEN,) * 3
    assert shelf.read(keys) == (OK,) * 3
    plain = cluster.plain_client().get(Names(prefix).of_object(keys[0]))
    assert shelf.payload(keys[0])[: 640 // LAYERS] not in plain


def test_without_a_metrics_server_nothing_is_counted(open_quickly: OpenStore) -> None:
    store = open_quickly(metrics="")

    stats = store.stats()

    assert (stats.objects, stats.used_bytes, stats.capacity_bytes) == (0, 0, None)
    assert stats.counters["uncounted"] == 1


def test_l4_a_store_that_reads_whole_objects_refuses_a_layer(open_quickly: OpenStore) -> None:
    shelf, keys = Shelf(open_quickly(reads="whole")), object_keys(2)
    shelf.stock(keys)

    with pytest.raises(UnsupportedOperationError, match="reads whole objects here"):
        shelf.read(keys, layer=1)
    assert not shelf.store.capabilities.ranged_reads
    assert shelf.read(keys) == (OK, OK)


@pytest.mark.parametrize("options", [{"reads": "ranged"}, {"staged": True}], ids=str)
def test_memory_in_front_of_a_cluster_is_filled_from_it(
    open_quickly: OpenStore, options: Mapping[str, object]
) -> None:
    near = MemoryStore()
    store = TieredStore(near, open_quickly(**options), names=("memory", "mooncake"))
    shelf, keys = Shelf(store), object_keys(4)
    shelf.stock(keys)
    near.delete(keys[2:])

    assert shelf.read(keys) == (OK,) * 4
    assert store.wait_for_promotions(60)
    assert near.exists(keys) == (True,) * 4
    assert shelf.read(keys) == (OK,) * 4
