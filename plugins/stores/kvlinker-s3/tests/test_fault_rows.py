"""Faults that other stores had, where a bucket or a directory is what they would happen to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from http_proxy import Asked, proxy_to
from s3_server import OpenStore, S3Server

import kvlinker_s3
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.shelves import Shelf, object_keys

OK, MISS = ReadStatus.OK, ReadStatus.MISS


def test_b72_what_a_writer_left_half_written_in_a_directory_is_no_object(tmp_path: Path) -> None:
    shelf = Shelf(kvlinker_s3.open_store({"url": tmp_path.as_uri()}))
    half, whole = object_keys(2)
    shelf.stock([half, whole])
    (path,) = tmp_path.rglob(half.hex()[26:])
    # The library writes to a name of its own and renames it then.
    path.rename(path.with_name(f"{path.name}#1"))

    assert shelf.store.exists([half, whole]) == (False, True)
    assert shelf.read([half, whole]) == (MISS, OK)
    assert shelf.store.stats().objects == 1
    assert shelf.write([half]) == (WriteStatus.WRITTEN,)
    assert shelf.read([half, whole]) == (OK, OK)
    shelf.store.close()


def test_b72_half_written_files_are_swept_when_nobody_can_be_writing_them_any_more(
    tmp_path: Path,
) -> None:
    options = {"url": tmp_path.as_uri(), "prefix": "pages/of-one-model"}
    shelf = Shelf(kvlinker_s3.open_store(options))
    keys = object_keys(3)
    shelf.stock(keys)
    old, fresh, whole = (next(tmp_path.rglob(key.hex()[26:])) for key in keys)
    for path in (old, fresh):
        path.rename(path.with_name(f"{path.name}#2"))
    strangers = tmp_path / options["prefix"] / "notes#1"
    strangers.touch()
    folder = fresh.with_name(f"{fresh.name}#3")
    folder.mkdir()
    for path in (old.with_name(f"{old.name}#2"), whole, strangers, folder):
        os.utime(path, (0, 0))
    shelf.store.close()

    Shelf(kvlinker_s3.open_store(options)).store.close()

    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {f"{fresh.name}#2", whole.name, "notes#1"}
    assert folder.is_dir()


def test_b76_a_lookup_and_a_load_list_nothing_however_much_the_bucket_holds(
    server: S3Server, open_store: OpenStore
) -> None:
    with proxy_to(server.port) as proxy:
        shelf = Shelf(open_store(proxy.port))
        keys = object_keys(4)
        shelf.stock(keys)

        def look_and_load() -> list[str]:
            before = len(proxy.asked)
            assert all(shelf.store.exists(keys))
            assert shelf.read(keys) == (OK,) * 4
            return sorted(kind_of(asked) for asked in proxy.asked[before:])

        alone = look_and_load()
        shelf.stock(object_keys(32, chain="others"))

        assert look_and_load() == alone
        assert not [kind for kind in alone if "list" in kind]


def kind_of(asked: Asked) -> str:
    """Return what kind of request one is."""
    return f"{'list ' if 'list-type' in asked.path else ''}{asked.method}"


@pytest.mark.parametrize("size", [0, 1, 100])
def test_b81_a_file_that_was_cut_off_is_a_miss_and_is_written_again(
    tmp_path: Path, size: int
) -> None:
    shelf = Shelf(kvlinker_s3.open_store({"url": tmp_path.as_uri()}))
    cut, whole = object_keys(2)
    shelf.stock([cut, whole])
    (path,) = tmp_path.rglob(cut.hex()[26:])
    path.write_bytes(path.read_bytes()[:size])

    statuses = shelf.read([cut, whole])

    assert statuses[0] is not OK
    assert statuses[1] is OK
    assert shelf.write([cut]) == (WriteStatus.WRITTEN,)
    assert shelf.read([cut, whole]) == (OK, OK)
    shelf.store.close()
