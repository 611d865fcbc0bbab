"""Who owns a directory, what may lie in it, and that nothing in it is followed or readable elsewhere."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from file_shelf import OpenStore, Shelf

from kvlinker.errors import StoreBusyError, StoreError, StoreFormatError
from kvlinker.store import ReadStatus
from kvlinker_file import FileStore, FileStoreOptions

Key = Callable[..., bytes]

_OWNER = """
import sys
from kvlinker_file import FileStore, FileStoreOptions
store = FileStore(FileStoreOptions(path=sys.argv[1], capacity="4MiB"))
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"capacity": "5MiB"}, "capacity of 4194304 B, this opener wants 5242880 B; open it with"),
        ({"durability": "disk"}, "durability 'process', this opener wants 'disk'; open it with"),
    ],
)
def test_an_opener_that_wants_another_store_than_those_who_have_it_open_is_refused(
    open_store: OpenStore, folder: Path, other: dict[str, str], message: str
) -> None:
    open_store()

    with pytest.raises(StoreBusyError, match=f"{folder}: is in use by process {os.getpid()} with"):
        open_store(**other)
    with pytest.raises(StoreBusyError, match=message):
        open_store(**other)


def test_a_seat_ends_with_the_process_that_has_it(open_store: OpenStore, folder: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"open\n"
        with pytest.raises(StoreBusyError, match=f"in use by process {owner.pid}"):
            open_store(capacity="5MiB")
        owner.kill()
        owner.communicate()

    assert open_store(capacity="5MiB").stats().objects == 0


def test_a_closed_store_can_be_opened_again_at_once(open_store: OpenStore) -> None:
    for _ in range(3):
        open_store().close()


def test_everything_in_the_directory_is_for_this_user_alone(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    os.umask(old := os.umask(0))
    try:
        os.umask(0)
        shelf.put(open_store(), [key(0)])
    finally:
        os.umask(old)

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert {modes.pop("store"), modes.pop("segments")} == {0o700}
    assert set(modes.values()) == {0o600}
    assert {"index.sqlite", "index.sqlite-wal", "lock", "00000001.slab"} <= modes.keys()


def test_a_directory_that_others_can_read_is_closed_to_them(
    open_store: OpenStore, folder: Path
) -> None:
    folder.mkdir()
    folder.chmod(0o755)

    open_store()

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_directory_that_everybody_writes_to_is_refused_and_left_as_it_is(
    open_store: OpenStore, folder: Path, mode: int
) -> None:
    folder.mkdir()
    folder.chmod(mode)

    with pytest.raises(StoreFormatError, match="everybody may write there"):
        open_store()

    assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert list(folder.iterdir()) == []


def test_a_directory_that_is_not_ours_is_refused_and_left_as_it_is(
    open_store: OpenStore, folder: Path
) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("dear")

    with pytest.raises(StoreFormatError, match=r"holds 'thesis.txt' and no kvlinker-file.json"):
        open_store()

    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "other", "version": 1}'])
def test_a_marker_of_something_else_is_refused(
    open_store: OpenStore, folder: Path, content: bytes
) -> None:
    folder.mkdir()
    (folder / "kvlinker-file.json").write_bytes(content)

    with pytest.raises(StoreFormatError, match="does not say 'kvlinker-file'"):
        open_store()


def test_a_pipe_in_the_place_of_the_marker_is_refused_and_not_waited_for(
    open_store: OpenStore, folder: Path
) -> None:
    folder.mkdir()
    os.mkfifo(folder / "kvlinker-file.json")

    with pytest.raises(StoreFormatError, match="does not say 'kvlinker-file'"):
        open_store()


def test_another_format_version_is_refused_with_both_versions(
    open_store: OpenStore, folder: Path
) -> None:
    open_store().close()
    marker = folder / "kvlinker-file.json"
    marker.write_text(json.dumps({"format": "kvlinker-file", "version": 1}))

    with pytest.raises(StoreFormatError, match="has format version 1, this release reads 2"):
        open_store()


def test_a_store_that_was_begun_and_not_finished_is_opened(
    open_store: OpenStore, folder: Path
) -> None:
    folder.mkdir()
    (folder / "lock").write_text("12345\n")
    (folder / "kvlinker-file.json.new").write_text("{")

    open_store().close()
    open_store()


def test_a_file_in_the_place_of_the_directory_is_refused(
    open_store: OpenStore, folder: Path
) -> None:
    folder.write_text("")

    with pytest.raises(StoreFormatError, match="Not a directory"):
        open_store()


def test_a_symlink_in_the_place_of_the_directory_is_refused_with_the_real_one(
    open_store: OpenStore, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    folder.symlink_to(tmp_path / "real")

    with pytest.raises(StoreFormatError, match=f"is a symlink; name the real .*{tmp_path}/real"):
        open_store()


@pytest.mark.parametrize("name", ["lock", "kvlinker-file.json", "index.sqlite", "segments"])
def test_no_symlink_within_the_store_is_followed(
    open_store: OpenStore, folder: Path, tmp_path: Path, name: str
) -> None:
    open_store().close()
    target = tmp_path / "target"
    (folder / name).rename(target)
    (folder / name).symlink_to(target)

    with pytest.raises(StoreFormatError, match=r"symlinks are not followed|no regular file"):
        open_store()


def test_a_symlink_in_the_place_of_a_segment_is_not_followed(
    open_store: OpenStore, shelf: Shelf, folder: Path, tmp_path: Path, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    store.close()
    slab = folder / "segments" / "00000001.slab"
    slab.rename(tmp_path / "elsewhere")
    slab.symlink_to(tmp_path / "elsewhere")

    store = open_store()

    assert store.exists([key(0)]) == (False,)
    assert shelf.put(store, [key(0)])[0].is_stored
    assert not slab.is_symlink()


def test_strange_files_among_the_segments_are_swept_or_left_and_do_no_harm(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])
    store.close()
    segments = folder / "segments"
    (segments / "00000077.slab").write_bytes(b"from a crash")
    (segments / "note.txt").write_text("?")
    (segments / "folder").mkdir()

    store = open_store()

    assert sorted(path.name for path in segments.iterdir()) == ["00000001.slab", "folder"]
    assert shelf.get(store, [key(0)]) == (ReadStatus.OK,)


def test_a_read_only_file_system_is_a_clear_error(folder: Path) -> None:
    script = """
import sys
from kvlinker.errors import StoreError
from kvlinker_file import FileStore, FileStoreOptions
try:
    FileStore(FileStoreOptions(path=sys.argv[1], capacity="4MiB"))
except StoreError as error:
    print(type(error).__name__, error)
"""
    folder.mkdir()
    run = [sys.executable, "-c", script, str(folder)]
    mount = [
        "/usr/bin/env",
        "unshare",
        "-rm",
        "sh",
        "-c",
        'mount -t tmpfs -o ro,mode=700 none "$0" && "$@"',
    ]
    answer = subprocess.run(
        [*mount, str(folder), *run], capture_output=True, text=True, check=False
    )
    if answer.returncode:  # this machine lets nobody mount: a directory says no instead
        folder.chmod(0o500)
        answer = subprocess.run(run, capture_output=True, text=True, check=True)

    assert answer.stdout.startswith("StoreError ")
    assert "a file store needs a directory that it can write" in answer.stdout


def test_a_path_below_a_file_is_a_clear_error(open_store: OpenStore, folder: Path) -> None:
    folder.write_text("")

    with pytest.raises(StoreFormatError, match=f"store/store: {folder} is no directory"):
        open_store(path=folder / "store")


def test_a_parent_that_cannot_be_made_is_named_with_the_next_step() -> None:
    path = "/proc/kvlinker/store"

    with pytest.raises(StoreError) as caught:
        FileStore(FileStoreOptions(path=Path(path), capacity=4 << 20))

    assert str(caught.value).startswith(f"file store {path}: /proc/kvlinker cannot be made: ")
    assert str(caught.value).endswith(
        "; name a path whose parent this user may write, or make the directory for this user first"
    )


def test_a_relative_path_is_logged_as_the_directory_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)

    with caplog.at_level(logging.INFO, logger="kvlinker_file.store"):
        FileStore(FileStoreOptions(path=Path("kv/store"), capacity=4 << 20)).close()

    assert caplog.messages == [
        f"kvlinker: file store in {tmp_path}/kv/store, with a capacity of 4194304 B and durability process"
    ]
