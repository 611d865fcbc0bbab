"""The compiled mover copies and sums as every mover has to, in the threads that it was given."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec

import numpy as np
import pytest
import xxhash

from kvlinker.frames import Checksum
from kvlinker.moving import summing_mover, using_mover
from kvlinker.testing.movers import MoverTests
from kvlinker_native import NativeMover, NativeMoverError, open_mover
from kvlinker_native.mover import THREADS_VARIABLE

LONG = 64 << 20
SHARE = 128 << 10
"""Bytes that a thread takes at a time."""


@pytest.fixture
def checksum() -> Checksum:
    return xxhash.xxh3_64_intdigest


class TestInOneThread(MoverTests):
    """The caller's."""

    @pytest.fixture
    def mover(self) -> NativeMover:
        return NativeMover(threads=1)


class TestInThreads(MoverTests):
    """More than there are cores, and than there are ranges in some shapes."""

    @pytest.fixture
    def mover(self) -> NativeMover:
        return NativeMover(threads=7)


def test_its_checksums_are_those_of_the_stores(checksum: Checksum) -> None:
    mover = open_mover()

    with using_mover(mover):
        assert summing_mover(checksum) is mover


def threads_of(mover: NativeMover, *, ranges: int, first: Callable[[], object] = int) -> int:
    """Return how many threads there were for ranges, each of which is a share by itself and takes a millisecond.

    `first` is called within the first share.
    """
    begins = iter([first])
    called = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)

    def sum_of(_address: int, _size: int) -> int:
        next(begins, int)()
        end = time.perf_counter() + 0.001
        while time.perf_counter() < end:
            pass
        return 0

    callback = called(sum_of)
    mover.use_sum(ctypes.cast(callback, ctypes.c_void_p))
    block = np.zeros((ranges, SHARE), dtype=np.uint8)
    sources = block.ctypes.data + np.arange(ranges) * SHARE
    sizes, sums = np.full(ranges, SHARE, dtype=np.int64), np.zeros(ranges, dtype=np.uint64)
    return mover.run(None, sources, sizes, sums)


def settles(mover: NativeMover, *, ranges: int, threads: int) -> bool:
    """Whether so many threads are there soon, and never more: those of the call before may not have ended yet."""
    for _ in range(100):
        found = threads_of(mover, ranges=ranges)
        if found >= threads:
            return found == threads
    return False


@pytest.mark.parametrize(
    ("ranges", "threads"),
    [(1, 1), (2, 1), (3, 2), (4, 3), (64, 5)],
)
def test_threads_are_taken_where_there_is_work_for_them(ranges: int, threads: int) -> None:
    assert settles(NativeMover(threads=5), ranges=ranges, threads=threads)


def test_what_is_done_before_a_thread_wakes_is_done_by_the_caller() -> None:
    """In most of many tries: the first share may be held up by whatever else a machine does.

    All ranges are the same one, which is in the cache: however slow a machine's memory is, they are soon summed.
    """
    source, sums = np.zeros(SHARE // 16, dtype=np.uint8), np.zeros(48, dtype=np.uint64)
    sources, sizes = np.full(48, source.ctypes.data), np.full(48, len(source), dtype=np.int64)
    mover = NativeMover(threads=5)

    tries = [mover.run(None, sources, sizes, sums) for _ in range(101)]

    assert sorted(tries)[50] == 1


def test_threads_that_work_beside_a_copy_are_helpers_less() -> None:
    mover = NativeMover(threads=3)

    with mover.beside_work():
        assert settles(mover, ranges=8, threads=2)
        with mover.beside_work(), mover.beside_work():
            assert settles(mover, ranges=8, threads=1)

    assert settles(mover, ranges=8, threads=3)


def test_calls_at_once_share_the_threads() -> None:
    entered, left = threading.Event(), threading.Event()

    def stay() -> None:
        entered.set()
        left.wait(60)

    other = NativeMover(threads=2)
    caller = threading.Thread(target=threads_of, args=(other,), kwargs={"ranges": 1, "first": stay})
    caller.start()
    assert entered.wait(60)
    found = threads_of(NativeMover(threads=2), ranges=8)
    left.set()
    caller.join()

    assert found == 1
    assert settles(NativeMover(threads=2), ranges=8, threads=2)


def test_a_process_that_was_forked_beside_a_copy_has_all_threads() -> None:
    mover = NativeMover(threads=3)
    with mover.beside_work():
        child = os.fork()
        if not child:
            os._exit(not settles(mover, ranges=8, threads=3))

    assert os.waitpid(child, 0)[1] == 0


def test_a_process_that_was_forked_copies_like_its_parent(checksum: Checksum) -> None:
    mover = NativeMover(threads=4)
    data = np.arange(LONG // 8, dtype=np.uint64).view(np.uint8).reshape(64, -1)
    sources = data.ctypes.data + np.arange(64) * data.shape[1]
    sizes = np.full(64, data.shape[1], dtype=np.int64)
    expected = [checksum(row.data) for row in data]
    assert mover.sums(sources, sizes).tolist() == expected

    child = os.fork()
    if not child:
        os._exit(mover.sums(sources, sizes).tolist() != expected)

    assert os.waitpid(child, 0)[1] == 0


def test_signals_are_left_to_the_threads_of_python() -> None:
    mover, seen = NativeMover(threads=4), []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(threading.current_thread()))
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(20):
            assert settles(mover, ranges=8, threads=4)
    finally:
        stop.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)

    assert set(seen) == {threading.main_thread()}


def test_python_goes_on_while_ranges_are_copied() -> None:
    """Whoever holds the interpreter's lock would stop the callback that runs in the midst of a call."""
    entered, left = threading.Event(), threading.Event()
    called = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)

    def sum_of(_address: int, _size: int) -> int:
        entered.set()
        return int(left.wait(60))

    mover = NativeMover(threads=1)
    callback = called(sum_of)
    mover.use_sum(ctypes.cast(callback, ctypes.c_void_p))
    block = np.zeros(8, dtype=np.uint8)
    found: list[int] = []
    thread = threading.Thread(
        target=lambda: found.extend(
            mover.sums(np.array([block.ctypes.data]), np.array([8])).tolist()
        )
    )
    thread.start()
    assert entered.wait(60)
    left.set()
    thread.join()

    assert found == [1]


def cores_of_threads(mover: NativeMover) -> dict[int, frozenset[int]]:
    """Let a call take two threads, and return where each may run."""
    seen: dict[int, frozenset[int]] = {}
    both = threading.Barrier(2)
    first = iter([0.01])  # a share that takes so long is worth a helper for the rest
    called = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)

    def sum_of(_address: int, _size: int) -> int:
        if pause := next(first, 0.0):
            time.sleep(pause)
        elif threading.get_native_id() not in seen:
            seen[threading.get_native_id()] = frozenset(os.sched_getaffinity(0))
            both.wait(60)
        return 0

    callback = called(sum_of)
    mover.use_sum(ctypes.cast(callback, ctypes.c_void_p))
    block = np.zeros((8, 1 << 18), dtype=np.uint8)
    mover.sums(block.ctypes.data + np.arange(8) * block.shape[1], np.full(8, block.shape[1]))
    return seen


def test_helpers_stay_off_the_core_that_the_caller_is_on() -> None:
    own = frozenset(os.sched_getaffinity(0))

    cores = cores_of_threads(NativeMover(threads=2))

    caller = cores.pop(threading.get_native_id())
    (helper,) = cores.values()
    assert caller == own  # only what the call started is bound
    assert helper < own if len(own) > 1 else helper == own


def test_helpers_share_the_only_core_that_the_caller_may_use() -> None:
    own = os.sched_getaffinity(0)
    only = {min(own)}
    os.sched_setaffinity(0, only)
    try:
        cores = cores_of_threads(NativeMover(threads=2))
    finally:
        os.sched_setaffinity(0, own)

    assert set(cores.values()) == {frozenset(only)}
    assert len(cores) == 2


@pytest.mark.parametrize("told", ["0", "65", "-1", "two", "", "1.5", "²"])
def test_a_number_of_threads_that_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, told)

    with pytest.raises(NativeMoverError, match=f"1 to 64 threads, got '{told}'; see KVLINKER_COPY"):
        open_mover()


def test_the_variable_says_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, "3")
    assert str(open_mover()) == "native, up to 3 threads"

    monkeypatch.delenv(THREADS_VARIABLE)
    assert open_mover().threads == min(4, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("missing", ["kvlinker_native.ranges", "xxhash._xxhash"])
def test_what_was_not_compiled_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    find = importlib.util.find_spec

    def finds_not(name: str) -> ModuleSpec | None:
        return None if name == missing else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", finds_not)

    with pytest.raises(NativeMoverError, match=f"{missing} is not there: it was not compiled"):
        open_mover()


def test_importing_it_imports_no_store_and_no_torch() -> None:
    source = (
        "import sys, kvlinker_native; "
        "print(sorted({'torch', 'xxhash', 'kvlinker_file'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", source], capture_output=True, check=True).stdout

    assert told.decode().strip() == "[]"
