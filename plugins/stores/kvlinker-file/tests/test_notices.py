"""Trouble that comes with every write is said at once and then once a minute, with bytes and what to do."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from file_shelf import Shelf, make_key

from kvlinker.errors import StoreFullError
from kvlinker.store import WriteStatus
from kvlinker_file import FileStore, FileStoreOptions
from kvlinker_file.catalog import Catalog
from kvlinker_file.directory import StoreDirectory
from kvlinker_file.notices import Notices

MIB = 1 << 20


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Give a function that returns the warnings since it was called last."""

    def take() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return lines

    with caplog.at_level(logging.WARNING):
        yield take


def failing(error: OSError) -> Callable[..., int]:
    """Return a stand-in for a call that fails."""

    def fail(*_: object, **__: object) -> int:
        raise error

    return fail


def test_the_same_trouble_is_said_once_a_minute_with_how_often_it_was_left_out(
    clock: Clock, said: Callable[[], list[str]]
) -> None:
    notices = Notices(Path("/kv"), clock)

    for _ in range(4):
        notices.warn("no room", "because")
    clock.now += 59.9
    notices.warn("no room", "because")
    assert said() == ["/kv: no room: because"]

    clock.now += 0.1
    notices.warn("no room", "still")
    notices.warn("no room", "still")
    assert said() == ["/kv: no room: still (4 more like it since the last line)"]

    clock.now += 60
    notices.warn("no room", "yet")
    assert said() == ["/kv: no room: yet (1 more like it since the last line)"]


def test_one_trouble_does_not_hide_another(clock: Clock, said: Callable[[], list[str]]) -> None:
    notices = Notices(Path("/kv"), clock)

    for what in ("no room", "no new file", "no room"):
        notices.warn(what, "because")

    assert said() == ["/kv: no room: because", "/kv: no new file: because"]


def fill(store: FileStore, count: int, *, start: int = 0) -> set[WriteStatus]:
    """Write objects of 64 KiB one by one."""
    shelf = Shelf(row_bytes=16 << 10, pages=1)
    answers = [shelf.put(store, [make_key(start + i)]) for i in range(count)]
    return {status for answer in answers for status in answer}


def test_writes_that_can_make_no_file_say_so_once(
    tmp_path: Path, clock: Clock, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = FileStoreOptions(path=tmp_path / "s", capacity=8 * MIB, segment_size=MIB)
    store = FileStore(options, clock=clock)
    fill(store, 1)
    monkeypatch.setattr(
        StoreDirectory,
        "create_segment",
        failing(PermissionError(errno.EACCES, "Permission denied")),
    )

    assert fill(store, 40, start=1) == {WriteStatus.WRITTEN}
    lines = said()
    clock.now += 60
    fill(store, 1, start=100)

    (later,) = said()
    store.close()
    assert lines == [f"{tmp_path}/s: no new file, evicting instead: [Errno 13] Permission denied"]
    assert later.startswith(lines[0])
    assert " more like it since the last line)" in later


def test_a_disk_without_room_is_named_in_bytes_with_what_to_do(
    tmp_path: Path, clock: Clock, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreDirectory, "disk_bytes", lambda _: (64 * MIB, 1000))
    store = FileStore(FileStoreOptions(path=tmp_path / "s", capacity=8 * MIB), clock=clock)

    statuses = fill(store, 5)

    (line,) = said()
    store.close()
    assert statuses == {WriteStatus.FULL}
    assert line.startswith(
        f"{tmp_path}/s: no room: 65792 B for 1 objects of 65536 B; 1000 B of the disk and "
    )
    assert line.endswith(
        " B of the capacity are free, and too few other objects may be evicted; free space on the disk"
    )


def test_a_disk_that_is_full_while_the_capacity_is_not_is_named_in_bytes(
    tmp_path: Path, clock: Clock, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = FileStoreOptions(path=tmp_path / "s", capacity=8 * MIB, segment_size=MIB)
    store = FileStore(options, clock=clock)
    fill(store, 1)
    monkeypatch.setattr(StoreDirectory, "disk_bytes", lambda _: (64 * MIB, 1000))

    statuses = fill(store, 40, start=1)

    (line,) = said()
    counters = store.stats().counters
    store.close()
    assert statuses == {WriteStatus.WRITTEN}
    assert counters["disk_full"] > 1
    assert line == (
        f"{tmp_path}/s: the disk is full, evicting instead: 1000 B are free, and a segment with an object of "
        f"65536 B does not fit; free space on it, or lower the capacity"
    )


def test_an_index_that_cannot_be_saved_is_said_once(
    tmp_path: Path, clock: Clock, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = FileStoreOptions(path=tmp_path / "s", capacity=8 * MIB, segment_size=MIB)
    store = FileStore(options, clock=clock)
    fill(store, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Catalog, "apply", failing(StoreFullError("database or disk is full")))
        statuses = fill(store, 10, start=1)

    (line,) = said()
    store.close()
    assert statuses == {WriteStatus.FULL}
    assert line == f"{tmp_path}/s: objects were not stored: database or disk is full"
