"""Disks and databases that fail at the worst moment cost answers, never objects that others were promised."""

from __future__ import annotations

import ctypes
import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from file_shelf import OpenStore, Shelf

from kvlinker.errors import StoreError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker_file import directory, inspect, mapping, tables, verify
from kvlinker_file.segments import Segment
from kvlinker_file.table_layout import Word

Key = Callable[..., bytes]
OK, MISS = ReadStatus.OK, ReadStatus.MISS
WRITTEN, EXISTS, FULL = WriteStatus.WRITTEN, WriteStatus.EXISTS, WriteStatus.FULL
MIB = 1 << 20


class Switch:
    """What fails now, and why."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.passes = 0
        """Calls that still succeed."""
        self.slabs = False
        """Whether files of objects fail alone."""

    def fail(self, code: int, *, after: int = 0, slabs: bool = False) -> None:
        self.code, self.passes, self.slabs = code, after, slabs

    def recover(self) -> None:
        self.code = None

    @property
    def strikes(self) -> bool:
        if self.code is None:
            return False
        self.passes -= 1
        return self.passes < 0


class FailingConnection(sqlite3.Connection):
    """A database on a disk that fails when its switch says so."""

    switch = Switch()

    def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:
        if sql == "COMMIT" and self.switch.strikes:
            error = sqlite3.OperationalError("the disk says no")
            error.sqlite_errorcode = self.switch.code or 0
            raise error
        return super().execute(sql, *parameters)  # type: ignore[arg-type]  # passed on as they came


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Iterator[Switch]:
    """Give a switch that lets saving the index fail."""
    connect = sqlite3.connect
    switch = FailingConnection.switch = Switch()

    def connect_to_fail(
        path: Path, *, isolation_level: None, check_same_thread: bool
    ) -> sqlite3.Connection:
        return connect(
            path,
            isolation_level=isolation_level,
            check_same_thread=check_same_thread,
            factory=FailingConnection,
        )

    monkeypatch.setattr(sqlite3, "connect", connect_to_fail)
    yield switch
    switch.recover()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Switch:
    """Give a switch that lets reserving space fail."""
    switch, reserve = Switch(), mapping.reserve

    def reserve_or_fail(descriptor: int, offset: int, size: int) -> None:
        is_slab = Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".slab"
        if (is_slab or not switch.slabs) and switch.strikes:
            raise OSError(switch.code, os.strerror(switch.code or 0))
        reserve(descriptor, offset, size)

    for module in (directory, tables):
        monkeypatch.setattr(module, "reserve", reserve_or_fail)
    return switch


def test_t3_a_file_system_that_cannot_reserve_blocks_is_refused_with_what_to_use(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: int) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(mapping, "_fallocate", unsupported)

    with pytest.raises(StoreError, match="needs a file system that reserves blocks, such as ext4"):
        open_store()


# ---- space ------------------------------------------------------------------------------------


def test_enospc_when_files_cannot_grow_the_store_evicts_within_those_it_has(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key, disk: Switch
) -> None:
    shelf = make_shelf(row_bytes=16_000, pages=1)  # one object a file
    store = open_store()
    shelf.put(store, [key(0)])
    shelf.put(store, [key(1)])
    disk.fail(errno.ENOSPC)

    assert shelf.put(store, [key(2)]) == (WRITTEN,)

    assert store.exists([key(0), key(1), key(2)]) == (False, True, True)
    assert shelf.get(store, [key(1)]) == (OK,)
    assert store.stats().counters["disk_full"] == 1
    disk.recover()
    assert shelf.put(store, [key(0)]) == (WRITTEN,)
    assert store.stats().objects == 3


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EMFILE])
def test_when_no_file_can_be_made_the_store_evicts_within_those_it_has(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key, disk: Switch, code: int
) -> None:
    shelf = make_shelf(row_bytes=16_000, pages=1)  # one object a file
    store = open_store()
    shelf.put(store, [key(0)])
    shelf.put(store, [key(1)])
    disk.fail(code, slabs=True)

    assert shelf.put(store, [key(2)]) == (WRITTEN,)

    assert store.exists([key(0), key(1), key(2)]) == (False, True, True)
    assert store.stats().counters["disk_errors"] == 1
    disk.recover()
    assert shelf.put(store, [key(0)]) == (WRITTEN,)
    assert store.stats().objects == 3


def test_when_no_file_can_be_made_none_is_deleted_to_make_another_one(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key, disk: Switch
) -> None:
    small, large = make_shelf(row_bytes=1000, pages=1), make_shelf(row_bytes=100_000, pages=1)
    store = open_store()
    small.put(store, [key(0)])
    disk.fail(errno.EACCES, slabs=True)

    assert large.put(store, [key(1)]) == (FULL,)

    assert small.get(store, [key(0)]) == (OK,)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EIO])
def test_enospc_without_anything_to_evict_the_answer_is_full(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, disk: Switch, code: int
) -> None:
    store = open_store()
    disk.fail(code)

    assert shelf.put(store, [key(0)]) == (FULL,)

    assert list((folder / "segments").iterdir()) == []
    disk.recover()
    assert shelf.put(store, [key(0)]) == (WRITTEN,)


def test_enospc_a_segment_whose_holes_cannot_be_filled_is_dropped_at_opening(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, disk: Switch
) -> None:
    store = open_store()
    shelf.put(store, [key(i) for i in range(30)])
    store.close()
    slab = folder / "segments" / "00000001.slab"
    size = slab.stat().st_size
    os.truncate(slab, 0)
    os.truncate(slab, size)
    disk.fail(errno.ENOSPC, after=1, slabs=True)

    store = open_store()

    assert 0 < store.exists([key(i) for i in range(30)]).count(True) < 30


def test_another_error_of_the_disk_at_opening_is_passed_on_with_its_cause(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, disk: Switch
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    store.close()
    disk.fail(errno.EIO)

    with pytest.raises(StoreError, match=f"{folder}: Input/output error") as caught:
        open_store()

    assert isinstance(caught.value.__cause__, OSError)
    disk.recover()
    assert shelf.get(open_store(), [key(0)]) == (OK,)


def test_t5_a_self_test_that_fails_stops_the_opening(open_store: OpenStore, disk: Switch) -> None:
    disk.fail(errno.ENOSPC, slabs=True)

    with pytest.raises(StoreError, match="the self-test failed at write"):
        open_store(self_test=True)

    disk.recover()
    open_store(self_test=True)


@pytest.mark.parametrize("step", ["prepare_writing", "sync"])
def test_a_disk_that_cannot_take_the_bytes_fails_the_write(
    open_store: OpenStore, shelf: Shelf, key: Key, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store = open_store(durability="disk")
    shelf.put(store, [key(0)])

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Segment, step, fail)
        assert shelf.put(store, [key(0), key(1)]) == (EXISTS, WriteStatus.FAILED)

    assert store.exists([key(0), key(1)]) == (True, False)
    assert store.stats().counters["disk_errors"] == 1
    assert shelf.put(store, [key(1)]) == (WRITTEN,)
    assert shelf.get(store, [key(0), key(1)]) == (OK, OK)


# ---- index ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (sqlite3.SQLITE_FULL, FULL),
        (sqlite3.SQLITE_IOERR, WriteStatus.FAILED),
        (sqlite3.SQLITE_ERROR, WriteStatus.FAILED),
    ],
)
def test_objects_that_cannot_be_saved_are_not_shown(
    open_store: OpenStore, shelf: Shelf, key: Key, database: Switch, code: int, status: WriteStatus
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    database.fail(code)

    assert shelf.put(store, [key(0), key(1)]) == (EXISTS, status)

    assert store.exists([key(0), key(1)]) == (True, False)
    assert store.stats().counters["index_errors"] == 1
    database.recover()
    assert shelf.put(store, [key(1)]) == (WRITTEN,)
    store.close()
    assert shelf.get(open_store(), [key(0), key(1)]) == (OK, OK)


def test_a_file_that_cannot_be_saved_is_deleted_again(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, database: Switch
) -> None:
    store = open_store()
    database.fail(sqlite3.SQLITE_IOERR)

    assert shelf.put(store, [key(0)]) == (FULL,)

    assert list((folder / "segments").iterdir()) == []
    database.recover()
    assert shelf.put(store, [key(0)]) == (WRITTEN,)


def test_nothing_is_evicted_when_the_eviction_cannot_be_saved(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key, database: Switch
) -> None:
    shelf, other = make_shelf(layers=1, row_bytes=MIB, pages=1), make_shelf(row_bytes=5000)
    store = open_store()
    shelf.put(store, [key(0)])
    shelf.put(store, [key(1)])
    database.fail(sqlite3.SQLITE_IOERR)

    assert shelf.put(store, [key(2)]) == (FULL,)
    assert other.put(store, [key(i) for i in range(10, 42)]) == (FULL,) * 32
    assert other.put(store, [key(i) for i in range(50, 82)]) == (FULL,) * 32

    assert shelf.get(store, [key(0)]) == (OK,)
    assert shelf.get(store, [key(1)]) == (OK,)
    assert store.stats().counters["evicted"] == 0
    database.recover()
    assert other.put(store, [key(i) for i in range(10, 42)]) == (WRITTEN,) * 32
    assert other.put(store, [key(i) for i in range(50, 82)]) == (WRITTEN,) * 32
    assert other.get(store, [key(i) for i in range(50, 82)]) == (OK,) * 32
    store.close()
    assert other.get(open_store(), [key(i) for i in range(50, 82)]) == (OK,) * 32


def test_a_recovery_that_cannot_be_saved_is_tried_again_before_anybody_writes(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, database: Switch
) -> None:
    first, second = open_store(), open_store()
    keys = [key(i) for i in range(4)]
    shelf.put(first, keys)
    first._remove(keys)  # noqa: SLF001 - it would save that now
    shelf.put(second, keys)  # the catalog names each key twice
    with (folder / "index.shared").open("r+b") as tables:
        tables.seek(8 * Word.TABLES_MARK)
        tables.write(b"\x01")  # as a process leaves it that is killed while it changes them
    database.fail(sqlite3.SQLITE_IOERR)

    with pytest.raises(StoreError, match="says no"):
        second.exists(keys)
    with pytest.raises(
        StoreError, match="says no"
    ):  # over the first copies, which the catalog names
        shelf.put(second, [key(9)])

    database.recover()
    assert shelf.get(second, keys) == (OK,) * 4
    assert inspect(folder).objects == 4
    assert shelf.put(second, [key(9)]) == (WRITTEN,)


def test_an_object_that_came_in_the_place_of_an_evicted_one_is_not_pushed_out(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key, database: Switch
) -> None:
    first, second = make_shelf(row_bytes=16_000, pages=1), make_shelf(row_bytes=17_000, pages=1)
    store = open_store()
    first.put(store, [key(0)])
    database.fail(sqlite3.SQLITE_IOERR)
    assert second.put(store, [key(0)]) == (FULL,)
    assert first.get(store, [key(0)]) == (OK,)
    database.recover()

    assert second.put(store, [key(0)]) == (WRITTEN,)

    assert first.get(store, [key(0)]) == (MISS,)
    assert second.get(store, [key(0)]) == (OK,)


def test_a_removal_that_cannot_be_saved_is_reported_and_made_up_for(
    open_store: OpenStore, shelf: Shelf, key: Key, database: Switch
) -> None:
    store = open_store()
    keys = [key(i) for i in range(4)]
    shelf.put(store, keys)
    database.fail(sqlite3.SQLITE_IOERR)

    with pytest.raises(StoreError, match="store index, saving"):
        store.delete(keys[:1])
    with pytest.raises(StoreError, match="store index, saving"):
        store.clear(key(0)[:12])

    assert store.exists(keys) == (False,) * 4
    database.recover()
    shelf.put(store, [key(9)])
    store.close()
    assert open_store().exists([*keys, key(9)]) == (False,) * 4 + (True,)


def test_empty_files_stay_usable_when_their_end_cannot_be_saved(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, database: Switch
) -> None:
    store = open_store()
    keys = [key(i) for i in range(32)]
    shelf.put(store, keys)
    files = len(list((folder / "segments").iterdir()))
    database.fail(sqlite3.SQLITE_IOERR, after=1)

    with pytest.raises(StoreError, match="store index, saving"):
        store.delete(keys)

    assert len(list((folder / "segments").iterdir())) == files
    database.recover()
    assert shelf.put(store, keys) == (WRITTEN,) * 32
    assert len(list((folder / "segments").iterdir())) == files
    assert shelf.get(store, keys) == (OK,) * 32


def test_a_store_that_cannot_save_its_last_words_closes_all_the_same(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, database: Switch
) -> None:
    store = open_store()
    shelf.put(store, [key(0), key(1)])
    shelf.get(store, [key(0)])
    database.fail(sqlite3.SQLITE_IOERR)

    store.close()

    database.recover()
    assert verify(folder).objects == 2
    assert shelf.get(open_store(), [key(0), key(1)]) == (OK, OK)


def test_corrupt_objects_are_dropped_although_that_cannot_be_saved(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, database: Switch
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    with (folder / "segments" / "00000001.slab").open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    database.fail(sqlite3.SQLITE_IOERR)

    assert shelf.get(store, [key(0)]) == (ReadStatus.CORRUPT,)

    assert store.exists([key(0)]) == (False,)
    database.recover()
    store.close()
    assert open_store().exists([key(0)]) == (False,)


def test_the_order_of_use_is_saved_from_time_to_time(
    open_store: OpenStore,
    shelf: Shelf,
    folder: Path,
    key: Key,
    database: Switch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    store = open_store(clock=lambda: now[0])
    shelf.put(store, [key(0)])
    shelf.put(store, [key(1)])

    copy = folder.parent / "copy.sqlite"
    shelf.get(store, [key(0)])
    now[0] = 31.0
    database.fail(sqlite3.SQLITE_IOERR, after=1)
    assert shelf.put(store, [key(2)]) == (WRITTEN,), "only the order of use is lost"
    database.recover()
    now[0] = 62.0
    shelf.put(store, [key(3)])
    for name in ("index.sqlite", "index.sqlite-wal"):
        (folder.parent / name.replace("index", "copy")).write_bytes((folder / name).read_bytes())
    monkeypatch.undo()
    with closing(sqlite3.connect(copy)) as reader:
        oldest = reader.execute("SELECT key FROM objects ORDER BY used").fetchone()

    assert oldest == (key(1),), "key 0 was read after it"


# ---- opening ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        "PRAGMA application_id = 7",
        "DROP TABLE objects",
        "ALTER TABLE segments RENAME TO other",
        "DROP TABLE facts",
    ],
)
def test_a_database_that_is_not_ours_is_begun_anew(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, change: str
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    store.close()
    with sqlite3.connect(folder / "index.sqlite") as database:
        database.execute(change)
    database.close()

    store = open_store()

    assert (store.stats().objects, store.stats().counters["index_lost"]) == (0, 1)
    assert list((folder / "segments").iterdir()) == []
    assert shelf.put(store, [key(0)]) == (WRITTEN,)


def test_a_file_that_vanishes_before_it_is_cut_anew_costs_that_write(
    open_store: OpenStore, make_shelf: type[Shelf], folder: Path, key: Key, disk: Switch
) -> None:
    first, second = make_shelf(row_bytes=16_000, pages=1), make_shelf(row_bytes=15_990, pages=1)
    store = open_store()
    first.put(store, [key(0)])
    (folder / "segments" / "00000001.slab").unlink()
    disk.fail(errno.ENOSPC)

    assert second.put(store, [key(1)]) == (FULL,)

    disk.recover()
    assert second.put(store, [key(1)]) == (WRITTEN,)
    assert second.get(store, [key(1)]) == (OK,)
    store.close()
    assert second.get(open_store(), [key(1)]) == (OK,)


def test_objects_with_different_ranges_can_be_read_together(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    store = open_store()
    layouts = make_shelf(layers=2, row_bytes=300), make_shelf(layers=3, row_bytes=200)
    for number, shelf in enumerate(layouts):
        shelf.put(store, [key(number)])
    reader = make_shelf(layers=1, row_bytes=600)
    reader.memory.poison()

    with store.open_read(reader.request([key(0), key(1), key(2)])) as session:
        statuses = session.read(reader.plan(3), reader.access)

    assert statuses == (OK, OK, MISS)
    for number, shelf in enumerate(layouts):
        stored = b"".join(shelf.content(key(number), i) for i in range(len(shelf.spans)))
        assert reader.memory.read(reader.spans[0], number) == stored
