"""The memory store: a file store in a tmpfs, which is there as long as somebody uses it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from file_shelf import Shelf, make_key

from kvlinker.errors import ContractError, StoreError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.stores import (
    Damage,
    StoreTests,
    flip_byte_in_files,
)
from kvlinker_file import FileStore, memory, tmpfs
from kvlinker_file.memory import MemoryStoreOptions, open_memory_store

OK = ReadStatus.OK
TESTS = Path(__file__).parent
CAPACITY = 4 << 20

_CHILD = """
import signal, sys
sys.path.insert(0, sys.argv[2])
from file_shelf import Shelf, make_key
from kvlinker_file.memory import MemoryStoreOptions, open_memory_store
store = open_memory_store(MemoryStoreOptions(path=sys.argv[1], capacity="4MiB"))
shelf = Shelf()
keys = [make_key(i) for i in range(4)]
shelf.put(store, keys)
print("ready", flush=True)
sys.stdin.readline()
store.close()
print("closed", flush=True)
"""


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Give a folder of its own in a tmpfs."""
    folder = Path(tempfile.mkdtemp(prefix="kvlinker-test-", dir="/dev/shm"))  # the place under test
    yield folder
    shutil.rmtree(folder)


def open_it(folder: Path, *, keep: bool = False) -> FileStore:
    return open_memory_store(
        MemoryStoreOptions(path=folder / "store", capacity=CAPACITY, keep=keep)
    )


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


class TestMemoryStore(StoreTests):
    plugin = memory

    @pytest.fixture
    def config(self, in_memory: Path) -> Mapping[str, object]:
        return {"path": str(in_memory / "store"), "capacity": "4MiB"}

    @pytest.fixture
    def damage(self, in_memory: Path) -> Damage:
        return lambda _store, _key, payload: flip_byte_in_files(in_memory, payload)


# ---- who has it open ------------------------------------------------------------------------------


def test_the_last_one_that_closes_it_gives_the_memory_back(in_memory: Path) -> None:
    first, second = open_it(in_memory), open_it(in_memory)
    shelf, keys = Shelf(), [make_key(i) for i in range(8)]
    shelf.put(first, keys)
    taken = bytes_in(in_memory)

    first.close()
    assert shelf.get(second, keys) == (OK,) * 8
    second.close()

    assert bytes_in(in_memory) < taken - 8 * shelf.request(keys).object_bytes
    assert not list((in_memory / "store" / "segments").iterdir())
    third = open_it(in_memory)
    assert third.stats().objects == 0
    third.close()


def test_what_the_last_one_still_reads_and_holds_is_given_back_too(in_memory: Path) -> None:
    store = open_it(in_memory)
    shelf, keys = Shelf(), [make_key(i) for i in range(4)]
    shelf.put(store, keys)
    session, hold = store.open_read(shelf.request(keys)), store.hold(keys, seconds=600)

    store.close()

    assert not list((in_memory / "store" / "segments").iterdir())
    session.close()
    hold.release()
    again = open_it(in_memory)
    assert shelf.put(again, keys) == (WriteStatus.WRITTEN,) * 4
    again.close()


def test_what_is_kept_is_there_when_it_is_opened_again(in_memory: Path) -> None:
    store = open_it(in_memory, keep=True)
    shelf, keys = Shelf(), [make_key(i) for i in range(4)]
    shelf.put(store, keys)

    store.close()

    again = open_it(in_memory)
    assert shelf.get(again, keys) == (OK,) * 4
    again.close()


def test_processes_share_it_and_one_that_is_killed_leaves_its_objects(in_memory: Path) -> None:
    store = open_it(in_memory)
    shelf, keys = Shelf(), [make_key(i) for i in range(4)]
    command = [sys.executable, "-c", _CHILD, str(in_memory / "store"), str(TESTS)]

    with start(command) as killed, start(command) as closing:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "ready\n"
        os.kill(killed.pid, signal.SIGKILL)
        assert closing.communicate("\n", timeout=60)[0] == "ready\nclosed\n"

    assert shelf.get(store, keys) == (OK,) * 4
    store.close()
    assert not list((in_memory / "store" / "segments").iterdir())


def test_it_says_that_its_objects_do_not_outlive_its_users(in_memory: Path) -> None:
    store, keeping = open_it(in_memory), open_it(in_memory, keep=True)

    assert not store.capabilities.persistent
    assert keeping.capabilities.persistent
    assert store.capabilities.shared
    store.close()
    keeping.close()


# ---- where it may be ------------------------------------------------------------------------------


def test_a_folder_in_another_file_system_is_refused_by_its_type() -> None:
    with pytest.raises(ContractError, match="/proc/self is on a file system of type proc"):
        open_it(Path("/proc") / "self")

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


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "option 'capacity' is needed"),
        ({"capacity": "4MiB", "kep": True}, "unknown option 'kep'; did you mean 'keep'"),
        ({"capacity": "4MiB", "durability": "disk"}, "unknown option 'durability'; known are"),
        ({"capacity": "4MiB", "keep": 1}, "keep must be true or false, got 1"),
        ({"capacity": "1MiB"}, "capacity must be at least"),
        ({"capacity": "much"}, "capacity must be a number of bytes or a text"),
    ],
)
def test_a_wrong_option_is_refused_by_name(config: Mapping[str, object], text: str) -> None:
    with pytest.raises(ContractError, match=text):
        memory.open_store(config)
