"""A directory: its files are read by the system's own calls, and whatever else lies there is no object."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import kvlinker_s3
from kvlinker.device import HostAccess
from kvlinker.errors import StoreError
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.store import ReadStatus, Store
from kvlinker.testing.layered_pages import LayeredPages
from kvlinker.testing.shelves import Shelf, allow, object_keys
from kvlinker.testing.waiting import wait_for
from kvlinker_s3 import S3StoreOptions, half_written
from kvlinker_s3.directory_values import DirectoryValues
from kvlinker_s3.lanes import Lane
from kvlinker_s3.names import Names

OK, MISS = ReadStatus.OK, ReadStatus.MISS
SIZE = 600_000
"""Bytes of files that are read one by one."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = kvlinker_s3.open_store({"url": tmp_path.as_uri()})
    yield store
    store.close()


def file_of(folder: Path, key: bytes) -> Path:
    (path,) = folder.rglob(key.hex()[26:])
    return path


@pytest.mark.parametrize("kind", ["pipe", "folder", "file in the place of its folder"])
def test_what_lies_in_the_place_of_a_file_and_is_none_is_a_miss(
    store: Store, tmp_path: Path, kind: str
) -> None:
    shelf = Shelf(store)
    odd, sound = object_keys(2)
    shelf.stock([odd, sound])
    path = file_of(tmp_path, odd)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.parent.rmdir()
        path.parent.touch()

    assert shelf.read([odd, sound]) == (MISS, OK)
    assert store.exists([odd, sound]) == (False, True)
    assert store.delete([sound]) == (True,)
    assert store.stats().objects == 0


def test_b71_files_that_go_or_are_cut_between_two_layers_are_misses(
    store: Store, tmp_path: Path
) -> None:
    shelf = Shelf(store)
    gone, cut, folder, kept = keys = object_keys(4)
    shelf.stock(keys)

    with shelf.open(keys) as session:
        before = shelf.read(keys, session=session, layer=0)
        for key in (gone, folder):
            file_of(tmp_path, key).unlink()
        (file_of(tmp_path, kept).parent.parent / folder.hex()[24:26] / folder.hex()[26:]).mkdir()
        with file_of(tmp_path, cut).open("r+b") as file:
            file.truncate(400)
        after = shelf.read(keys, session=session, layer=1)

    assert before == (OK,) * 4
    assert OK not in after[:3]
    assert after[3] is OK


@pytest.mark.parametrize("spans", [1, 7, 100])
@pytest.mark.parametrize("is_by_layer", [False, True])
def test_l4_files_of_any_number_of_ranges_come_back_whole_and_layer_by_layer(
    store: Store, spans: int, *, is_by_layer: bool
) -> None:
    pages = LayeredPages(spans, 64)
    (key,) = object_keys(1)
    store.write([pages.batch(key)], HostAccess(), may_publish=allow)
    layers = [pages.layer(at) for at in range(spans)] if is_by_layer else [pages.target]

    with store.open_read(pages.request(key)) as session:
        statuses = [session.read(layer, HostAccess()) for layer in layers]

    assert set(statuses) == {(OK,)}
    assert (pages.memory[:, 1] == pages.memory[:, 0]).all()


def test_b76_files_of_several_namespaces_are_found_counted_and_cleared_each_alone(
    store: Store, tmp_path: Path
) -> None:
    shelf = Shelf(store)
    keys, others = object_keys(40), object_keys(3, model="other")
    shelf.stock([*keys, *others])
    file_of(tmp_path, keys[0]).with_name("notes.txt").write_text("notes")

    stats = store.stats()

    assert stats.objects == 43
    assert stats.used_bytes == 43 * file_of(tmp_path, keys[0]).stat().st_size
    assert store.delete([keys[0], others[0], keys[0]]) == (True, True, False)
    assert store.clear(keys[0][:NAMESPACE_BYTES]) == 39
    assert store.exists(others) == (False, True, True)
    assert len(list(tmp_path.rglob("notes.txt"))) == 1


@pytest.mark.parametrize("size", [1000, 300_000])
@pytest.mark.parametrize("present", [29, 30])
def test_files_are_handed_over_side_by_side_and_keep_their_order(
    tmp_path: Path, size: int, present: int
) -> None:
    options = S3StoreOptions(url=tmp_path.as_uri(), call_bytes=1 << 20)
    lane, names, keys = Lane(options, "loads"), Names(options.prefix), object_keys(30)
    values = DirectoryValues(lane, names, url=options.url, call_bytes=1 << 20, concurrency=4)
    for number, key in enumerate(keys[:present]):
        path = tmp_path / names.of_object(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * size)

    begun = {
        number: None if one is None else (bytes(one.raw), one.length)
        for some in values.begin(keys, size // 2)
        for number, one in some
    }
    ranges = [(0, size // 10), (size // 10, size // 10), (size // 2, size // 2)]
    fetched = [
        (one.range, number, None if view is None else bytes(view))
        for one in values.fetch(keys, ranges, expected=[(size - 1, 2)])
        for number, view in zip(one.numbers, one.views, strict=True)
    ]
    lane.close()

    assert begun == {
        n: (bytes([n]) * (size // 2), size) if n < present else None for n in range(30)
    }
    assert fetched == [
        (at, n, bytes([n]) * length if at < 3 and n < present else None)
        for at, (_, length) in enumerate([*ranges, (0, 2)])
        for n in range(30)
    ]


@pytest.mark.parametrize("call", ["begin", "fetch"])
def test_what_was_handed_over_stays_as_it_is_while_the_next_files_are_read(
    tmp_path: Path, call: str
) -> None:
    options = S3StoreOptions(url=tmp_path.as_uri(), concurrency=1)
    lane, names, keys = Lane(options, "loads"), Names(options.prefix), object_keys(8)
    values = DirectoryValues(lane, names, url=options.url, call_bytes=2 << 20, concurrency=1)
    for number, key in enumerate(keys):
        path = tmp_path / names.of_object(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * SIZE)

    if call == "begin":
        beginnings = values.begin(keys, SIZE)
        ((_, first),) = next(beginnings)
        view = None if first is None else first.raw
    else:
        fetching = values.fetch(keys, [(0, SIZE)])
        view = next(fetching).views[0]
    lane.run([lambda _: None] * 2)  # behind all that is read ahead, in the one thread
    assert view is not None
    found = bytes(view)
    lane.close()

    assert found == bytes(SIZE)


def test_a_file_that_another_machine_removed_under_us_is_a_miss(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(store)
    keys = object_keys(2)
    shelf.stock(keys)

    def be_stale(*_: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with shelf.open(keys) as session, monkeypatch.context() as patch:
        patch.setattr(os, "preadv", be_stale)
        assert shelf.read(keys) == (MISS, MISS)
        patch.undo()
        assert shelf.read(keys, session=session, layer=0) == (OK, OK)
        patch.setattr(os, "preadv", be_stale)
        assert shelf.read(keys, session=session, layer=2) == (MISS, MISS)


def test_a_closed_store_has_no_threads(store: Store) -> None:
    before = set(threading.enumerate())
    keys = object_keys(40)
    Shelf(store).stock(keys)
    assert all(store.exists(keys))

    store.close()

    wait_for(lambda: set(threading.enumerate()) <= before, "the end of the store's threads")


def test_more_ranges_than_one_call_of_the_system_takes_are_read(tmp_path: Path) -> None:
    options = S3StoreOptions(url=tmp_path.as_uri())
    lane, names, (key,) = Lane(options, "loads"), Names(options.prefix), object_keys(1)
    values = DirectoryValues(lane, names, url=options.url, call_bytes=1 << 20, concurrency=4)
    path = tmp_path / names.of_object(key)
    path.parent.mkdir(parents=True)
    path.write_bytes(content := bytes(at % 251 for at in range(2500)))

    ranges = [(at, 1) for at in range(2500)]
    fetched = [one.views[0] for one in values.fetch([key], ranges)]
    lane.close()

    assert b"".join(view for view in fetched if view is not None) == content


def test_a_file_that_the_system_gives_a_few_bytes_at_a_time_is_read_whole(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = LayeredPages(7, 1000)
    (key,) = object_keys(1)
    store.write([pages.batch(key)], HostAccess(), may_publish=allow)

    def read_a_few(file: int, views: Sequence[memoryview], start: int) -> int:
        piece = os.pread(file, min(333, len(views[0])), start)
        views[0][: len(piece)] = piece
        return len(piece)

    monkeypatch.setattr(os, "preadv", read_a_few)
    with store.open_read(pages.request(key)) as session:
        by_layer = [session.read(pages.layer(at), HostAccess()) for at in range(7)]

    assert set(by_layer) == {(OK,)}
    assert (pages.memory[:, 1] == pages.memory[:, 0]).all()


def test_a_file_that_the_system_refuses_is_an_error_that_names_the_store(
    store: Store, tmp_path: Path
) -> None:
    shelf = Shelf(store)
    (key,) = object_keys(1)
    shelf.stock([key])
    path = file_of(tmp_path, key)
    path.unlink()
    path.symlink_to(path.name)

    with pytest.raises(StoreError, match=f"{tmp_path.as_uri()}/kvlinker, loads: a request failed"):
        shelf.read([key])


class UntoldEntry:
    """What lies in a folder of a file system whose listings do not say what it is, and that is closed to us."""

    name = path = "0" * 24

    def is_dir(self, *, follow_symlinks: bool) -> bool:
        raise PermissionError(follow_symlinks)


def test_a_directory_with_something_in_it_that_cannot_be_told_is_opened_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_written, "entries_of", lambda _: [UntoldEntry()])

    assert half_written.sweep(tmp_path.as_uri(), "kvlinker") == 0
