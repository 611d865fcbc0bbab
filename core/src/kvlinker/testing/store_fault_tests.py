"""Tests of the kit for stores: devices that fail or take a transfer back, and many callers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvlinker.errors import DeviceCopyError, TransferRevokedError
from kvlinker.plugins import one_line
from kvlinker.store import ObjectKey, ReadStatus, WriteStatus
from kvlinker.testing.fault_access import FaultAccess
from kvlinker.testing.faults import CopyHalf, Hang, Raise
from kvlinker.testing.gates import Gate
from kvlinker.testing.script import Call, Fault, Rule
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker.testing.store_capacity_tests import check_capacity
from kvlinker.testing.store_fixtures import StoreFixtures, within
from kvlinker.testing.verdicts import expect, fail

__all__ = ["StoreFaultTests"]

OK, MISS = ReadStatus.OK, ReadStatus.MISS
_FAULTS: Sequence[Callable[[], Fault]] = (
    lambda: Raise(error=DeviceCopyError("the device is gone")),
    lambda: CopyHalf(error=DeviceCopyError("the device is gone")),
    lambda: CopyHalf(error=TransferRevokedError("the linker took it back")),
)
_ROUNDS = 40

every_fault = pytest.mark.parametrize(
    "fault", _FAULTS, ids=["fails", "fails_half_way", "is_revoked"]
)


class StoreFaultTests(StoreFixtures):
    """What holds when a copy goes wrong, and when several threads use the store."""

    # ---- the device -----------------------------------------------------------------------------

    @every_fault
    def test_t2_a_write_whose_copy_goes_wrong_leaves_nothing(
        self, shelf: Shelf, fault: Callable[[], Fault]
    ) -> None:
        """Half of an object is never visible, its room is free again, and the error is told."""
        keys, before = object_keys(4), object_keys(2, chain="before")
        shelf.stock(before)
        broken = FaultAccess(shelf.access, [Rule(call=Call.COPY_OUT, fault=fault())])
        statuses = _written(shelf, keys, broken)
        if not broken.script.fired:
            expect("a write that copies nothing through its access", statuses, "")
            return
        if not statuses:
            fail(f"a write whose copy failed with {fault()} answered that it stored everything")
        expect("exists, after a failed write,", shelf.store.exists(keys), (False,) * 4)
        expect("read, after a failed write,", shelf.read([*keys, *before]), (MISS,) * 4 + (OK,) * 2)
        within("the next write", lambda: shelf.stock(keys))
        expect("read, after the next write,", shelf.read([*keys, *before]), (OK,) * 6)

    @every_fault
    def test_l5_a_read_whose_copy_goes_wrong_says_so_and_keeps_the_object(
        self, shelf: Shelf, fault: Callable[[], Fault]
    ) -> None:
        """A device that fails is no reason to drop what is stored, and nothing is reported as read."""
        keys = object_keys(4)
        shelf.stock(keys)
        broken = FaultAccess(shelf.access, [Rule(call=Call.COPY_IN, fault=fault())])
        problem = _unread(shelf, keys, broken)
        if not broken.script.fired:
            expect("a read that copies nothing through its access", problem, "")
            return
        if not problem:
            fail(f"a read whose copy failed with {fault()} answered that everything is there")
        expect("the next read", within("the next read", lambda: shelf.read(keys)), (OK,) * 4)

    def test_t6_a_copy_that_hangs_holds_no_other_call_up(self, shelf: Shelf) -> None:
        """Loads never wait behind an offload: no lock is held while bytes are copied."""
        if shelf.store.capabilities.device_memory:
            return
        stored, hanging, other = object_keys(3)
        shelf.stock([stored])
        beside = shelf.beside()
        gate = Gate(limit_seconds=300)
        stuck = FaultAccess(shelf.access, [Rule(call=Call.COPY_OUT, fault=Hang(gate=gate))])
        with ThreadPoolExecutor(1) as pool, gate:
            write = pool.submit(shelf.write, [hanging], memory=stuck)
            gate.wait_for_arrivals()
            what = "while another write's copy hangs"
            expect(
                "exists", within(f"exists {what}", lambda: shelf.store.exists([hanging])), (False,)
            )
            expect("read", within(f"a read {what}", lambda: beside.read([stored])), (OK,))
            within(f"a write {what}", lambda: beside.stock([other]))
            within(f"stats {what}", shelf.store.stats)
        expect("the write that hung", write.result(), (WriteStatus.WRITTEN,))

    # ---- threads --------------------------------------------------------------------------------

    def test_t2_b73_two_writers_of_one_key_leave_one_whole_object(self, shelf: Shelf) -> None:
        """Whoever is first wins, and the other one hears that the object exists."""
        rival = shelf.beside(seed=b"rival")
        start = threading.Barrier(2)

        def write(writer: Shelf, keys: Sequence[ObjectKey]) -> tuple[WriteStatus, ...]:
            start.wait()
            return writer.write(keys)

        with ThreadPoolExecutor(2) as pool:
            for number in range(_ROUNDS // 2):
                keys = object_keys(2, chain=f"round {number}")
                both = [pool.submit(write, writer, keys) for writer in (shelf, rival)]
                answers = [task.result() for task in both]
                if not all(status.is_stored for answer in answers for status in answer):
                    fail(f"two writers of one key were answered {answers}; both objects are stored")
                for key in keys:
                    _read_either(shelf, rival, key)
                shelf.store.delete(keys)

    def test_b71_threads_that_write_read_and_delete_see_whole_objects_alone(
        self, shelf: Shelf
    ) -> None:
        """Every method may be called from any thread."""
        keys = object_keys(8)
        first = shelf.beside()
        second = first.beside()
        shelves = first, second, second.beside()
        start = threading.Barrier(3)

        def write(own: Shelf) -> None:
            start.wait()
            for _ in range(_ROUNDS):
                own.write(keys[:4])
                own.write(keys[4:])
                check_capacity(own.store)

        def remove(own: Shelf) -> None:
            start.wait()
            for number in range(2 * _ROUNDS):
                own.store.delete([keys[number % 8], keys[(number + 3) % 8]])

        def read(own: Shelf) -> None:
            start.wait()
            for number in range(2 * _ROUNDS):
                statuses = own.read([keys[number % 8], keys[(number + 5) % 8]])
                if unknown := set(statuses) - {OK, MISS}:
                    fail(f"a read beside writers answered {unknown}; objects are whole, or a miss")

        with ThreadPoolExecutor(3) as pool:
            jobs = zip((write, remove, read), shelves, strict=True)
            tasks = [pool.submit(job, own) for job, own in jobs]
            for task in tasks:
                task.result()
        shelf.stock(keys)
        expect("read, when all are done,", shelf.read(keys), (OK,) * 8)


def _written(shelf: Shelf, keys: Sequence[ObjectKey], memory: FaultAccess) -> str:
    """Write and return what went wrong; an empty text where everything is said to be stored."""
    try:
        statuses = within("a write", lambda: shelf.write(keys, memory=memory))
    except AssertionError:
        raise
    except Exception as error:  # noqa: BLE001 - a store may pass on or wrap what the device raised
        return one_line(error)
    return "" if all(status.is_stored for status in statuses) else str(statuses)


def _unread(shelf: Shelf, keys: Sequence[ObjectKey], memory: FaultAccess) -> str:
    """Read and return what went wrong; an empty text where everything is said to be there."""
    try:
        statuses = within("a read", lambda: shelf.read(keys, memory=memory))
    except AssertionError:
        raise
    except Exception as error:  # noqa: BLE001 - a store may pass on or wrap what the device raised
        return one_line(error)
    return "" if all(status is OK for status in statuses) else str(statuses)


def _read_either(shelf: Shelf, rival: Shelf, key: ObjectKey) -> None:
    """Fail unless the object is what one of two writers wrote, all of it."""
    problems = []
    for writer in (shelf, rival):
        try:
            expect("read", writer.read([key]), (OK,))
        except AssertionError as error:
            problems.append(str(error))
        else:
            return
    fail(f"the object of two writers is neither's: {problems}")
