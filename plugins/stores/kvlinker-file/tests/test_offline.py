"""A store that nobody has open can be looked into, verified and made smaller."""

from __future__ import annotations

import dataclasses
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from file_shelf import OpenStore, Shelf

from kvlinker.errors import ContractError, StoreFormatError
from kvlinker.store import ReadStatus
from kvlinker_file import inspect, prune, verify
from kvlinker_file.offline import SegmentReport
from kvlinker_file.state import StoreState

Key = Callable[..., bytes]
DiskBytes = Callable[[], int]
OK = ReadStatus.OK
HOUR = 3600


def age(folder: Path) -> None:
    """Make every other object look unused for an hour."""
    with closing(sqlite3.connect(folder / "index.sqlite")) as database:
        change = "UPDATE objects SET used = used - ? WHERE place % 2"
        database.execute(change, (HOUR * 1_000_000,))
        database.commit()


def test_inspect_says_what_a_store_holds(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, disk_bytes: DiskBytes
) -> None:
    store = open_store()
    before = time.time()
    shelf.put(store, [key(i, 1) for i in range(3)])
    shelf.put(store, [key(i, 2) for i in range(4)])
    store.close()

    report = inspect(folder)

    assert (report.path, report.format_version, report.capacity_bytes) == (folder, 2, 4 << 20)
    assert (report.objects, report.payload_bytes) == (7, 7 * 4096)
    assert report.disk_bytes == disk_bytes()
    assert report.segments == (
        SegmentReport(number=1, file_bytes=65536, object_bytes=4096, ranges=4, slots=15, objects=7),
    )
    spaces = [(space.namespace, space.objects, space.payload_bytes) for space in report.namespaces]
    assert spaces == [(b"\x02" * 12, 4, 4 * 4096), (b"\x01" * 12, 3, 3 * 4096)]
    assert all(before <= space.last_used <= time.time() for space in report.namespaces)


def test_inspect_changes_nothing(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    store.close()
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.suffix == ".slab"}

    assert inspect(folder) == inspect(str(folder))

    assert {path: path.read_bytes() for path in files} == files
    assert shelf.get(open_store(), [key(0)]) == (OK,)


def test_a_store_in_use_is_inspected_verified_and_pruned_beside_its_users(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store(durability="disk")
    shelf.put(store, [key(i, 1) for i in range(5)])
    shelf.put(store, [key(i, 2) for i in range(5)])
    held = store.hold([key(0, 2)], seconds=60)

    assert inspect(folder).objects == 10
    assert verify(folder).intact == 10
    assert prune(folder, namespace=b"\x01" * 12).removed == 5

    assert store.exists([key(0, 1), key(0, 2)]) == (False, True)
    assert shelf.get(store, [key(i, 2) for i in range(5)]) == (OK,) * 5
    assert shelf.put(store, [key(9)])[0].is_stored
    held.release()
    store.close()
    assert shelf.get(open_store(durability="disk"), [key(9)]) == (OK,)


@pytest.mark.parametrize("ask", [inspect, verify, lambda path: prune(path, to_bytes=0)])
def test_offline_functions_refuse_what_is_no_store(
    tmp_path: Path, ask: Callable[[Path], object]
) -> None:
    with pytest.raises(StoreFormatError, match="there is no such directory"):
        ask(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreFormatError, match="holds no store"):
        ask(tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


def test_verify_reads_everything_and_counts_what_is_wrong(
    open_store: OpenStore, make_shelf: type[Shelf], folder: Path, key: Key
) -> None:
    store = open_store()
    small, large = make_shelf(row_bytes=1024), make_shelf(row_bytes=20_000)
    small.put(store, [key(i) for i in range(8)])
    large.put(store, [key(i) for i in range(8, 10)])
    store.close()
    clean = verify(folder)
    with (folder / "segments" / "00000001.slab").open("r+b") as file:
        file.seek(2 * (256 + 4096) + 300)
        file.write(b"damage")
        file.seek(5 * (256 + 4096))
        file.write(bytes(128))

    found = verify(folder)
    dropped = verify(folder, drop=True)
    after = verify(folder)

    assert clean.is_clean
    assert (clean.objects, clean.payload_bytes) == (10, 8 * 4096 + 2 * 80_000)
    assert (found.objects, found.intact, found.foreign, found.corrupt) == (10, 8, 1, 1)
    assert (found.dropped, found.is_clean) == (0, False)
    assert dropped == dataclasses.replace(found, dropped=2)
    assert (after.objects, after.is_clean) == (8, True)
    statuses = small.get(open_store(), [key(i) for i in range(8)])
    assert [i for i, status in enumerate(statuses) if status is not OK] == [2, 5]


def test_verifying_leaves_no_doubt_about_a_durable_store(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store(durability="disk")
    shelf.put(store, [key(0)])
    store.close()

    verify(folder)

    with closing(sqlite3.connect(folder / "index.sqlite")) as database:
        synced = database.execute("SELECT value FROM facts WHERE name = 'synced'").fetchone()
    assert synced == (1,)


def test_prune_removes_one_namespace(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, disk_bytes: DiskBytes
) -> None:
    store = open_store()
    shelf.put(store, [key(i, 1) for i in range(30)])
    shelf.put(store, [key(i, 2) for i in range(5)])
    store.close()
    before = disk_bytes()

    report = prune(folder, namespace=b"\x01" * 12)

    assert (report.removed, report.objects) == (30, 5)
    assert report.disk_bytes == disk_bytes()
    assert 0 < report.freed_bytes == before - disk_bytes()
    store = open_store()
    assert shelf.get(store, [key(i, 2) for i in range(5)]) == (OK,) * 5


def test_prune_removes_what_was_not_used_for_long(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(i, 1) for i in range(5)])
    shelf.put(store, [key(i, 2) for i in range(5)])
    store.close()
    age(folder)

    kept = prune(folder, older_than=2 * HOUR)
    some = prune(folder, older_than=HOUR / 2, namespace=b"\x02" * 12)
    rest = prune(folder, older_than=HOUR / 2)

    assert (kept.removed, some.removed, rest.removed, rest.objects) == (0, 3, 2, 5)


def test_prune_makes_a_store_smaller_by_what_was_used_least_recently(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, disk_bytes: DiskBytes
) -> None:
    store = open_store()
    for i in range(0, 120, 15):
        shelf.put(store, [key(j) for j in range(i, i + 15)])
    store.close()

    report = prune(folder, to_bytes=300_000)

    assert report.disk_bytes == disk_bytes() <= 300_000
    assert report.objects == 120 - report.removed
    assert report.removed % 15 == 0
    present = open_store().exists([key(i) for i in range(120)])
    assert present == (False,) * report.removed + (True,) * report.objects
    assert 0 < report.objects < 120


def test_prune_spares_what_came_in_the_place_of_a_file_that_went_meanwhile(
    open_store: OpenStore,
    make_shelf: type[Shelf],
    folder: Path,
    key: Key,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelf = make_shelf(row_bytes=16_000, pages=1)  # one object a file
    user = open_store()
    for i in range(3):
        shelf.put(user, [key(i)])
    user._state.truncate_log()  # noqa: SLF001 - so that files alone make a difference
    to_bytes = inspect(folder).disk_bytes - 30_000
    truncate = StoreState.truncate_log
    is_first = True

    def truncate_after_a_change(state: StoreState) -> None:
        nonlocal is_first
        if is_first:  # after prune has chosen the order, and before it removes
            is_first = False
            user.delete([key(0)])
            user._state.save_removals(keep=0)  # noqa: SLF001 - the file goes at once
            shelf.put(user, [key(9)])
        truncate(state)

    monkeypatch.setattr(StoreState, "truncate_log", truncate_after_a_change)

    report = prune(folder, to_bytes=to_bytes)

    assert report.removed == 1
    assert user.exists([key(1), key(2), key(9)]) == (False, True, True)
    assert shelf.get(user, [key(2)]) == shelf.get(user, [key(9)]) == (OK,)


@pytest.mark.parametrize(
    ("criteria", "message"),
    [
        ({}, "prune needs something to prune by"),
        ({"to_bytes": 1, "namespace": bytes(12)}, "within one namespace"),
        ({"namespace": b"short"}, "a namespace has 12 bytes, got 5"),
    ],
)
def test_prune_refuses_what_it_cannot_mean(
    folder: Path, criteria: dict[str, bytes], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        prune(folder, **criteria)  # type: ignore[arg-type]  # one table for all arguments


def test_a_store_whose_capacity_is_not_known_is_opened_first(
    open_store: OpenStore, folder: Path
) -> None:
    open_store().close()
    with closing(sqlite3.connect(folder / "index.sqlite")) as database:
        database.execute("DELETE FROM facts")
        database.commit()

    assert inspect(folder).capacity_bytes is None
    with pytest.raises(StoreFormatError, match="open it with a capacity first"):
        verify(folder)


def test_pruning_nothing_beside_an_opener_never_gives_less_than_nothing_back(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(i) for i in range(3)])
    store.delete([key(i) for i in range(3)])

    reports = [prune(folder, older_than=HOUR) for _ in range(3)]

    store.close()
    assert [report.removed for report in reports] == [0, 0, 0]
    assert reports[0].freed_bytes > 0  # the file whose objects were deleted
    assert [report.freed_bytes for report in reports[1:]] == [0, 0]
