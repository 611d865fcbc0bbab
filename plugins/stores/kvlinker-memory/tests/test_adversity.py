"""What goes wrong where several processes share memory: killed ones, too little of it, and who is first to go."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from memory_user import KEYS, STEP, User, bytes_in, open_shelf

import kvlinker_file
from kvlinker.errors import StoreFormatError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.shelves import Shelf

OK = ReadStatus.OK
MIB = 1 << 20
CAPACITY = 2 * MIB
PAGE = 16 << 10


def open_it(folder: Path, *, capacity: int = CAPACITY) -> Shelf:
    return open_shelf(folder, capacity=capacity, page_bytes=PAGE)


def start(folder: Path) -> User:
    return User(folder, capacity=CAPACITY, page_bytes=PAGE)


def store(shelf: Shelf, first: int, last: int, *, step: int = STEP) -> int:
    """Store objects, of which each must be, and return how many of them are left."""
    for start in range(first, last, step):
        statuses = shelf.write(KEYS[start : min(start + step, last)])
        assert set(statuses) == {WriteStatus.WRITTEN}
    return sum(shelf.store.exists(KEYS[first:last]))


# ---- killed -------------------------------------------------------------------------------------


def test_t2_a_process_that_is_killed_in_a_write_leaves_nothing_of_it_and_takes_no_room(
    in_memory: Path,
) -> None:
    alone = open_it(in_memory / "alone")
    room = store(alone, 0, 200)
    alone.store.close()
    shelf, killed = open_it(in_memory / "store"), start(in_memory / "store")

    assert killed.tell("write", 0, 4) == "written"
    assert killed.tell("die", 4, 28) == ""
    killed.kill()

    assert shelf.store.exists(KEYS[:32]) == (True,) * 4 + (False,) * 28
    assert shelf.read(KEYS[:4]) == (OK,) * 4
    shelf.store.delete(KEYS[:4])
    assert store(shelf, 0, 200) == room
    shelf.store.close()
    assert not list((in_memory / "store" / "segments").iterdir())


def test_t3_what_a_killed_process_held_and_read_can_be_evicted(in_memory: Path) -> None:
    folder = in_memory / "store"
    shelf, killed = open_it(folder), start(folder)
    assert killed.tell("write", 0, 32) == "written"
    assert killed.tell("hold", 0, 32) == "held"

    assert killed.process.poll() is None
    killed.kill()

    store(shelf, 32, 232)
    assert not any(shelf.store.exists(KEYS[:32]))
    shelf.store.close()


def test_where_the_last_one_was_killed_the_next_one_finds_its_objects_and_gives_the_memory_back(
    in_memory: Path,
) -> None:
    folder = in_memory / "store"
    killed = start(folder)
    assert killed.tell("write", 0, 32) == "written"
    assert killed.tell("die", 32, 8) == ""
    killed.kill()
    left = bytes_in(folder)

    shelf = open_it(folder)
    found = shelf.read(KEYS[:32])
    shelf.store.close()

    assert found == (OK,) * 32
    assert left > 32 * PAGE
    assert bytes_in(folder) < left - 32 * PAGE
    assert not list((folder / "segments").iterdir())


def test_where_the_last_one_was_killed_a_smaller_capacity_drops_what_does_not_fit(
    in_memory: Path,
) -> None:
    folder = in_memory / "store"
    killed = User(folder, capacity=4 * MIB, page_bytes=PAGE)
    assert killed.tell("fill", 160) == "160 160"
    killed.kill()
    assert bytes_in(folder) > 2 * MIB

    smaller = open_it(folder, capacity=2 * MIB)

    assert bytes_in(folder) <= 2 * MIB
    assert 0 < smaller.store.stats().objects < 160
    smaller.store.close()


def test_where_the_last_one_was_killed_pruning_gives_the_memory_back(in_memory: Path) -> None:
    folder = in_memory / "store"
    killed = start(folder)
    assert killed.tell("write", 0, 32) == "written"
    killed.kill()

    report = kvlinker_file.prune(folder, to_bytes=0)

    assert (report.removed, report.objects) == (32, 0)
    assert report.freed_bytes > 32 * PAGE
    assert not list((folder / "segments").iterdir())


# ---- too little ---------------------------------------------------------------------------------


def test_t3_b78_all_processes_together_keep_to_the_capacity(in_memory: Path) -> None:
    folder = in_memory / "store"
    users = [start(folder) for _ in range(2)]
    most = 0

    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(user.tell, "fill", 320) for user in users]
        while not all(answer.done() for answer in answers):
            most = max(most, bytes_in(folder))
            time.sleep(0.001)
    most = max(most, bytes_in(folder))  # of a store that is full by now
    for user in users:
        user.close()

    assert [answer.result().split()[0] for answer in answers] == ["320", "320"]
    assert CAPACITY // 2 < most <= CAPACITY


def test_b78_where_others_have_filled_the_tmpfs_objects_stay_right_and_nothing_dies(
    tmp_path: Path,
) -> None:
    fill = 'mount -t tmpfs -o size=4m,mode=700 none "$0" && head -c 2560K /dev/zero > "$0/others" && exec "$@"'
    within = ["/usr/bin/env", "unshare", "-rm", "sh", "-c", fill, str(tmp_path)]
    user = User(tmp_path / "store", capacity=4 * MIB, page_bytes=PAGE, within=within)

    stored, left = map(int, user.tell("fill", 160).split())

    assert 0 < left < 160
    assert stored >= left
    assert user.tell("read", stored - 1, 1) in ("ok", "miss")
    user.close()


# ---- who goes first -----------------------------------------------------------------------------


def test_t3_what_any_process_used_least_recently_goes_first(in_memory: Path) -> None:
    folder = in_memory / "store"
    shelf, reader = open_it(folder), start(folder)
    left = store(shelf, 0, 200, step=1)  # of one call, the last is the first to go
    first = 200 - left  # the oldest that is left
    assert shelf.store.exists(KEYS[first - 1 : first + 1]) == (False, True)

    assert reader.tell("read", first, 16) == "ok"
    store(shelf, 200, 232, step=1)

    kept = shelf.store.exists(KEYS[first : first + 64])
    assert kept == (True,) * 16 + (False,) * 32 + (True,) * 16
    reader.close()
    shelf.store.close()


def test_l3_what_any_process_holds_stays(in_memory: Path) -> None:
    folder = in_memory / "store"
    shelf, holder = open_it(folder), start(folder)
    assert holder.tell("write", 0, 16) == "written"
    assert holder.tell("hold", 0, 16) == "held"

    store(shelf, 16, 216)

    assert shelf.read(KEYS[:16]) == (OK,) * 16
    holder.close()
    store(shelf, 216, 416)
    assert not any(shelf.store.exists(KEYS[:16]))
    shelf.store.close()


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_that_everybody_may_write_to_is_refused(in_memory: Path, mode: int) -> None:
    folder = in_memory / "store"
    folder.mkdir()
    folder.chmod(mode)

    with pytest.raises(StoreFormatError, match="everybody may write there"):
        open_it(folder)
