"""Many threads, one store: only statuses come out, no call waits for another's copy, and bytes are never mixed up."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from file_shelf import OpenStore, Shelf

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import StoreClosedError, StoreTimeoutError
from kvlinker.plans import TransferPlan
from kvlinker.store import ReadStatus, WriteStatus

Key = Callable[..., bytes]
OK, MISS = ReadStatus.OK, ReadStatus.MISS
WRITTEN, EXISTS = WriteStatus.WRITTEN, WriteStatus.EXISTS
DEADLINE = 30.0
"""Seconds after which a test that hangs fails."""


class PausedAccess(DeviceAccess):
    """An access that stops in the middle of each copy until it is let go."""

    def __init__(self, inner: DeviceAccess) -> None:
        self.inner = inner
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def _pause(self) -> None:
        self.begun.set()
        assert self.go_on.wait(DEADLINE)

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        self.inner.copy_out(plan, host)
        self._pause()

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        self._pause()
        self.inner.copy_in(plan, host)


class FailingAccess(DeviceAccess):
    """An access whose copies out fail once in so many times."""

    def __init__(self, inner: DeviceAccess, every: int) -> None:
        self.inner = inner
        self.every = every
        self.calls = 0

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        self.calls += 1
        self.inner.copy_out(plan, host)
        if self.calls % self.every == 0:
            msg = "the device says no"
            raise OSError(msg)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        self.inner.copy_in(plan, host)


def test_b71_objects_that_go_between_exists_and_read_are_misses(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    store = open_store()
    keys = [key(i) for i in range(6)]
    rounds = 10_000
    stop = threading.Event()

    def disturb(seed: int) -> None:
        choose = random.Random(seed)  # noqa: S311 - chooses interleavings, not secrets
        shelf = make_shelf(layers=1, row_bytes=64, pages=6)
        while not stop.is_set():
            chosen = choose.sample(keys, choose.randint(1, 3))
            if choose.random() < 0.5:
                assert all(isinstance(gone, bool) for gone in store.delete(chosen))
            else:
                assert set(shelf.put(store, chosen)) <= {WRITTEN, EXISTS}

    def read() -> set[ReadStatus]:
        choose = random.Random(0)  # noqa: S311 - chooses interleavings, not secrets
        shelf = make_shelf(layers=1, row_bytes=64, pages=2)
        seen: set[ReadStatus] = set()
        for _ in range(rounds // 4):
            present = [one for one, there in zip(keys, store.exists(keys), strict=True) if there]
            for one in (present or keys)[: choose.randint(1, 2)]:
                seen.update(shelf.get(store, [one]))
        return seen

    def look() -> None:
        for _ in range(rounds):
            assert len(store.exists(keys)) == 6

    with ThreadPoolExecutor(5) as threads:
        disturbing = [threads.submit(disturb, seed) for seed in range(2)]
        reading, looking = threads.submit(read), threads.submit(look)
        try:
            looking.result(120)
            seen = reading.result(120)
        finally:
            stop.set()
        for future in disturbing:
            future.result(DEADLINE)

    assert seen <= {OK, MISS}
    assert store.stats().counters["corrupt"] == 0


def test_b72_a_reader_never_sees_half_an_object(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    store = open_store(capacity="16MiB")
    writer, reader = (make_shelf(row_bytes=256 << 10, pages=1) for _ in range(2))
    done = threading.Event()
    seen: set[ReadStatus] = set()

    def watch() -> None:
        while not done.is_set():
            seen.update(reader.get(store, [key(0)]))

    with ThreadPoolExecutor(1) as threads:
        watching = threads.submit(watch)
        for _ in range(40):
            writer.put(store, [key(0)])
            store.delete([key(0)])
        done.set()
        watching.result(DEADLINE)

    assert seen <= {OK, MISS}


def test_b72_an_object_is_not_visible_while_it_is_copied(
    open_store: OpenStore, shelf: Shelf, key: Key
) -> None:
    store = open_store()
    batch, slow = shelf.batch([key(0)]), PausedAccess(shelf.access)

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(store.write, [batch], slow, may_publish=lambda: True)
        assert slow.begun.wait(DEADLINE)
        assert store.exists([key(0)]) == (False,)
        assert store.open_read(shelf.request([key(0)])).read(shelf.plan(1), shelf.access) == (MISS,)
        slow.go_on.set()
        assert writing.result(DEADLINE) == ((WRITTEN,),)

    assert store.exists([key(0)]) == (True,)


def test_b73_two_writers_of_one_key_leave_one_whole_object(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    store = open_store()
    first, second = make_shelf(), make_shelf()
    slow = PausedAccess(first.access)

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(
            store.write, [first.batch([key(0), key(1)])], slow, may_publish=lambda: True
        )
        assert slow.begun.wait(DEADLINE)
        assert second.put(store, [key(0)]) == (WRITTEN,)
        slow.go_on.set()
        assert writing.result(DEADLINE) == ((EXISTS, WRITTEN),)

    assert store.stats().objects == 2
    assert first.get(store, [key(0), key(1)]) == (OK, OK)
    objects = [key(i) for i in range(2, 26)]
    assert first.put(store, objects) == (WRITTEN,) * 24
    assert first.get(store, [key(0), key(1), *objects]) == (OK,) * 26


def test_b73_a_writer_that_fails_leaves_what_another_one_stored(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    store = open_store()
    first, second = make_shelf(), make_shelf()

    with pytest.raises(OSError, match="the device says no"):
        store.write(
            [first.batch([key(0)])], FailingAccess(first.access, 1), may_publish=lambda: True
        )
    assert store.exists([key(0)]) == (False,)
    second.put(store, [key(0)])
    with pytest.raises(OSError, match="the device says no"):
        store.write(
            [first.batch([key(0), key(1)])],
            FailingAccess(first.access, 1),
            may_publish=lambda: True,
        )

    assert store.exists([key(0), key(1)]) == (True, False)
    assert second.get(store, [key(0)]) == (OK,)


def test_b75_an_access_that_fails_once_in_three_costs_those_calls_alone(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    store = open_store()
    shelf = make_shelf()
    flaky = FailingAccess(shelf.access, 3)
    outcomes = []

    for i in range(9):
        try:
            answer = store.write([shelf.batch([key(i)])], flaky, may_publish=lambda: True)
            outcomes.append(answer == ((WRITTEN,),))
        except OSError:
            outcomes.append(False)

    assert outcomes == [True, True, False] * 3
    assert list(store.exists([key(i) for i in range(9)])) == outcomes


def test_loads_do_not_wait_for_offloads(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    store = open_store()
    shelf, other = make_shelf(), make_shelf()
    other.put(store, [key(0)])
    slow = PausedAccess(shelf.access)

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(
            store.write, [shelf.batch([key(1)])], slow, may_publish=lambda: True
        )
        assert slow.begun.wait(DEADLINE)
        assert other.get(store, [key(0)]) == (OK,)
        hold = store.hold([key(0)], seconds=1)
        hold.release()
        assert store.delete([key(0)]) == (True,)
        assert other.put(store, [key(2)]) == (WRITTEN,)
        assert not writing.done()
        slow.go_on.set()
        assert writing.result(DEADLINE) == ((WRITTEN,),)


def test_a_session_closed_during_a_read_keeps_its_objects_until_the_read_ends(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key
) -> None:
    store = open_store(capacity="3MiB")
    shelf, other = (
        make_shelf(layers=1, row_bytes=1 << 20, pages=1),
        make_shelf(layers=1, row_bytes=1 << 20, pages=1),
    )
    shelf.put(store, [key(0)])
    slow = PausedAccess(shelf.access)
    session = store.open_read(shelf.request([key(0)]))
    shelf.memory.poison()

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(session.read, shelf.plan(1), slow)
        assert slow.begun.wait(DEADLINE)
        session.close()
        assert store.delete([key(0)]) == (True,)
        assert other.put(store, [key(1)]) == (WriteStatus.FULL,), "the slot is still read"
        slow.go_on.set()
        assert reading.result(DEADLINE) == (OK,)

    assert shelf.holds(0, key(0))
    assert other.put(store, [key(1)]) == (WRITTEN,)


def test_closing_waits_for_calls_and_gives_up_in_bounded_time(
    open_store: OpenStore, shelf: Shelf, key: Key
) -> None:
    store = open_store(close_seconds=0.05)
    slow = PausedAccess(shelf.access)

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(
            store.write, [shelf.batch([key(0)])], slow, may_publish=lambda: True
        )
        assert slow.begun.wait(DEADLINE)
        with pytest.raises(StoreTimeoutError, match=r"1 calls still run after 0\.05 s"):
            store.close()
        with pytest.raises(StoreClosedError):
            store.exists([key(0)])
        slow.go_on.set()
        assert writing.result(DEADLINE) == ((WRITTEN,),)
        store.close()

    assert shelf.get(open_store(), [key(0)]) == (OK,)


def test_many_threads_that_do_everything_never_mix_up_bytes(
    open_store: OpenStore, make_shelf: type[Shelf], key: Key, disk_bytes: Callable[[], int]
) -> None:
    store = open_store(capacity="3MiB")

    def work(seed: int) -> int:
        choose = random.Random(seed)  # noqa: S311 - chooses interleavings, not secrets
        shelves = [make_shelf(row_bytes=size, pages=8) for size in (500, 3000, 40_000)]
        good = 0
        for _ in range(60):
            kind = choose.randrange(3)
            keys = [key(number, kind + 1) for number in choose.sample(range(40), 8)]
            action = choose.random()
            if action < 0.5:
                shelves[kind].put(store, keys, allowed=choose.random() < 0.9)
            elif action < 0.9:
                good += shelves[kind].get(store, keys, by_layer=choose.random() < 0.5).count(OK)
            elif action < 0.95:
                store.delete(keys)
            else:
                store.hold(keys, seconds=0.01)
            assert disk_bytes() <= 3 << 20
        return good

    with ThreadPoolExecutor(4) as threads:
        good = list(threads.map(work, range(4)))

    assert sum(good) > 50
    assert store.stats().counters["corrupt"] == 0
    assert store.stats().counters["evicted"] > 0


_COUNT_CALLS = """
import os, sys
sys.path.insert(0, sys.argv[2])
from file_shelf import Shelf, make_key
from kvlinker_file import FileStore, FileStoreOptions
shelf = Shelf(layers=1, row_bytes=64, pages=500)
store = FileStore(FileStoreOptions(path=sys.argv[1], capacity="8MiB"))
keys = [make_key(i) for i in range(int(sys.argv[3]))]
for start in range(0, len(keys), 500):
    shelf.put(store, keys[start : start + 500])
seen = []
sys.addaudithook(lambda event, arguments: seen.append(event))
def calls():
    with open("/proc/self/io") as file:
        return {line.split(":")[0]: int(line.split(":")[1]) for line in file}
before = calls()
quiet = len(seen)
for _ in range(100):
    assert store.exists(keys[:32]) == (True,) * 32
after = calls()
print(after["syscr"] - before["syscr"], after["syscw"] - before["syscw"], len(seen) - quiet)
"""


@pytest.mark.parametrize("objects", [500, 5000])
def test_b76_a_lookup_asks_the_kernel_nothing_however_many_objects_there_are(
    folder: Path, objects: int
) -> None:
    script = [sys.executable, "-c", _COUNT_CALLS, str(folder), str(Path(__file__).parent)]
    answer = subprocess.run([*script, str(objects)], capture_output=True, text=True, check=True)

    reads, writes, events = map(int, answer.stdout.split())
    assert writes == 0
    assert reads <= 2  # of /proc/self/io itself
    assert events <= 1  # its opening
    assert len(list((folder / "segments").iterdir())) < 100, "files are segments, not objects"
