"""The memory store: a file store in a tmpfs, which is there as long as somebody uses it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from memory_user import KEYS, User, bytes_in, open_shelf

import kvlinker_memory
from kvlinker.errors import ContractError, StoreError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.shelves import Shelf
from kvlinker_memory import MemoryStoreOptions, open_memory_store, tmpfs

OK = ReadStatus.OK
CAPACITY = 4 << 20
PAGE = 16 << 10


def open_it(folder: Path, *, keep: bool = False) -> Shelf:
    return open_shelf(folder / "store", capacity=CAPACITY, page_bytes=PAGE, keep=keep)


# ---- who has it open ------------------------------------------------------------------------------


def test_the_last_one_that_closes_it_gives_the_memory_back(in_memory: Path) -> None:
    first, second = open_it(in_memory), open_it(in_memory)
    first.stock(KEYS[:8])
    taken = bytes_in(in_memory)

    first.store.close()
    assert second.read(KEYS[:8]) == (OK,) * 8
    second.store.close()

    assert bytes_in(in_memory) < taken - 8 * PAGE
    assert not list((in_memory / "store" / "segments").iterdir())
    third = open_it(in_memory)
    assert third.store.stats().objects == 0
    third.store.close()


def test_what_the_last_one_still_reads_and_holds_is_given_back_too(in_memory: Path) -> None:
    shelf = open_it(in_memory)
    shelf.stock(KEYS[:4])
    session, hold = shelf.open(KEYS[:4]), shelf.store.hold(KEYS[:4], seconds=600)

    shelf.store.close()

    assert not list((in_memory / "store" / "segments").iterdir())
    session.close()
    hold.release()
    again = open_it(in_memory)
    assert again.write(KEYS[:4]) == (WriteStatus.WRITTEN,) * 4
    again.store.close()


def test_what_is_kept_is_there_when_it_is_opened_again(in_memory: Path) -> None:
    shelf = open_it(in_memory, keep=True)
    shelf.stock(KEYS[:4])

    shelf.store.close()

    again = open_it(in_memory)
    assert again.read(KEYS[:4]) == (OK,) * 4
    again.store.close()


def test_engine_processes_read_each_other_s_pages(in_memory: Path) -> None:
    first, second = (
        User(in_memory / "store", capacity=CAPACITY, page_bytes=PAGE) for _ in range(2)
    )

    assert first.tell("write", 0, 16) == "written"
    assert second.tell("read", 0, 16) == "ok"
    assert second.tell("write", 8, 16) == "exists written"
    assert first.tell("read", 16, 8) == "ok"
    first.close()
    assert second.tell("read", 0, 24) == "ok"
    second.close()

    assert not list((in_memory / "store" / "segments").iterdir())


def test_it_says_that_its_objects_do_not_outlive_its_users(in_memory: Path) -> None:
    store, keeping = open_it(in_memory).store, open_it(in_memory, keep=True).store

    assert not store.capabilities.persistent
    assert keeping.capabilities.persistent
    assert store.capabilities.shared
    store.close()
    keeping.close()


# ---- where it may be ------------------------------------------------------------------------------


def test_a_folder_in_another_file_system_is_refused_by_its_type() -> None:
    with pytest.raises(ContractError, match="/proc/self is on a file system of type proc"):
        open_memory_store(MemoryStoreOptions(path="/proc/self", capacity=CAPACITY))

    tmpfs.check_tmpfs(Path("/dev/shm/kvlinker-absent/store"))  # noqa: S108  # the place under test


def test_more_than_its_tmpfs_or_the_machine_has_is_refused(in_memory: Path) -> None:
    options = MemoryStoreOptions(path=in_memory / "store", capacity="1000TiB")

    with pytest.raises(
        ContractError, match=r"the capacity is 1099511627776000 B, and the machine has"
    ):
        open_memory_store(options)

    assert not (in_memory / "store").exists()


def test_a_small_tmpfs_is_refused_with_what_to_do(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs(in_memory)
    values = [*found]
    values[1], values[2] = 4096, 16384  # 64 MiB, as containers have by default
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(values))

    tmpfs.check_room(in_memory, 64 << 20)
    with pytest.raises(ContractError, match=r"its tmpfs has 67108864 B .*--shm-size=134217728"):
        tmpfs.check_room(in_memory, (64 << 20) + 1)


def test_without_a_path_it_is_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)

    options = MemoryStoreOptions(capacity="8GiB").file_options()

    assert options.path == Path("/dev/shm/kvlinker-4711")  # noqa: S108  # the place under test
    assert options.capacity == 8 << 30


def _made_for_us(folder: Path) -> None:
    folder.mkdir(mode=0o700)


def _linked_elsewhere(folder: Path) -> None:
    folder.symlink_to("/dev/shm")  # noqa: S108  # the place under test


@pytest.mark.parametrize(
    ("make", "owner"), [(_made_for_us, os.geteuid() + 1), (_linked_elsewhere, os.geteuid())]
)
def test_a_folder_that_another_user_made_under_this_user_s_name_is_refused(
    make: Callable[[Path], None], owner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody may make folders in /dev/shm, and who owns one reads and changes what lies in it."""
    folder = Path(f"/dev/shm/kvlinker-{os.getpid()}4711")  # noqa: S108  # the place under test
    monkeypatch.setattr(os, "getuid", lambda: int(f"{os.getpid()}4711"))
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    make(folder)
    try:
        with pytest.raises(StoreError, match=r"no folder of this user's"):
            open_memory_store(MemoryStoreOptions(capacity=CAPACITY))
    finally:
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)


def test_the_user_s_own_folder_is_made_for_the_user_alone_and_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(f"/dev/shm/kvlinker-{os.getpid()}4711")  # noqa: S108  # the place under test
    monkeypatch.setattr(os, "getuid", lambda: int(f"{os.getpid()}4711"))
    try:
        for _ in range(2):
            open_memory_store(MemoryStoreOptions(capacity=CAPACITY)).close()
            assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(folder)


def test_a_capacity_that_the_control_group_does_not_have_is_refused_with_what_to_do(
    in_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(tmpfs, "_CGROUP_LIMIT", limit)

    limit.write_text("3000000\n", encoding="ascii")
    with pytest.raises(
        ContractError,
        match=r"control group of this process has 3000000 B .* raise its memory limit",
    ):
        open_it(in_memory)
    limit.write_text("max\n", encoding="ascii")
    open_it(in_memory).store.close()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "option 'capacity' is needed"),
        ({"capacity": "4MiB", "kep": True}, "unknown option 'kep'; did you mean 'keep'"),
        ({"capacity": "4MiB", "durability": "disk"}, "unknown option 'durability'; known are"),
        ({"capacity": "4MiB", "keep": 1}, "keep must be true or false, got 1"),
        ({"capacity": "1MiB"}, "capacity must be at least"),
        ({"capacity": "much"}, "capacity: 'much' is not a number of bytes"),
        ({"capacity": "4MiB", "pin_bytes": "x"}, "pin_bytes: 'x' is not a number of bytes"),
        ({"capacity": "4MiB", "pin_bytes": -1}, "pin_bytes must be at least 0, got -1"),
    ],
)
def test_a_wrong_option_is_refused_by_name(config: Mapping[str, object], text: str) -> None:
    with pytest.raises(ContractError, match=text):
        kvlinker_memory.open_store(config)
