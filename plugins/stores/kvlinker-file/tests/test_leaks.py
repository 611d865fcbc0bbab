"""What a store takes it gives back: descriptors, mappings and threads; a forked child does no harm."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from file_shelf import OpenStore, Shelf

from kvlinker.errors import StoreBusyError
from kvlinker.store import ReadStatus
from kvlinker_file import FileStore, FileStoreOptions

Key = Callable[..., bytes]
OK = ReadStatus.OK
TESTS = Path(__file__).parent


def resources(folder: Path) -> tuple[int, int, int]:
    """Return descriptors, threads, and mappings of files of the store."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps.count(str(folder))  # noqa: PTH208 - counts, reads no file


def test_a_closed_store_leaves_no_descriptor_mapping_or_thread(
    shelf: Shelf, folder: Path, key: Key
) -> None:
    options = FileStoreOptions(path=folder, capacity=4 << 20)
    FileStore(options).close()
    before = resources(folder)
    for round_number in range(5):
        store = FileStore(options)
        for i in range(0, 90, 30):
            shelf.put(store, [key(j, round_number + 1) for j in range(i, i + 30)])
        shelf.get(store, [key(0, round_number + 1)])
        session = store.open_read(shelf.request([key(1, round_number + 1)]))
        if round_number % 2:
            session.close()
        store.close()

    assert resources(folder) == before


def test_an_open_store_has_a_handful_of_descriptors_however_many_files(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    before, _, _ = resources(folder)
    store = open_store()
    for i in range(0, 600, 30):
        shelf.put(store, [key(j) for j in range(i, i + 30)])

    after, threads, maps = resources(folder)

    assert len(list((folder / "segments").iterdir())) > 20
    assert maps > 20
    assert after - before <= 6
    assert threads == threading.active_count()


def test_refused_and_failed_openings_leave_nothing(open_store: OpenStore, folder: Path) -> None:
    store = open_store()
    before = resources(folder)
    for _ in range(3):
        with pytest.raises(StoreBusyError):
            FileStore(FileStoreOptions(path=folder, capacity=5 << 20))

    assert resources(folder) == before
    store.close()


def test_mappings_do_not_grow_while_files_come_and_go(
    open_store: OpenStore, make_shelf: type[Shelf], folder: Path, key: Key
) -> None:
    store = open_store(capacity="3MiB")
    shelves = [make_shelf(row_bytes=size, pages=8) for size in (1000, 30_000)]
    most = 0
    for i in range(120):
        shelves[i // 10 % 2].put(store, [key(i * 8 + j) for j in range(8)])
        store.delete([key(i * 8)])
        most = max(most, resources(folder)[2])

    assert most <= 2 * len(list((folder / "segments").iterdir()))
    assert store.stats().counters["evicted"] > 0


def test_e4_a_store_that_nobody_closes_is_closed_with_its_last_reference(
    shelf: Shelf, folder: Path, key: Key
) -> None:
    options = FileStoreOptions(path=folder, capacity=4 << 20)
    store = FileStore(options)
    shelf.put(store, [key(0)])
    gone = weakref.ref(store)
    session = store.open_read(shelf.request([key(0)]))
    del store
    gc.collect()
    assert gone() is not None, "a session keeps its store open"
    assert shelf.read(session, [key(0)]) == (OK,)
    session.close()
    del session
    gc.collect()

    store = FileStore(options)

    assert shelf.get(store, [key(0)]) == (OK,)
    store.close()


_EXITS = """
import sys
sys.path.insert(0, sys.argv[2])
from file_shelf import Shelf, make_key
from kvlinker_file import FileStore, FileStoreOptions
shelf = Shelf()
store = FileStore(FileStoreOptions(path=sys.argv[1], capacity="4MiB"))
shelf.put(store, [make_key(0), make_key(1)])
shelf.get(store, [make_key(1)])
"""


def test_e4_a_process_that_ends_without_closing_saves_its_store(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    subprocess.run([sys.executable, "-c", _EXITS, str(folder), str(TESTS)], check=True)

    assert not (folder / "index.sqlite-wal").exists()
    assert shelf.get(open_store(), [key(0), key(1)]) == (OK, OK)


_FORKS = """
import os, sys
sys.path.insert(0, sys.argv[2])
from file_shelf import Shelf, make_key
from kvlinker.errors import StoreBusyError, StoreClosedError
from kvlinker.store import ReadStatus
from kvlinker_file import FileStore, FileStoreOptions
shelf = Shelf()
options = FileStoreOptions(path=sys.argv[1], capacity="4MiB")
store = FileStore(options)
keys = [make_key(i) for i in range(8)]
shelf.put(store, keys[:4])
session = store.open_read(shelf.request(keys[:4]))
child = os.fork()
if not child:
    for call in (
        lambda: store.exists(keys),
        lambda: shelf.put(store, keys),
        lambda: session.read(shelf.plan(4), shelf.access),
        lambda: store.delete(keys),
    ):
        try:
            call()
        except StoreClosedError as error:
            assert "a fork does not take a store along" in str(error)
        else:
            sys.exit(3)
    try:
        FileStore(options)
    except StoreBusyError:
        pass
    else:
        sys.exit(4)
    session.close()
    store.close()
    if sys.argv[3] == "collect":
        del store, session
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert shelf.put(store, keys[4:])[0].is_stored
assert shelf.get(store, keys) == (ReadStatus.OK,) * 8
assert os.path.exists(sys.argv[1] + "/index.sqlite-wal")
if sys.argv[3] == "outlive":
    sleeper = os.fork()
    if not sleeper:
        os.read(0, 1)
        os._exit(0)
store.close()
FileStore(options).close()
"""


@pytest.mark.parametrize("how", ["exit", "collect", "outlive"])
def test_a_forked_child_cannot_use_the_store_and_leaves_its_parent_alone(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, how: str
) -> None:
    run = [sys.executable, "-W", "error", "-c", _FORKS, str(folder), str(TESTS), how]
    subprocess.run(run, check=True, stdin=subprocess.PIPE)

    assert shelf.get(open_store(), [key(i) for i in range(8)]) == (OK,) * 8
