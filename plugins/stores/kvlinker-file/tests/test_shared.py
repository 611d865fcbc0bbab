"""Several openers of one directory see one store, and none takes from the other what it holds, reads or writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from file_shelf import OpenStore, Shelf

from kvlinker.errors import StoreBusyError, StoreTimeoutError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker_file import locks
from kvlinker_file.table_layout import MAX_SEATS

Key = Callable[..., bytes]
OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
WRITTEN, EXISTS, FULL = WriteStatus.WRITTEN, WriteStatus.EXISTS, WriteStatus.FULL
MIB = 1 << 20
TESTS = Path(__file__).parent

_CHILD = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from file_shelf import Shelf, make_key
from kvlinker_file import FileStore, FileStoreOptions
store = FileStore(FileStoreOptions(path=sys.argv[1], capacity="4MiB"))
shelf = Shelf(layers=1, row_bytes=1 << 20, pages=2)
keys = [make_key(0), make_key(1)]
what = sys.argv[3]
if what == "holds":
    kept = store.hold(keys, seconds=600)
elif what == "reads":
    kept = store.open_read(shelf.request(keys))
    shelf.read(kept, keys)
elif what == "writes":
    def wait():
        print("ready", flush=True)
        signal.pause()
    store.write([shelf.batch([make_key(8), make_key(9)])], shelf.access, may_publish=wait)
elif what == "commits":
    from kvlinker_file.opening import open_state
    state = open_state(FileStoreOptions(path=sys.argv[1], capacity="4MiB"))
    with state.committing():
        print("ready", flush=True)
        signal.pause()
print("ready", flush=True)
signal.pause()
"""


@contextmanager
def other_process(folder: Path, what: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds something until it is killed."""
    command = [sys.executable, "-c", _CHILD, str(folder), str(TESTS), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


# ---- one store --------------------------------------------------------------------------------


def test_what_one_opener_stores_or_deletes_the_others_see(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    first, second = open_store(), open_store()
    mine, theirs = make_shelf(), make_shelf()
    keys = [key(i) for i in range(30)]

    assert mine.put(first, keys) == (WRITTEN,) * 30
    assert theirs.get(second, keys) == (OK,) * 30
    assert theirs.put(second, keys) == (EXISTS,) * 30
    assert second.delete(keys[:5]) == (True,) * 5
    assert first.exists(keys) == (False,) * 5 + (True,) * 25
    assert mine.get(first, keys) == (MISS,) * 5 + (OK,) * 25
    assert second.clear(keys[0][:12]) == 25
    assert first.stats().objects == second.stats().objects == 0
    assert first.stats().used_bytes == second.stats().used_bytes


def test_a_layout_has_one_name_in_every_process(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    first, second = open_store(), open_store()
    layouts = [make_shelf(fingerprint=name) for name in (b"one", b"two")]

    layouts[0].put(first, [key(0)])
    layouts[1].put(second, [key(1)])

    assert layouts[0].get(second, [key(0), key(1)]) == (OK, MISS)
    assert layouts[1].get(first, [key(0), key(1)]) == (MISS, OK)


def test_rows_and_buckets_that_one_adds_the_other_finds(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    first, second = open_store(capacity="16MiB"), open_store(capacity="16MiB")
    shelf, other = (make_shelf(layers=1, row_bytes=64, pages=1000) for _ in range(2))

    for start in range(0, 20_000, 1000):
        writer, reader = (first, second) if start % 2000 else (second, first)
        keys = [key(i) for i in range(start, start + 1000)]
        assert shelf.put(writer, keys) == (WRITTEN,) * 1000
        assert other.get(reader, keys) == (OK,) * 1000

    assert first.stats().objects == 20_000
    assert all(second.exists([key(i) for i in range(20_000)]))


def test_files_that_one_cuts_anew_or_deletes_the_other_maps_anew(
    open_store: OpenStore,
    make_shelf: type[Shelf],
    key: Key,
    disk_bytes: Callable[[], int],
    folder: Path,
) -> None:
    first, second = open_store(), open_store()
    sizes = [make_shelf(row_bytes=size, pages=16) for size in (16_000, 8000, 1000)]
    for round_number in range(12):
        shelf, store = sizes[round_number % 3], (first, second)[round_number % 2]
        keys = [key(round_number * 16 + i, round_number % 3 + 1) for i in range(16)]
        assert set(shelf.put(store, keys)) == {WRITTEN}
        assert shelf.get(first, keys) == shelf.get(second, keys) == (OK,) * 16
        assert disk_bytes() <= 4 * MIB
    first.clear(key(0, 1)[:12])
    first.clear(key(0, 2)[:12])
    first.clear(key(0, 3)[:12])

    assert second.stats().objects == 0
    assert sizes[0].put(second, [key(1)]) == (WRITTEN,)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    assert "(deleted)" not in "".join(line for line in maps.splitlines() if str(folder) in line)


def test_b73_of_two_openers_that_write_one_key_one_stores_it(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    first, second = open_store(), open_store()
    mine, theirs = make_shelf(), make_shelf()
    answers: list[tuple[WriteStatus, ...]] = []

    def write_meanwhile() -> bool:
        answers.append(theirs.put(second, [key(0), key(1)]))
        return True

    keys = [key(1), key(2)]
    (answer,) = first.write([mine.batch(keys)], mine.access, may_publish=write_meanwhile)

    assert answers == [(WRITTEN, WRITTEN)]
    assert answer == (EXISTS, WRITTEN)
    every = [key(0), key(1), key(2)]
    assert mine.get(first, every) == theirs.get(second, every) == (OK,) * 3
    assert first.stats().objects == 3


def test_a_corrupt_object_is_gone_for_all(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    first, second = open_store(), open_store()
    shelf.put(first, [key(0)])
    with (folder / "segments" / "00000001.slab").open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")

    assert shelf.get(second, [key(0)]) == (CORRUPT,)

    assert first.exists([key(0)]) == (False,)
    assert (first.stats().counters["corrupt"], second.stats().counters["corrupt"]) == (0, 1)


# ---- marks ------------------------------------------------------------------------------------


def test_l3_what_another_opener_holds_or_reads_is_not_evicted(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    first, second = open_store(), open_store()
    shelf = make_shelf(layers=1, row_bytes=MIB, pages=2)
    shelf.put(first, [key(0), key(1)])
    hold = first.hold([key(0)], seconds=60)
    session = first.open_read(shelf.request([key(1)]))

    assert shelf.put(second, [key(2)]) == (FULL,)
    assert shelf.read(session, [key(1)]) == (OK,)
    session.close()
    assert shelf.put(second, [key(2)]) == (WRITTEN,)
    assert first.exists([key(0), key(1), key(2)]) == (True, False, True)
    hold.release()
    assert shelf.put(second, [key(3), key(4)]) == (WRITTEN, WRITTEN)


def test_what_another_opener_deletes_stays_readable_in_an_open_session(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    first, second = open_store(), open_store()
    shelf, other = (make_shelf(layers=1, row_bytes=MIB, pages=2) for _ in range(2))
    keys = [key(0), key(1)]
    shelf.put(first, keys)

    with first.open_read(shelf.request(keys)) as session:
        second.delete(keys)
        assert other.put(second, [key(2)]) == (FULL,)
        assert shelf.read(session, keys) == (OK, OK)
    assert other.put(second, [key(2), key(3)]) == (WRITTEN, WRITTEN)


def test_l3_a_hold_of_an_opener_that_is_idle_ends_by_the_clock(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    now = [100.0]
    first, second = open_store(clock=lambda: now[0]), open_store(clock=lambda: now[0])
    shelf = make_shelf(layers=1, row_bytes=MIB, pages=2)
    shelf.put(first, [key(0), key(1)])
    hold = first.hold([key(0), key(1)], seconds=5)

    now[0] += 4.9
    assert shelf.put(second, [key(2)]) == (FULL,)
    now[0] += 0.2
    assert shelf.put(second, [key(2), key(3)]) == (WRITTEN, WRITTEN)
    mine = second.hold([key(2)], seconds=60)
    hold.release()

    assert shelf.put(first, [key(4)]) == (WRITTEN,)
    assert first.exists([key(2), key(3)]) == (True, False), "the old hold was on another object"
    mine.release()


@pytest.mark.parametrize("what", ["holds", "reads", "writes"])
def test_b61_what_a_process_held_read_or_wrote_is_free_when_it_dies(
    open_store: OpenStore, make_shelf: type[Shelf], folder: Path, key: Key, what: str
) -> None:
    store = open_store()
    shelf = make_shelf(layers=1, row_bytes=MIB, pages=2)
    if what != "writes":
        shelf.put(store, [key(0), key(1)])

    with other_process(folder, what) as process:
        assert shelf.put(store, [key(2), key(3)]) == (FULL, FULL)
        process.kill()
        process.wait()
        assert shelf.put(store, [key(2), key(3)]) == (WRITTEN, WRITTEN)

    assert shelf.get(store, [key(2), key(3)]) == (OK, OK)
    assert store.exists([key(8), key(9)]) == (False, False)


# ---- openers ----------------------------------------------------------------------------------


def test_a_seat_is_free_again_after_its_opener_closed(open_store: OpenStore) -> None:
    stores = [open_store() for _ in range(MAX_SEATS)]

    with pytest.raises(StoreBusyError, match=f"is open 64 times, by processes {os.getpid()}; clos"):
        open_store()
    stores[10].close()

    assert open_store().exists([]) == ()


def test_the_last_one_who_closes_leaves_no_empty_file_and_the_others_go_on(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    first, second = open_store(), open_store()
    shelf.put(first, [key(i) for i in range(30)])
    first.close()

    assert shelf.get(second, [key(i) for i in range(30)]) == (OK,) * 30
    assert shelf.put(second, [key(i) for i in range(30, 60)]) == (WRITTEN,) * 30
    second.clear(key(0)[:12])
    second.close()

    assert list((folder / "segments").iterdir()) == []
    assert not (folder / "index.sqlite-wal").exists()


def test_a_stopped_process_that_has_a_lock_hangs_nobody_for_ever(
    open_store: OpenStore,
    shelf: Shelf,
    folder: Path,
    key: Key,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.2)
    store = open_store()
    shelf.put(store, [key(0)])

    with other_process(folder, "commits") as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert shelf.put(store, [key(1)]) == (WriteStatus.FAILED,)
        assert shelf.get(store, [key(0)]) == (OK,), "reading goes on"
        with pytest.raises(StoreTimeoutError, match=f"process {process.pid} has been changing"):
            store.delete([key(0)])
        with pytest.raises(StoreTimeoutError, match=f"process {process.pid} has been changing"):
            open_store()
        process.kill()
        process.wait()
        assert shelf.put(store, [key(1)]) == (WRITTEN,)

    assert shelf.get(store, [key(0), key(1)]) == (MISS, OK)
