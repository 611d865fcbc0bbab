"""The capacity is a promise: bytes on disk never exceed it, and what must stay is never evicted for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from file_shelf import OpenStore, Shelf

from kvlinker.errors import ContractError
from kvlinker.store import ReadStatus, WriteStatus

Key = Callable[..., bytes]
DiskBytes = Callable[[], int]
OK, MISS = ReadStatus.OK, ReadStatus.MISS
WRITTEN, FULL = WriteStatus.WRITTEN, WriteStatus.FULL
MIB = 1 << 20


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_b78_t3_the_disk_never_holds_more_than_the_capacity_also_after_a_restart(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key, disk_bytes: DiskBytes
) -> None:
    shelf = make_shelf(layers=2, row_bytes=128 << 10, pages=1)
    capacity = MIB + 10 * (257 << 10)

    for first in (0, 30):
        store = open_store(capacity=capacity)
        for i in range(first, first + 30):
            assert shelf.put(store, [key(i)]) == (WRITTEN,)
            assert disk_bytes() <= capacity
            assert store.stats().used_bytes == disk_bytes()
            assert shelf.get(store, [key(i)]) == (OK,)
        assert store.stats().objects >= 9
        store.close()
        assert disk_bytes() <= capacity


def test_what_was_used_least_recently_is_evicted_first(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    shelf = make_shelf(layers=1, row_bytes=256 << 10, pages=1)
    store = open_store()
    count = 0
    while not store.stats().counters["evicted"]:
        shelf.put(store, [key(count)])
        count += 1
    kept = count - 1
    assert store.exists([key(i) for i in range(count)]) == (False,) + (True,) * kept

    shelf.get(store, [key(1)])  # read
    shelf.put(store, [key(2)])  # already there
    store.hold([key(3)], seconds=60).release()  # held for a moment
    for i in range(count, count + kept - 3):
        shelf.put(store, [key(i)])

    assert store.exists([key(i) for i in range(1, 6)]) == (True, True, True, False, False)


def test_a_prefix_loses_its_end_first(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    shelf = make_shelf(layers=1, row_bytes=256 << 10, pages=12)
    store = open_store()
    shelf.put(store, [key(i) for i in range(8)])
    other = 100

    while store.exists([key(7)])[0]:
        shelf.put(store, [key(other)])
        other += 1

    assert store.exists([key(i) for i in range(7)]) == (True,) * 7


def test_the_order_of_use_outlives_a_restart(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    shelf = make_shelf(layers=1, row_bytes=256 << 10, pages=1)
    store = open_store()
    for i in range(6):
        shelf.put(store, [key(i)])
    shelf.get(store, [key(0)])
    store.close()

    store = open_store()
    other = 100
    while store.exists([key(1)])[0]:
        shelf.put(store, [key(other)])
        other += 1

    assert store.exists([key(0), key(2)]) == (True, True)


def test_t3_l3_held_objects_stay_and_a_write_that_needs_their_room_is_told_so(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    shelf = make_shelf(layers=1, row_bytes=1 * MIB, pages=2)
    store = open_store()
    keys = [key(0), key(1)]
    shelf.put(store, keys)
    hold = store.hold([key(0), key(9), key(1)], seconds=60)

    assert hold.present == (True, False, True)
    assert shelf.put(store, [key(2)]) == (FULL,)
    assert store.exists(keys) == (True, True)
    hold.release()
    hold.release()
    assert shelf.put(store, [key(2)]) == (WRITTEN,)
    assert store.exists([key(0), key(1), key(2)]) == (True, False, True)


def test_an_expired_hold_keeps_nothing(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    clock = Clock()
    shelf = make_shelf(layers=1, row_bytes=1 * MIB, pages=2)
    store = open_store(clock=clock)
    shelf.put(store, [key(0), key(1)])
    hold = store.hold([key(0), key(1)], seconds=5)

    clock.now += 4.9
    assert shelf.put(store, [key(2)]) == (FULL,)
    clock.now += 0.1
    assert shelf.put(store, [key(2)]) == (WRITTEN,)
    hold.release()
    assert shelf.put(store, [key(3)]) == (WRITTEN,)


def test_two_holds_on_one_object_end_one_by_one(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    shelf = make_shelf(layers=1, row_bytes=1 * MIB, pages=2)
    store = open_store()
    shelf.put(store, [key(0), key(1)])
    first = store.hold([key(0), key(1), key(0)], seconds=60)
    second = store.hold([key(0)], seconds=60)

    first.release()
    assert shelf.put(store, [key(2), key(3)]) == (FULL, FULL)
    assert store.exists([key(0), key(1)]) == (True, True), "nothing is evicted in vain"
    assert shelf.put(store, [key(2)]) == (WRITTEN,)
    assert store.exists([key(0), key(1)]) == (True, False)
    second.release()
    assert shelf.put(store, [key(3), key(4)]) == (WRITTEN, WRITTEN)


def test_a_hold_on_a_deleted_object_does_not_hold_what_comes_in_its_place(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    shelf = make_shelf(layers=1, row_bytes=1 * MIB, pages=2)
    store = open_store()
    shelf.put(store, [key(0), key(1)])
    hold = store.hold([key(0), key(1)], seconds=60)

    assert store.delete([key(0), key(1)]) == (True, True)
    assert shelf.put(store, [key(2), key(3)]) == (WRITTEN, WRITTEN)
    mine = store.hold([key(2)], seconds=60)
    hold.release()
    assert shelf.put(store, [key(4)]) == (WRITTEN,)
    assert store.exists([key(2), key(3)]) == (True, False)
    mine.release()


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_hold_without_an_end_is_refused(open_store: OpenStore, key: Key, seconds: float) -> None:
    with pytest.raises(ContractError, match="a hold lasts a positive number of seconds"):
        open_store().hold([key(0)], seconds=seconds)


def test_forgotten_holds_do_not_pile_up(open_store: OpenStore, shelf: Shelf, key: Key) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    shelf.put(store, [key(0)])
    for _ in range(200):
        store.hold([key(0)], seconds=1000).release()
        store.hold([key(0)], seconds=1)
        clock.now += 2

    for i in range(1, 2000, 30):
        shelf.put(store, [key(j) for j in range(i, i + 30)])

    assert store.exists([key(0)]) == (False,)


def test_objects_being_read_stay(open_store: OpenStore, make_shelf: type[Shelf], key: Key) -> None:
    shelf = make_shelf(layers=2, row_bytes=512 << 10, pages=2)
    store = open_store()
    keys = [key(0), key(1)]
    shelf.put(store, keys)

    with store.open_read(shelf.request(keys)) as session:
        assert shelf.put(store, [key(2)]) == (FULL,)
        assert shelf.read(session, keys) == (OK, OK)
    assert shelf.put(store, [key(2)]) == (WRITTEN,)


def test_a_write_does_not_evict_what_it_found_there(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    shelf = make_shelf(layers=1, row_bytes=1 * MIB, pages=4)
    store = open_store()
    shelf.put(store, [key(0), key(1)])

    assert shelf.put(store, [key(0), key(2)]) == (WriteStatus.EXISTS, WRITTEN)
    assert store.exists([key(0), key(1), key(2)]) == (True, False, True)
    assert shelf.put(store, [key(0), key(2), key(3)]) == (
        WriteStatus.EXISTS,
        WriteStatus.EXISTS,
        FULL,
    )


def test_l8_a_write_without_room_for_all_stores_nothing_and_evicts_nothing(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    shelf = make_shelf(layers=1, row_bytes=1 * MIB, pages=4)
    store = open_store()
    shelf.put(store, [key(0)])

    assert shelf.put(store, [key(i) for i in range(1, 5)]) == (FULL,) * 4
    assert store.stats().objects == 1
    assert store.exists([key(0)]) == (True,)
    assert store.stats().counters["full"] == 1


def test_sizes_share_the_space_as_their_use_asks(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key, disk_bytes: DiskBytes
) -> None:
    small, large = make_shelf(row_bytes=1000, pages=64), make_shelf(row_bytes=200_000, pages=2)
    store = open_store()
    for i in range(0, 640, 64):
        small.put(store, [key(j, 1) for j in range(i, i + 64)])
    before = store.stats().objects

    for i in range(2):
        assert large.put(store, [key(i, 2)]) == (WRITTEN,)
        assert disk_bytes() <= 4 * MIB

    assert large.get(store, [key(0, 2), key(1, 2)]) == (OK, OK)
    assert small.get(store, [key(j, 1) for j in range(576, 640)]) == (OK,) * 64
    assert before / 4 < store.stats().objects < before - 300
    for i in range(0, 640, 64):
        small.put(store, [key(j, 3) for j in range(i, i + 64)])
        assert disk_bytes() <= 4 * MIB
    assert store.exists([key(i, 2) for i in range(2)]) == (False, False)
    assert store.stats().objects > 600


def test_a_file_of_one_size_is_cut_anew_for_another(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key, disk_bytes: DiskBytes
) -> None:
    first, second = make_shelf(row_bytes=16_000), make_shelf(row_bytes=8_000)
    store = open_store()
    for i in range(0, 96, 32):
        first.put(store, [key(j, 1) for j in range(i, i + 32)])
    objects = store.stats().objects

    second.put(store, [key(j, 2) for j in range(32)])
    assert second.get(store, [key(j, 2) for j in range(32)]) == (OK,) * 32

    left = [key(j, 1) for j in range(96) if store.exists([key(j, 1)])[0]]
    assert objects / 2 < len(left) < objects
    for held in left:
        assert first.get(store, [held]) == (OK,)
    assert disk_bytes() <= 4 * MIB
    store.close()
    store = open_store()
    assert second.get(store, [key(j, 2) for j in range(32)]) == (OK,) * 32
    assert store.exists(left) == (True,) * len(left)


def test_empty_files_are_given_back_but_one_for_the_next_write(
    open_store: OpenStore, shelf: Shelf, key: Key, disk_bytes: DiskBytes
) -> None:
    store = open_store()
    for i in range(0, 320, 32):
        shelf.put(store, [key(j) for j in range(i, i + 32)])
    full = disk_bytes()

    store.clear(key(0)[:12])

    assert store.stats().objects == 0
    assert disk_bytes() < full / 3
    shelf.put(store, [key(0)])
    assert shelf.get(store, [key(0)]) == (OK,)
    store.delete([key(0)])
    store.close()
    assert disk_bytes() < 128 << 10, "a closed store keeps no empty file"


def test_t3_a_smaller_capacity_evicts_what_was_used_least_recently(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key, disk_bytes: DiskBytes
) -> None:
    shelf = make_shelf(layers=1, row_bytes=256 << 10, pages=1)
    store = open_store(capacity="8MiB")
    for i in range(20):
        shelf.put(store, [key(i)])
    shelf.get(store, [key(0)])
    store.close()

    store = open_store(capacity="3MiB")

    assert disk_bytes() <= 3 * MIB
    objects = store.stats().objects
    assert 4 <= objects <= 8
    kept = [key(0), *(key(i) for i in range(21 - objects, 20))]
    assert shelf.get(store, [kept[0]]) == (OK,)
    assert store.exists(kept) == (True,) * objects
    assert shelf.put(store, [key(99)]) == (WRITTEN,)
    assert disk_bytes() <= 3 * MIB


def test_many_small_objects_count_with_their_place_in_the_index(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key, disk_bytes: DiskBytes
) -> None:
    shelf = make_shelf(layers=1, row_bytes=64, pages=2000)
    store = open_store(capacity="3MiB")

    for i in range(0, 14_000, 2000):
        shelf.put(store, [key(j * 7919 % 100_003) for j in range(i, i + 2000)])
        assert disk_bytes() <= 3 * MIB

    assert store.stats().objects > 3000
    assert store.stats().counters["evicted"] > 2000
    store.close()
    assert disk_bytes() <= 3 * MIB
