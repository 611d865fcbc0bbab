"""Tests of the kit for stores: faults that other stores had in use, each under its number in docs/faults.md."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import (
    DeviceCopyError,
    KVLinkerError,
    RegistrationError,
    UnsupportedOperationError,
)
from kvlinker.plans import TransferPlan
from kvlinker.store import ObjectKey, ReadRequest, ReadSession, ReadStatus, WriteStatus
from kvlinker.testing.fault_access import FaultAccess
from kvlinker.testing.faults import Raise
from kvlinker.testing.script import Call, Rule
from kvlinker.testing.shelves import LAYERS, Shelf, allow, made_up_batch, object_keys
from kvlinker.testing.store_capacity_tests import fill, roomy_shelf
from kvlinker.testing.store_fixtures import OpenStore, StoreFixtures, answer_of, within
from kvlinker.testing.verdicts import expect, fail

__all__ = ["StoreRowTests", "interleave"]

OK, MISS = ReadStatus.OK, ReadStatus.MISS
_WHOLE_OR_MISS = frozenset({OK, MISS})
_CALLS = 32
"""Interleaved calls of the short form."""
_LARGE = 64 << 10
"""Bytes of an object that takes long enough to write for a reader to see half of it."""
_ROUNDS = 4
_WRAPPED = 1 << 32
"""What a length loses that is kept in 32 bits."""


class StoreRowTests(StoreFixtures):
    """What went wrong in other stores, and must not here."""

    # ---- readers and writers --------------------------------------------------------------------

    def test_b71_what_is_removed_between_two_calls_is_right_or_a_miss(self, shelf: Shelf) -> None:
        """Removing, looking, opening and reading, in an order that nobody chose."""
        interleave(shelf, calls=_CALLS)

    def test_b72_a_reader_beside_a_writer_never_sees_half_an_object(
        self, reopen: OpenStore
    ) -> None:
        """Neither while the object is written nor before the permission is given."""
        store = reopen()
        capacity = store.stats().capacity_bytes or 16 * _LARGE
        shelf = Shelf(store, page_bytes=min(_LARGE, capacity // 16 // 32 * 32))
        beside, keys = shelf.beside(), object_keys(2)
        early: list[tuple[ReadStatus, ...]] = []

        def read_early() -> bool:
            early.append(within("a read beside a write", lambda: beside.read(keys)))
            return True

        def write_and_remove() -> None:
            for _ in range(_ROUNDS):
                shelf.write(keys, may_publish=read_early)
                store.delete(keys)

        reader = beside.beside()  # before the writer begins: memory is registered anew
        with ThreadPoolExecutor(1) as pool:
            writes = pool.submit(write_and_remove)
            while not writes.done():
                if unknown := set(reader.read(keys)) - {OK, MISS}:
                    fail(f"a read beside a write answered {unknown}; objects are whole, or a miss")
            writes.result()
        expect("reads before the permission", early, [(MISS, MISS)] * _ROUNDS)

    @pytest.mark.parametrize("ending", ["takes_back", "fails"])
    def test_b73_a_writer_that_gives_up_leaves_what_another_one_stored(
        self, shelf: Shelf, ending: str
    ) -> None:
        """Two writers of one key share nothing that one of them could take away."""
        keys, rival = object_keys(2), shelf.beside(seed=b"rival")

        def be_overtaken() -> bool:
            within("a write beside another of the same keys", lambda: rival.stock(keys))
            return False

        if ending == "takes_back":
            answered = str(shelf.write(keys, may_publish=be_overtaken))
        else:
            failing = _Overtaken(shelf.access, be_overtaken)
            answered = answer_of(lambda: shelf.write(keys, memory=failing))
            if not failing.was_used:
                return
        if rival.read(keys) != (OK, OK):
            fail(
                f"a writer that was overtaken was answered {answered!r}, and the other's objects are gone"
            )

    def test_b75_a_device_that_fails_once_in_three_costs_those_calls_alone(
        self, shelf: Shelf
    ) -> None:
        """No thread of the store dies of it, and nothing waits for one that did."""
        keys = object_keys(6)
        rules = [
            Rule(call=call, fault=Raise(error=OSError("once in three")), first=3, every=3)
            for call in (Call.COPY_OUT, Call.COPY_IN)
        ]
        access = FaultAccess(shelf.access, rules)

        def write(key: ObjectKey) -> bool:
            return shelf.write([key], memory=access)[0].is_stored

        def read(key: ObjectKey) -> bool:
            return shelf.read([key], memory=access)[0] is OK

        for what, call in (("a write", write), ("a read", read)):
            before = len(access.script.fired)
            lost = [key for key in keys if not _succeeds(what, call, key)]
            if len(lost) > len(access.script.fired) - before:
                fail(f"{len(lost)} of {len(keys)} calls failed, more than copies: {what} is lost")
            within("the next write", partial(shelf.stock, lost))
        expect("read", shelf.read(keys), (OK,) * 6)

    # ---- looking --------------------------------------------------------------------------------

    def test_b76_a_lookup_lists_no_folder(self, shelf: Shelf) -> None:
        """What it costs does not depend on how much is stored."""
        keys = object_keys(4)
        shelf.stock(keys[:2])
        with _listings() as listed:
            found = shelf.store.exists(keys)
            statuses = shelf.read(keys)
        expect("exists", found, (True, True, False, False))
        expect("read", statuses, (OK, OK, MISS, MISS))
        expect("folders that were listed for a lookup", listed, [])

    def test_b80_of_an_object_that_is_gone_no_part_is_left(self, reopen: OpenStore) -> None:
        """Removed or evicted: it is there in all of its layers, or in none."""
        shelf = roomy_shelf(reopen())
        keys = object_keys(4, chain="first")
        removed = keys[:2]
        shelf.stock(keys)
        shelf.store.delete(removed)
        if shelf.store.stats().capacity_bytes is not None:
            fill(shelf, rounds=1)
        exists = shelf.store.exists(keys)
        reads = [shelf.read(keys), *_reads_by_layer(shelf, keys)]
        for number, (key, is_there) in enumerate(zip(keys, exists, strict=True)):
            wanted = OK if is_there and key not in removed else MISS
            found = {statuses[number] for statuses in reads}
            expect(f"reads, whole and by layer, where exists answered {is_there},", found, {wanted})

    def test_b81_an_absent_object_is_a_miss_in_every_form(self, shelf: Shelf) -> None:
        """No answer, or an empty one, is no object; also in a session that is older than the object."""
        absent, late = object_keys(2)
        expect("exists", shelf.store.exists([absent, late]), (False, False))
        for statuses in (shelf.read([absent]), *_reads_by_layer(shelf, [absent])):
            expect("a read of what was never stored", statuses, (MISS,))
        with shelf.open([absent, late]) as session:
            shelf.stock([late])
            statuses = shelf.read([absent, late], session=session)
        if statuses[0] is not MISS or statuses[1] not in (OK, MISS):
            fail(
                f"a session older than one of two objects answered {statuses}; the other is a miss"
            )

    def test_b82_lengths_are_not_cut_to_32_bits(self, shelf: Shelf) -> None:
        """An object of 4 GiB more is another one, and four that are 4 GiB together do not fit."""
        stored, longer, *many = object_keys(6)
        shelf.stock([stored])
        size = shelf.page_bytes + _WRAPPED
        refuses = Raise(error=DeviceCopyError("this much memory was never there"))
        rules = [Rule(call=call, fault=refuses) for call in (Call.COPY_OUT, Call.COPY_IN)]
        access = FaultAccess(shelf.access, rules)
        request = ReadRequest(keys=(stored,), object_bytes=size, fingerprint=shelf.fingerprint)
        if _claims(lambda: [_read_made_up(shelf, request, access)]):
            fail(f"an object of {shelf.page_bytes} B was read as one of {size} B")
        limits = shelf.store.capabilities.max_object_bytes, shelf.store.stats().capacity_bytes
        if limits == (None, None):
            return
        quarter = _WRAPPED // 4 + shelf.page_bytes // 4 // 32 * 32
        for keys, each in (([longer], size), (many, quarter)):
            batch = made_up_batch(keys, page_bytes=each)
            write = partial(shelf.store.write, [batch], access, may_publish=allow)
            if _claims(write):
                fail(f"{len(keys)} objects of {each} B are said to be stored, beyond {limits}")
            expect(
                "exists, after a write that cannot fit,",
                shelf.store.exists(keys),
                (False,) * len(keys),
            )

    # ---- memory and capabilities ------------------------------------------------------------------

    def test_b84_memory_is_registered_or_refused_and_what_is_moved_stays_right(
        self, shelf: Shelf
    ) -> None:
        """Registering twice, forgetting twice and registering anew are told apart from success."""
        keys, regions = object_keys(2), shelf.pools.group.regions
        if not shelf.store.capabilities.registers_memory:
            with suppress(UnsupportedOperationError):  # or it takes note, and needs none
                shelf.store.register(regions)
            shelf.store.unregister()
            shelf.stock(keys)
            expect("read", shelf.read(keys), (OK, OK))
            return
        with suppress(RegistrationError):  # they are registered already
            shelf.store.register(regions)
        shelf.stock(keys[:1])
        shelf.store.unregister()
        shelf.store.unregister()
        answer_of(
            lambda: shelf.write(keys[1:])
        )  # an error, or a status: memory that is not registered
        shelf.store.register(regions)
        shelf.stock(keys)
        expect("read, after the memory was registered anew,", shelf.read(keys), (OK, OK))

    def test_b88_what_exists_can_be_read_in_every_way_that_the_store_claims(
        self, shelf: Shelf
    ) -> None:
        """A lookup promises a load, and the load is made as the capabilities say."""
        keys, able = object_keys(3), shelf.store.capabilities
        shelf.stock(keys)
        expect("exists", shelf.store.exists(keys), (True,) * 3)
        with shelf.open(keys) as session:
            if able.whole_reads:
                expect("a whole read", shelf.read(keys, session=session), (OK,) * 3)
        if able.ranged_reads:
            for layer, statuses in enumerate(_reads_by_layer(shelf, keys)):
                expect(f"a read of layer {layer}", statuses, (OK,) * 3)


def interleave(
    shelf: Shelf, *, calls: int, seed: int = 0, statuses: frozenset[ReadStatus] = _WHOLE_OR_MISS
) -> None:
    """Write, remove, look, open and read some objects in a random order.

    Args:
        shelf: on the store.
        calls: how many.
        seed: chooses them.
        statuses: what reads may answer; a store whose leases end by the clock may fail some.

    Raises:
        AssertionError: a byte is wrong, a status is neither right nor a miss, or what is gone is there.
    """
    choose = random.Random(seed)  # noqa: S311 - chooses calls, not secrets
    keys, there = object_keys(4, chain=f"interleaved {seed}"), set[ObjectKey]()
    session, opened = shelf.open(keys[:2]), keys[:2]
    some = list(keys[:2])
    for _ in range(calls):
        some = choose.choice([some, choose.sample(keys, 2)])  # often the same objects again
        match choose.choice(["write", "write", "vanish", "look", "read", "open", "read on"]):
            case "write":
                there.update(some)
                shelf.write(some)
            case "vanish":
                shelf.store.exists(some)
                shelf.store.delete(some)
                there.difference_update(some)
                _expect_gone(some, there, _right(shelf.read(some), statuses), "were read")
                _expect_gone(some, there, shelf.store.exists(some), "exist")
            case "look":
                _expect_gone(some, there, shelf.store.exists(some), "exist")
            case "read":
                _expect_gone(some, there, _right(shelf.read(some), statuses), "were read")
            case "open":
                session.close()
                session, opened = shelf.open(some), tuple(some)
            case _:
                _right(shelf.read(opened, session=session), statuses)
    session.close()
    shelf.store.delete(keys)


def _right(statuses: Sequence[ReadStatus], allowed: frozenset[ReadStatus]) -> tuple[bool, ...]:
    if unknown := set(statuses) - allowed:
        fail(f"a read between removals answered {unknown}; objects are whole, or a miss")
    return tuple(status is OK for status in statuses)


def _expect_gone(
    keys: Sequence[ObjectKey], there: set[ObjectKey], found: Sequence[bool], what: str
) -> None:
    wrong = [
        key for key, is_there in zip(keys, found, strict=True) if is_there and key not in there
    ]
    if wrong:
        fail(f"{len(wrong)} objects {what} that were removed and not written since")


def _reads_by_layer(shelf: Shelf, keys: Sequence[ObjectKey]) -> list[tuple[ReadStatus, ...]]:
    """Read layer by layer in one session, where the store reads ranges."""
    if not shelf.store.capabilities.ranged_reads:
        return []
    with shelf.open(keys) as session:
        return [shelf.read(keys, session=session, layer=layer) for layer in range(LAYERS)]


def _succeeds(what: str, call: Callable[[ObjectKey], bool], key: ObjectKey) -> bool:
    """Whether a call says that it did what it should; errors are answers here."""
    try:
        return within(what, lambda: call(key))
    except (OSError, KVLinkerError):
        return False


def _read_made_up(
    shelf: Shelf, request: ReadRequest, memory: DeviceAccess
) -> tuple[ReadStatus, ...]:
    plan = made_up_batch(request.keys, page_bytes=request.object_bytes).plan
    session: ReadSession
    with shelf.store.open_read(request) as session:
        return session.read(plan, memory)


def _claims(call: Callable[[], Sequence[Sequence[ReadStatus | WriteStatus]]]) -> bool:
    """Whether any object is said to be read or stored; an error says that none is."""
    try:
        statuses = [status for answers in call() for status in answers]
    except (KVLinkerError, MemoryError):
        return False
    return any(
        status is OK or (isinstance(status, WriteStatus) and status.is_stored)
        for status in statuses
    )


@contextmanager
def _listings() -> Iterator[list[str]]:
    """Give the folders that this process lists meanwhile."""
    listed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("listdir", "scandir"):
            patch.setattr(os, name, _noting(vars(os)[name], listed))
        yield listed


def _noting(real: Callable[..., object], listed: list[str]) -> Callable[..., object]:
    def note(folder: object = ".") -> object:
        listed.append(str(folder))
        return real(folder)

    return note


class _Overtaken(DeviceAccess):
    """Lets something happen in the first copy out of pool memory, and fails then."""

    def __init__(self, access: DeviceAccess, happen: Callable[[], object]) -> None:
        self._access = access
        self._happen = happen
        self.was_used = False

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        if not self.was_used:
            self.was_used = True
            self._access.copy_out(plan, host)
            self._happen()
        msg = "the device is gone"
        raise DeviceCopyError(msg)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        self._access.copy_in(plan, host)
