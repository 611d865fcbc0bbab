"""Locks exclude threads and openers, end with whoever has them, and are not waited for for ever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvlinker.errors import StoreTimeoutError
from kvlinker_file.locks import LockFile, SharedLock

OpenLock = Callable[..., SharedLock]


@pytest.fixture
def open_file(tmp_path: Path) -> Iterator[Callable[[], LockFile]]:
    """Give a function that opens the lock file once more."""
    descriptors: list[int] = []

    def open_it() -> LockFile:
        descriptors.append(os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600))
        return LockFile(descriptors[-1])

    yield open_it
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
def open_lock(open_file: Callable[[], LockFile]) -> OpenLock:
    """Give a function that makes a lock of another opener on the same byte."""

    def make(seconds: float = 30.0) -> SharedLock:
        return SharedLock(
            open_file(), 5, describe=lambda: "process 7 has been at it", seconds=seconds
        )

    return make


def test_a_byte_belongs_to_one_opener_even_within_a_process(
    open_file: Callable[[], LockFile],
) -> None:
    first, second = open_file(), open_file()

    assert first.try_lock(3)
    assert first.try_lock(3), "it has it already"
    assert (second.try_lock(3), second.try_lock(4)) == (False, True)
    assert (second.is_taken(3), first.is_taken(3), first.is_taken(4)) == (True, False, True)
    first.unlock(3)
    assert second.try_lock(3)
    second.unlock_all()
    assert not first.is_taken(3)
    assert not first.is_taken(4)


def test_a_lock_ends_with_the_last_descriptor_of_its_opener(
    tmp_path: Path, open_file: Callable[[], LockFile]
) -> None:
    descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    other = open_file()
    assert LockFile(descriptor).try_lock(0)
    copy = os.dup(descriptor)

    os.close(descriptor)
    assert other.is_taken(0)
    os.close(copy)

    assert other.try_lock(0)


def test_openers_and_threads_take_turns(open_lock: OpenLock) -> None:
    locks = [open_lock(), open_lock()]
    inside: list[int] = []
    most: list[int] = []

    def work(lock: SharedLock) -> None:
        for _ in range(200):
            lock.acquire()
            inside.append(1)
            time.sleep(0)  # let the others run: one that took no turn would come in now
            most.append(len(inside))
            inside.pop()
            lock.release()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, locks * 2))

    assert max(most) == 1
    assert len(most) == 800


@pytest.mark.parametrize("by", ["opener", "thread"])
def test_a_lock_that_somebody_keeps_is_given_up_with_a_name(open_lock: OpenLock, by: str) -> None:
    waiting = open_lock(seconds=0.05)
    keeping = open_lock() if by == "opener" else waiting
    keeping.acquire()

    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(
            StoreTimeoutError, match=r"process 7 has been at it for 0\.05 s; if it hangs"
        ),
    ):
        threads.submit(waiting.acquire).result()

    assert not waiting.try_acquire()
    keeping.release()
    assert waiting.try_acquire()
    waiting.release()


def test_a_lock_knows_the_thread_that_has_it(open_lock: OpenLock) -> None:
    lock = open_lock()
    seen: list[bool] = []

    assert not lock.is_mine
    lock.acquire()
    thread = threading.Thread(target=lambda: seen.append(lock.is_mine))
    thread.start()
    thread.join()

    assert lock.is_mine
    assert seen == [False]
    lock.release()
    assert not lock.is_mine
