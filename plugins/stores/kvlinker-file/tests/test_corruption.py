"""Whatever happens to the files, wrong bytes are not served: a miss, counted, and the object is gone."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from file_shelf import OpenStore, Shelf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlinker.store import ReadStatus
from kvlinker_file import verify

Key = Callable[..., bytes]
OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
HEADER = 256
"""Bytes in front of the payload of 4 ranges: 128 + 4 * 24, rounded up to 64."""
SLOT = HEADER + 4096


def slab(folder: Path, number: int = 1) -> Path:
    return folder / "segments" / f"{number:08d}.slab"


def flip(path: Path, offset: int, mask: int = 0x40) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ mask]))


@pytest.mark.parametrize("is_open", [True, False], ids=["while open", "while closed"])
def test_t1_e3_a_changed_payload_is_corrupt_dropped_and_counted(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, *, is_open: bool
) -> None:
    keys = [key(i) for i in range(3)]
    store = open_store()
    shelf.put(store, keys)
    if not is_open:
        store.close()
    flip(slab(folder), SLOT + HEADER + 2000)  # object 1, range 1
    if not is_open:
        store = open_store()

    assert shelf.get(store, keys) == (OK, CORRUPT, OK)
    assert store.exists(keys) == (True, False, True)
    assert store.stats().counters["corrupt"] == 1
    assert shelf.get(store, keys) == (OK, MISS, OK)
    shelf.put(store, [keys[1]])
    assert shelf.get(store, keys) == (OK, OK, OK)
    store.close()
    assert verify(folder).is_clean


def test_t1_only_the_ranges_that_are_read_are_verified(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(0), key(1)])
    flip(slab(folder), HEADER + 2 * 1024)  # object 0, layer 2

    with store.open_read(shelf.request([key(0), key(1)])) as session:
        answers = [session.read(shelf.layer_plan(2, layer), shelf.access) for layer in range(4)]

    assert answers == [(OK, OK), (OK, OK), (CORRUPT, OK), (CORRUPT, OK)]
    assert store.stats().counters["corrupt"] == 1


def test_t1_corrupt_bytes_never_reach_pool_memory(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    flip(slab(folder), HEADER)

    assert shelf.get(store, [key(0)]) == (CORRUPT,)  # checks that the pages are as poisoned


@pytest.mark.parametrize("offset", [8, 16, 20, 24, 40, 70, 128, 144, 250])
def test_t1_a_changed_header_is_never_read_past(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, offset: int
) -> None:
    store = open_store()
    shelf.put(store, [key(0), key(1)])
    flip(slab(folder), offset)

    status = shelf.get(store, [key(0), key(1)])

    assert status[0] in (CORRUPT, MISS)
    assert status[1] is OK
    assert store.exists([key(0), key(1)]) == (False, True)
    assert store.stats().counters["corrupt"] == 1


def test_t1_a_slot_of_zeros_is_a_miss(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(0), key(1)])
    store.close()
    with slab(folder).open("r+b") as file:
        file.write(bytes(SLOT))

    store = open_store()

    assert shelf.get(store, [key(0), key(1)]) == (MISS, OK)
    assert store.exists([key(0)]) == (False,)


def test_t1_a_whole_object_in_the_place_of_another_is_a_miss(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(0), key(1)])
    content = slab(folder).read_bytes()
    with slab(folder).open("r+b") as file:
        file.write(content[SLOT : 2 * SLOT])

    assert shelf.get(store, [key(0), key(1)]) == (MISS, OK)


def test_without_verification_headers_still_count(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store(verify=False)
    shelf.put(store, [key(0), key(1)])
    flip(slab(folder), 24)

    assert shelf.get(store, [key(0), key(1)]) == (CORRUPT, OK)


@pytest.mark.parametrize("size", [0, 4096, 30_000])
def test_a_truncated_segment_is_dropped_and_the_others_are_served(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, size: int
) -> None:
    keys = [key(i) for i in range(30)]
    store = open_store()
    shelf.put(store, keys)
    store.close()
    os.truncate(slab(folder), size)

    store = open_store()

    present = store.exists(keys)
    assert not present[0]
    assert any(present)
    assert shelf.get(store, keys) == tuple(OK if there else MISS for there in present)
    assert store.stats().counters["lost_at_open"] == present.count(False)
    shelf.put(store, keys)
    assert shelf.get(store, keys) == (OK,) * 30


def test_t3_a_segment_with_holes_is_reserved_again_before_it_is_mapped(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(0), key(1)])
    store.close()
    path = slab(folder)
    size, content = path.stat().st_size, path.read_bytes()[: 2 * SLOT]
    path.write_bytes(b"")
    os.truncate(path, size)
    with path.open("r+b") as file:
        file.write(content)
    assert path.stat().st_blocks * 512 < size

    store = open_store()

    assert path.stat().st_blocks * 512 >= size
    assert shelf.get(store, [key(0), key(1)]) == (OK, OK)


def test_a_missing_segment_costs_its_objects_alone(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    keys = [key(i) for i in range(30)]
    store = open_store()
    shelf.put(store, keys)
    store.close()
    slab(folder, 2).unlink()

    store = open_store()

    present = store.exists(keys)
    assert 0 < present.count(False) < 30
    assert shelf.get(store, keys) == tuple(OK if there else MISS for there in present)


@pytest.mark.parametrize("content", [b"", b"not a database" * 1000])
def test_a_lost_index_is_begun_anew_and_the_files_are_swept(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, content: bytes
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    store.close()
    (folder / "index.sqlite").write_bytes(content)

    store = open_store()

    assert store.stats().objects == 0
    assert list((folder / "segments").iterdir()) == []
    assert store.stats().counters["index_lost"] == bool(content)
    shelf.put(store, [key(0)])
    store.close()
    assert shelf.get(open_store(), [key(0)]) == (OK,)


def test_an_index_whose_damage_cannot_even_be_quoted_is_begun_anew(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    store.close()
    index = folder / "index.sqlite"
    damaged = index.read_bytes().replace(b"CREATE TABLE objects", b"CREATE \xa9ABLE objects")
    assert damaged != index.read_bytes()
    index.write_bytes(damaged)

    store = open_store()

    assert store.stats().counters["index_lost"] == 1
    shelf.put(store, [key(0)])
    assert shelf.get(store, [key(0)]) == (OK,)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255), count=st.integers(1, 30))
def test_a_flipped_byte_in_the_index_costs_objects_and_never_serves_wrong_bytes(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, where: float, mask: int, count: int
) -> None:
    keys = [key(i) for i in range(count)]
    store = open_store()
    store.clear(keys[0][:12])
    shelf.put(store, keys)
    store.close()
    index = folder / "index.sqlite"
    flip(index, int(where * index.stat().st_size), mask)

    store = open_store()

    statuses = shelf.get(store, keys)  # checks the bytes of what is OK
    assert set(statuses) <= {OK, MISS, CORRUPT}
    shelf.put(store, keys)
    assert shelf.get(store, keys) == (OK,) * count
    store.close()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE objects SET place = place + (1 << 40) WHERE place % 2",
        "UPDATE objects SET place = -place",
        "UPDATE objects SET place = place + 1000",
        "UPDATE objects SET key = 'text'",
        "UPDATE objects SET key = x'00'",
        "UPDATE objects SET used = 'never'",
        "UPDATE objects SET layout = 77",
        "UPDATE objects SET layout = NULL",
        "UPDATE objects SET key = (SELECT min(key) FROM objects)",
        "UPDATE segments SET slots = slots * 1000",
        "UPDATE segments SET file_bytes = 1 << 61",
        "UPDATE segments SET ranges = -3",
        "UPDATE segments SET payload_bytes = 'x'",
        "UPDATE segments SET number = number + (1 << 40)",
        "UPDATE layouts SET fingerprint = 5",
        "DELETE FROM facts",
        "UPDATE facts SET value = x'ff'",
        "INSERT INTO facts VALUES (x'ff', 1)",
    ],
)
def test_nonsense_in_the_index_is_left_out_and_forgotten(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, change: str
) -> None:
    keys = [key(i) for i in range(30)]
    store = open_store()
    shelf.put(store, keys)
    store.close()
    with closing(sqlite3.connect(folder / "index.sqlite")) as database:
        database.execute(change)
        database.commit()

    store = open_store()

    assert set(shelf.get(store, keys)) <= {OK, MISS, CORRUPT}
    shelf.put(store, keys)
    assert shelf.get(store, keys) == (OK,) * 30
    store.close()
    assert verify(folder).objects == 30


@pytest.mark.parametrize("far", [2**62, -5])
def test_a_time_of_use_that_cannot_be_does_not_disturb_the_order(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, far: int
) -> None:
    others = [key(i) for i in range(1, 33)]
    store = open_store()
    shelf.put(store, [key(0)])
    shelf.put(store, others)
    store.close()
    with closing(sqlite3.connect(folder / "index.sqlite")) as database:
        database.execute("UPDATE objects SET used = ? WHERE key = ?", (far, key(0)))
        database.commit()
    store = open_store()

    more = 100
    while all(store.exists(others)):
        shelf.put(store, [key(i) for i in range(more, more + 10)])
        more += 10
        assert more < 3000

    assert not store.exists([key(0)])[0], "it was used before the one that was evicted now"


def test_after_a_restart_of_the_machine_unsynced_objects_are_verified_or_dropped(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    def restart() -> None:
        with closing(sqlite3.connect(folder / "index.sqlite")) as database:
            database.execute("UPDATE facts SET value = 'another boot' WHERE name = 'boot'")
            database.commit()

    store = open_store(durability="process")
    shelf.put(store, [key(0)])
    store.close()
    restart()
    store = open_store(verify=True)
    assert shelf.get(store, [key(0)]) == (OK,)
    store.close()
    restart()
    store = open_store(verify=False)
    assert store.exists([key(0)]) == (False,), "nobody would notice that its bytes are not there"
    store.close()

    store = open_store(durability="disk", verify=False)
    shelf.put(store, [key(1)])
    store.close()
    restart()
    store = open_store(durability="disk", verify=False)
    assert shelf.get(store, [key(1)]) == (OK,)
    store.close()

    store = open_store(durability="process", verify=False)
    shelf.put(store, [key(2)])
    store.close()
    restart()
    assert open_store(durability="disk", verify=False).exists([key(1), key(2)]) == (False, False)


def test_a_store_becomes_durable_when_it_is_opened_so(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store(durability="process")
    shelf.put(store, [key(0)])
    store.close()
    open_store(durability="disk").close()
    with closing(sqlite3.connect(folder / "index.sqlite")) as database:
        database.execute("UPDATE facts SET value = 'another boot' WHERE name = 'boot'")
        database.commit()

    store = open_store(durability="disk", verify=False)

    assert shelf.get(store, [key(0)]) == (OK,)
