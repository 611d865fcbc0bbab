"""What an attack on the store found: nothing is lost or served wrongly when several mishaps come together."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from file_shelf import OpenStore, Shelf

from kvlinker.errors import StoreError
from kvlinker.store import ReadSession, ReadStatus, WriteStatus
from kvlinker_file import FileStore, directory, opening, verify
from kvlinker_file.catalog import CatalogChange
from kvlinker_file.directory import StoreDirectory
from kvlinker_file.locks import LOCK_SECONDS
from kvlinker_file.segments import Segment
from kvlinker_file.state import StoreState
from kvlinker_file.table_layout import Word
from kvlinker_file.tables import SharedTables

Key = Callable[..., bytes]
OK, FAILED = ReadStatus.OK, ReadStatus.FAILED
WRITTEN, FULL = WriteStatus.WRITTEN, WriteStatus.FULL


def state_of(store: FileStore) -> StoreState:
    return store._state  # noqa: SLF001 - mishaps are made where no caller can reach


def break_tables(folder: Path) -> None:
    """Leave the mark of an opener that died while it changed the tables."""
    with (folder / "index.shared").open("r+b") as file:
        file.seek(8 * Word.TABLES_MARK)
        file.write(b"\x01")


# ---- kills ------------------------------------------------------------------------------------


def test_nobody_writes_into_a_file_that_is_being_deleted_though_the_tables_are_made_again_meanwhile(
    open_store: OpenStore, folder: Path, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_store(), open_store()
    shelf, new = Shelf(), [key(50 + i) for i in range(4)]
    shelf.put(first, [key(0)])
    first.delete([key(0)])
    commit, remove = StoreState.commit, StoreDirectory.remove_segment
    has_slots, is_deleted = threading.Event(), threading.Event()
    answers: list[tuple[WriteStatus, ...]] = []

    def write() -> None:
        def wait() -> bool:
            has_slots.set()
            return is_deleted.wait(60)

        answers.extend(second.write([shelf.batch(new)], shelf.access, may_publish=wait))

    writer = threading.Thread(target=write)

    def commit_among_ruins(state: StoreState, **change: object) -> None:
        if change.get("removed_segments"):
            break_tables(folder)
        commit(state, **change)  # type: ignore[arg-type]  # passed on as they came

    def remove_while_somebody_writes(where: StoreDirectory, number: int) -> None:
        if not writer.ident:
            writer.start()
            has_slots.wait(0.5)  # in vain: the writer finds no slot, and waits to make a file
        remove(where, number)

    monkeypatch.setattr(StoreState, "commit", commit_among_ruins)
    monkeypatch.setattr(StoreDirectory, "remove_segment", remove_while_somebody_writes)
    with state_of(first).committing():
        state_of(first).remove_empty_segments()
    is_deleted.set()
    writer.join()

    assert answers == [(WRITTEN,) * 4]
    assert shelf.get(first, new) == (OK,) * 4


def test_an_object_that_was_stored_again_outlives_the_one_whose_removal_was_never_saved(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    first, second = open_store(), open_store()
    keys = [key(i) for i in range(4)]
    shelf.put(first, keys)
    first._remove(keys)  # noqa: SLF001 - it would save that now
    assert shelf.put(second, keys) == (WRITTEN,) * 4

    break_tables(folder)

    assert shelf.get(second, keys) == (OK,) * 4


def test_slots_that_somebody_took_in_a_new_file_stay_taken_though_its_maker_shows_it_afterwards(
    open_store: OpenStore, folder: Path, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_store(), open_store()
    shelf, new = Shelf(), [key(50 + i) for i in range(4)]
    commit, save = StoreState.commit, StoreState.save
    has_slots, may_publish = threading.Event(), threading.Event()
    answers: list[tuple[WriteStatus, ...]] = []

    def write() -> None:
        def wait() -> bool:
            has_slots.set()
            return may_publish.wait(60)

        answers.extend(second.write([shelf.batch(new)], shelf.access, may_publish=wait))

    writer = threading.Thread(target=write)

    def save_among_ruins(state: StoreState, change: CatalogChange) -> None:
        save(state, change)
        if change.segments:
            break_tables(folder)

    def commit_and_let_others_in(state: StoreState, **change: object) -> None:
        commit(state, **change)  # type: ignore[arg-type]  # passed on as they came
        if change.get("segments"):
            writer.start()
            assert has_slots.wait(60)

    monkeypatch.setattr(StoreState, "save", save_among_ruins)
    monkeypatch.setattr(StoreState, "commit", commit_and_let_others_in)
    assert Shelf().put(first, [key(0)]) == (WRITTEN,)
    tables = state_of(first).tables
    assert tables.segments["used"].sum() == np.count_nonzero(tables.rows.state) == 5
    may_publish.set()
    writer.join()

    assert answers == [(WRITTEN,) * 4]
    assert shelf.get(first, new) == (OK,) * 4


def test_an_object_that_was_deleted_before_its_writer_shows_it_stays_deleted(
    open_store: OpenStore, folder: Path, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_store(), open_store()
    shelf = Shelf()
    shelf.put(first, [key(1)])
    commit, save = StoreState.commit, StoreState.save
    sessions: list[ReadSession] = []

    def save_among_ruins(state: StoreState, change: CatalogChange) -> None:
        save(state, change)
        if change.added:
            break_tables(folder)

    def commit_and_let_others_in(state: StoreState, **change: object) -> None:
        commit(state, **change)  # type: ignore[arg-type]  # passed on as they came
        if change.get("added"):
            sessions.append(second.open_read(shelf.request([key(0)])))
            second._remove([key(0)])  # noqa: SLF001  # a `delete` would wait for the writer now

    with monkeypatch.context() as patch:
        patch.setattr(StoreState, "save", save_among_ruins)
        patch.setattr(StoreState, "commit", commit_and_let_others_in)
        shelf.put(first, [key(0)])

    assert first.exists([key(0)]) == (False,)
    assert np.count_nonzero(state_of(first).tables.rows.pins) == 1, "it is still being read"
    with sessions[0] as session:
        assert shelf.read(session, [key(0)]) == (OK,)


@pytest.mark.parametrize("size", [512, 4096, None])
def test_tables_full_of_ones_are_made_again_while_they_are_open(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, size: int | None
) -> None:
    store, keys = open_store(), [key(i) for i in range(4)]
    shelf.put(store, keys)
    path = folder / "index.shared"

    with path.open("r+b") as file:
        file.write(b"\xff" * (size or path.stat().st_size))

    assert shelf.get(store, keys) == (OK,) * 4


@pytest.mark.parametrize(
    "word",
    [
        Word.BUCKETS_USED,
        Word.OBJECTS,
        Word.SEGMENTS_VERSION,
        Word.LAST_TICK,
        Word.COMMITS,
        Word.LAST_INCARNATION,
        Word.SEATS,
    ],
)
def test_a_word_that_was_overwritten_disturbs_no_call(
    open_store: OpenStore, make_shelf: type[Shelf], folder: Path, key: Key, word: Word
) -> None:
    store, shelf, keys = open_store(), make_shelf(), [key(i) for i in range(4)]
    shelf.put(store, keys)

    with (folder / "index.shared").open("r+b") as file:
        file.seek(8 * word)
        file.write(b"\xff" * 8)

    assert shelf.get(store, keys) == (OK,) * 4
    assert make_shelf(row_bytes=9000).put(store, [key(9)]) == (WRITTEN,)
    assert shelf.put(store, [key(8)]) == (WRITTEN,)
    assert store.delete([key(8)]) == (True,)
    store.close()
    assert shelf.get(open_store(), keys) == (OK,) * 4


# ---- restarts ---------------------------------------------------------------------------------


def test_who_does_not_verify_never_serves_what_only_verifying_openers_kept_over_a_restart(
    open_store: OpenStore, shelf: Shelf, tmp_path: Path, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("11111111-1111-1111-1111-111111111111")
    monkeypatch.setattr(opening, "_BOOT_ID", boot)
    store = open_store()
    shelf.put(store, [key(0)])
    store.close()
    boot.write_text("22222222-2222-2222-2222-222222222222")

    verifying = open_store(verify=True)
    beside = open_store(verify=False)
    assert state_of(beside).options.verify
    beside.close()
    verifying.close()
    alone = open_store(verify=False)
    assert alone.exists([key(0)]) == (False,)
    shelf.put(alone, [key(1)])
    alone.close()
    assert open_store(verify=False).exists([key(1)]) == (True,)


# ---- processes at their limits ----------------------------------------------------------------


def test_a_file_that_cannot_be_opened_now_fails_the_read_and_costs_no_object(
    open_store: OpenStore,
    shelf: Shelf,
    folder: Path,
    key: Key,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = open_store(), open_store()
    keys = [key(i) for i in range(4)]
    shelf.put(first, keys)

    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "map", fail)
        assert shelf.get(second, keys) == (FAILED,) * 4
        with pytest.raises(StoreError, match="4 objects cannot be read now"):
            verify(folder, drop=True)

    assert second.stats().counters["disk_errors"] == 1
    assert shelf.get(second, keys) == (OK,) * 4


def test_verify_misses_the_file_that_its_users_still_have_mapped(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(i) for i in range(4)])
    (folder / "segments" / "00000001.slab").unlink()

    found = verify(folder)

    assert (found.objects, found.intact, found.foreign) == (4, 0, 4)


def test_enospc_a_file_that_could_not_be_cut_anew_gives_slots_and_is_evicted_as_before(
    open_store: OpenStore,
    make_shelf: type[Shelf],
    key: Key,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store(capacity="3MiB", segment_size="256KiB")
    large, small = make_shelf(layers=1, row_bytes=100_000), make_shelf(layers=1, row_bytes=500)
    for i in range(40):
        large.put(store, [key(i)])

    def fail(*_: object) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(SharedTables, "reserve", fail)
        assert small.put(store, [key(100)]) == (FULL,)

    tables = state_of(store).tables
    assert not tables.segments["is_retired"].any()
    assert small.put(store, [key(100)]) == (WRITTEN,)


def test_tables_that_grew_and_cannot_be_mapped_stay_as_they_were(
    open_store: OpenStore,
    make_shelf: type[Shelf],
    key: Key,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = open_store(capacity="64MiB"), open_store(capacity="64MiB")
    shelf = make_shelf(layers=1, row_bytes=100)
    keys = [key(i) for i in range(32)]
    shelf.put(first, keys)

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with state_of(first).committing(), state_of(first).changing(), monkeypatch.context() as patch:
        patch.setattr(SharedTables, "map_anew", fail)
        with pytest.raises(OSError, match="Too many"):
            state_of(first).tables.reserve(100_000)

    assert shelf.get(second, keys) == (OK,) * 32
    assert shelf.get(first, keys) == (OK,) * 32


def test_what_a_call_could_not_let_go_of_because_of_a_lock_the_next_call_lets_go_of(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_store(), open_store()
    shelf, other = (make_shelf(layers=1, row_bytes=1 << 19, pages=4) for _ in range(2))
    shelf.put(first, [key(0), key(1)])
    session = first.open_read(shelf.request([key(0), key(1)]))
    has_lock, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(state_of(first).sections._change, "_seconds", 0.05)  # noqa: SLF001 - not 30 s

    def keep_the_lock() -> None:
        with state_of(second).changing():
            has_lock.set()
            may_end.wait(60)

    def forbid() -> bool:
        stopped.start()
        return not has_lock.wait(60)

    stopped = threading.Thread(target=keep_the_lock)
    (answer,) = first.write([shelf.batch([key(2), key(3)])], shelf.access, may_publish=forbid)
    session.close()
    may_end.set()
    stopped.join()

    assert answer == (WriteStatus.DISCARDED,) * 2
    first.hold([key(0)], seconds=1).release()
    assert other.put(second, [key(10 + i) for i in range(4)]) == (WRITTEN,) * 4


def test_places_of_files_that_are_gone_are_forgotten(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    store = open_store(segment_size="256KiB")
    shelves = [make_shelf(layers=1, row_bytes=size, pages=8) for size in (9000, 20_000, 50_000)]
    for i in range(120):
        shelves[i // 10 % 3].put(store, [key(8 * i + j) for j in range(8)])

    state = state_of(store)
    assert len(state.index._cursors) <= len(list(state.space)) + 4  # noqa: SLF001 - what must not grow


# ---- holds, locks, forks ----------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [1e10, 1e300])
def test_a_hold_for_ever_is_a_hold_and_no_reason_to_make_the_tables_again(
    open_store: OpenStore, shelf: Shelf, key: Key, seconds: float
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])

    hold = store.hold([key(0)], seconds=seconds)

    words = state_of(store).tables.words
    assert not int(words[Word.TABLES_MARK]) % 2
    rows = np.flatnonzero(state_of(store).tables.rows.holds)
    assert state_of(store).tables.rows.held_until[rows].tolist() == [1 << 62]
    hold.release()


@pytest.mark.parametrize("section", ["changing", "committing"])
def test_a_store_that_is_collected_while_another_one_has_a_lock_does_not_wait_for_it(
    open_store: OpenStore, shelf: Shelf, key: Key, section: str
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    cycle: list[object] = [FileStore(state_of(store).options)]
    cycle.append(cycle)
    del cycle
    start = time.monotonic()

    with getattr(state_of(store), section)():
        gc.collect()

    assert time.monotonic() - start < LOCK_SECONDS
    assert shelf.get(store, [key(0)]) == (OK,)
    store.close()
    assert shelf.get(open_store(), [key(0)]) == (OK,)


def test_a_child_that_is_forked_in_the_middle_of_an_opening_keeps_no_lock(
    open_store: OpenStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_marker = StoreDirectory._read_or_make_marker  # noqa: SLF001 - the middle of an opening
    kept: list[set[str]] = []

    def fork(where: StoreDirectory, *, create: bool) -> None:
        out, into = os.pipe()
        if not (child := os.fork()):
            names = {str(path.resolve()) for path in Path("/proc/self/fd").iterdir()}
            os.write(into, "\n".join(names).encode())
            os._exit(0)
        os.waitpid(child, 0)
        kept.append({n for n in os.read(out, 1 << 16).decode().split("\n") if str(folder) in n})
        os.close(out)
        os.close(into)
        make_marker(where, create=create)

    monkeypatch.setattr(StoreDirectory, "_read_or_make_marker", fork)
    open_store()

    assert kept == [set()]


def test_openings_leave_nothing_for_forks_to_do(open_store: OpenStore) -> None:
    before = len(directory._open_directories)  # noqa: SLF001 - what a fork goes through
    for _ in range(3):
        open_store().close()
    gc.collect()
    assert len(directory._open_directories) - before <= 3  # noqa: SLF001 - as many as the fixture keeps
