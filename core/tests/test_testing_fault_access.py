"""A fault access copies, fails as its script says, and writes down every copy."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import (
    ReadStatus,
    WriteStatus,
)
from kvlinker.testing import (
    Call,
    CopyHalf,
    FaultAccess,
    FaultStore,
    FlipBytes,
    Gate,
    Hang,
    MemoryStore,
    Raise,
    Rule,
    fake_group,
    page_keys,
)
from kvlinker.testing.altered_access import CopyingPart, SkippingAccess

KEYS = page_keys(8)
PAGE = 640
OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
WRITTEN, FAILED = WriteStatus.WRITTEN, WriteStatus.FAILED


class Bench:
    """Pools whose first eight pages are filled."""

    def __init__(self) -> None:
        self.pools = fake_group(pages=32)
        self.entry = self.pools.group.entries[0]
        self.access: DeviceAccess = self.pools.access()
        self.pools.fill(self.pools.page_transfers(KEYS, {"kv": range(8)}))

    def plan(self, first: int, count: int) -> TransferPlan:
        slots = self.pools.slots("kv", range(first, first + count))
        return self.entry.page_plan(self.entry.prepare_locations(slots))

    def wrong(self, keys: Sequence[bytes]) -> set[int]:
        """Pages from 16 on that do not hold the keys' bytes."""
        pages = range(16, 16 + len(keys))
        transfers = self.pools.page_transfers(keys, {"kv": pages})
        return {fault.page for fault in self.pools.wrong_pages(transfers)}


BOOM = Raise(error=OSError("boom"))


def slots_for(plan: TransferPlan) -> tuple[HostObjects, np.ndarray]:
    array = np.full((plan.num_pages, PAGE), 0x33, dtype=np.uint8)
    span = BufferSpan(base_ptr=array.ctypes.data, rows=len(array), row_bytes=PAGE, row_stride=PAGE)
    return HostObjects(span=span, slots=np.arange(len(array), dtype=np.int64)), array


def test_every_copy_is_written_down() -> None:
    bench = Bench()
    access = FaultAccess(bench.access)
    host, _ = slots_for(bench.plan(0, 2))

    access.copy_out(bench.plan(0, 2), host)
    access.copy_in(bench.plan(16, 2), host)

    out, into = access.copies
    assert (out.call, into.call) == (Call.COPY_OUT, Call.COPY_IN)
    assert (out.rows, into.rows) == ((0, 4), (64, 68))
    assert (out.began, out.ended, into.began, into.ended) == (1, 2, 3, 4)
    assert out.labels == tuple(span.label for span in bench.entry.spans)
    assert into.ended_at is not None
    assert out.began_at <= into.began_at <= into.ended_at
    assert bench.wrong(KEYS[:2]) == set()


def test_l5_a_write_after_a_mark_is_seen_whether_it_runs_or_begins() -> None:
    gate = Gate()
    bench = Bench()
    access = FaultAccess(bench.access, [Rule(call=Call.COPY_IN, fault=Hang(gate=gate), first=2)])
    host, _ = slots_for(bench.plan(16, 1))

    access.copy_in(bench.plan(16, 1), host)
    after_first = access.mark()
    clean = access.writes_since(after_first)
    with ThreadPoolExecutor(1) as pool, gate:
        copy = pool.submit(access.copy_in, bench.plan(17, 1), host)
        gate.wait_for_arrivals()
        during = access.mark()
        running = access.writes_since(during)
        gate.open()
        copy.result()
    landed = access.writes_since(during)
    access.copy_out(bench.plan(0, 1), host)

    assert clean == ()
    assert [record.rows for record in running] == [(68,)]
    assert [record.rows for record in landed] == [(68,)]
    assert access.writes_since(access.mark()) == ()
    assert [record.rows for record in access.reads_since(during)] == [(0,)]
    assert access.reads_since(access.mark()) == ()


def test_a_copy_fails_before_it_touches_anything() -> None:
    bench = Bench()
    access = FaultAccess(bench.access, [Rule(call=Call.COPY_IN, fault=BOOM)])
    host, _ = slots_for(bench.plan(16, 2))

    with pytest.raises(OSError, match="boom"):
        access.copy_in(bench.plan(16, 2), host)

    (record,) = access.copies
    assert record.error is OSError
    assert record.ended == 2
    assert bench.pools.memory.read(bench.entry.spans[0], 64, 8) == b"\xa5" * 128


@pytest.mark.parametrize("call", [Call.COPY_IN, Call.COPY_OUT])
def test_half_of_a_copy_is_done_and_the_rest_is_not(call: Call) -> None:
    bench = Bench()
    access = FaultAccess(bench.access, [Rule(call=call, fault=CopyHalf(error=OSError("torn")))])
    host, array = slots_for(bench.plan(16, 3))

    copy = access.copy_out if call is Call.COPY_OUT else access.copy_in
    with pytest.raises(OSError, match="torn"):
        copy(bench.plan(16, 3), host)

    span = bench.entry.spans[0]
    rows = [bench.pools.memory.read(span, row) for row in (64, 68, 72)]
    untouched = [row == b"\xa5" * 16 for row in rows]
    kept = (array == 0x33).all(axis=1).tolist()
    assert (untouched, kept) == (
        ([False, True, True], [True, True, True])
        if call is Call.COPY_IN
        else ([True, True, True], [False, True, True])
    )


def test_a_copy_flips_bytes_in_either_direction() -> None:
    bench = Bench()
    access = FaultAccess(
        bench.access,
        [
            Rule(call=Call.COPY_IN, fault=FlipBytes(), positions=frozenset({1})),
            Rule(call=Call.COPY_OUT, fault=FlipBytes(), positions=frozenset({0}), first=2),
        ],
    )
    host, array = slots_for(bench.plan(0, 2))

    access.copy_out(bench.plan(0, 2), host)
    right = array.copy()
    access.copy_in(bench.plan(16, 2), host)
    access.copy_out(bench.plan(0, 2), host)

    assert bench.wrong(KEYS[:2]) == {17}
    assert (array != right).any(axis=1).tolist() == [True, False]
    assert int((array != right).sum()) == len(bench.entry.spans)


def test_errors_that_were_raised_keep_nothing_alive() -> None:
    class Tensor:
        """Stands for what a frame may hold."""

    bench = Bench()
    store = FaultStore(MemoryStore(), [Rule(call=Call.EXISTS, fault=BOOM)])
    access = FaultAccess(bench.access, [Rule(call=Call.COPY_OUT, fault=BOOM)])
    alive: list[weakref.ref[Tensor]] = []

    def forward() -> None:
        tensor = Tensor()
        alive.append(weakref.ref(tensor))
        host, _ = slots_for(bench.plan(0, 1))
        with pytest.raises(OSError, match="boom"):
            store.exists(KEYS)
        with pytest.raises(OSError, match="boom"):
            access.copy_out(bench.plan(0, 1), host)

    forward()
    gc.collect()

    assert alive[0]() is None


def test_closing_reaches_the_wrapped_access() -> None:
    inner = FaultAccess(Bench().access)

    FaultAccess(inner).close()

    assert inner.is_closed


@pytest.mark.parametrize(
    "make",
    [lambda a: SkippingAccess(a, {("kv", 64)}), lambda a: CopyingPart(a, OSError())],
    ids=["skipping", "copying part"],
)
def test_an_access_that_changes_copies_tells_nobody_of_them(
    make: Callable[[DeviceAccess], DeviceAccess],
) -> None:
    """Its copies have numbers of their own for pages."""
    bench = Bench()
    access = make(bench.access)
    host, _ = slots_for(bench.plan(16, 3))
    told: list[int] = []

    with suppress(OSError):
        access.copy_in(bench.plan(16, 3), replace(host, copied=lambda span, _: told.append(span)))

    assert not access.tells_copied
    assert told == []


def test_pages_are_left_out_of_copies_in_either_direction() -> None:
    bench = Bench()
    access = SkippingAccess(bench.access, {("kv", 68)})
    host, array = slots_for(bench.plan(16, 3))

    access.copy_in(bench.plan(16, 3), host)
    written = [bench.pools.memory.read(bench.entry.spans[0], row)[:1] for row in (64, 68, 72)]
    array[:] = 0x44
    access.copy_out(bench.plan(16, 3), host)

    assert written == [b"\x33", b"\xa5", b"\x33"]
    assert [bytes(row[:1]) for row in array] == [b"\x33", b"\x44", b"\x33"]
