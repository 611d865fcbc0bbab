"""Host access copies between pools and slots, and refuses what does not fit or is not the host's."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlinker.device import (
    DeviceAccess,
    DeviceEvent,
    HostAccess,
    HostObjects,
    room_for_sums,
    wait_for_events,
)
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError, StalePoolError
from kvlinker.moving import using_mover
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker.testing import FaultAccess, PythonMover
from kvlinker.testing.pool_memory import HostMemory

PAGE = 2


@pytest.fixture(autouse=True, params=["by numpy", "by a mover"])
def copied_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let copies be made in both ways, whatever is installed."""
    with using_mover(PythonMover(zlib.crc32) if request.param == "by a mover" else None):
        yield


def pool(
    memory: HostMemory,
    *,
    layers: int = 2,
    row_bytes: int = 4,
    pages: int = 4,
    packed: bool = True,
    fragmented: bool = False,
) -> DevicePoolEntry:
    """Return a pool of keys and values, both of the same rows."""
    parts = [
        [memory.allocate(pages * PAGE, row_bytes, label=f"{part}{i}") for i in range(layers)]
        for part in "kv"
    ]
    return DevicePoolEntry(
        name="kv",
        indices_from_pool="kv",
        components=parts,
        layer_mapping={i: i for i in range(layers)},
        page_size=PAGE,
        rows_are_pages=False,
        packed=packed,
        fragmented=fragmented,
    )


def plan_of(entry: DevicePoolEntry, pages: list[int]) -> TransferPlan:
    slots = [page * PAGE + i for page in pages for i in range(PAGE)]
    return entry.page_plan(entry.prepare_locations(slots))


def layer_plan_of(entry: DevicePoolEntry, pages: list[int], layer: int) -> TransferPlan:
    plan = entry.layer_plan(plan_of(entry, pages).pages, layer)
    assert plan is not None
    return plan


def host(array: NDArray[np.uint8], slots: list[int], *, first_offset: int = 0) -> HostObjects:
    rows, size = array.shape
    span = BufferSpan(
        base_ptr=array.ctypes.data, rows=rows, row_bytes=size, row_stride=array.strides[0]
    )
    return HostObjects(span=span, slots=np.array(slots, dtype=np.int64), first_offset=first_offset)


def write_rows(memory: HostMemory, entry: DevicePoolEntry) -> None:
    """Write into every row its span's number and the row's."""
    for number, span in enumerate(entry.spans):
        rows = np.empty((span.rows, span.row_bytes), dtype=np.uint8)
        rows[:] = (number * 16 + np.arange(span.rows))[:, None]
        memory.write(span, 0, rows.tobytes())


# ---- what fits --------------------------------------------------------------------------------


def test_objects_lie_in_their_slots_in_the_plans_order() -> None:
    memory = HostMemory()
    entry = pool(memory)
    write_rows(memory, entry)
    slab = np.full((5, 40), 0xEE, dtype=np.uint8)

    HostAccess().copy_out(plan_of(entry, [3, 0]), host(slab, [4, 1]))

    of_page_3 = [
        value for number in range(4) for row in (6, 7) for value in [number * 16 + row] * 4
    ]
    of_page_0 = [
        value for number in range(4) for row in (0, 1) for value in [number * 16 + row] * 4
    ]
    assert slab[4].tolist() == of_page_3 + [0xEE] * 8
    assert slab[1].tolist() == of_page_0 + [0xEE] * 8
    assert (slab[[0, 2, 3]] == 0xEE).all()


def test_a_slot_may_hold_a_part_of_an_object() -> None:
    memory = HostMemory()
    entry = pool(memory)
    write_rows(memory, entry)
    plan = layer_plan_of(entry, [1], 1)  # bytes [8, 16) and [24, 32) of 32
    slab = np.zeros((1, 24), dtype=np.uint8)

    HostAccess().copy_out(plan, host(slab, [0], first_offset=8))

    assert slab[0, :8].tolist() == [16 + 2] * 4 + [16 + 3] * 4
    assert slab[0, 8:16].tolist() == [0] * 8
    assert slab[0, 16:].tolist() == [48 + 2] * 4 + [48 + 3] * 4


def test_a_payload_may_begin_behind_a_header() -> None:
    memory = HostMemory()
    entry = pool(memory)
    write_rows(memory, entry)
    slab = np.zeros((1, 64), dtype=np.uint8)

    HostAccess().copy_out(plan_of(entry, [0]), host(slab, [0], first_offset=-32))

    assert not slab[0, :32].any()
    assert slab[0, 32:].tolist()[:8] == [0] * 4 + [1] * 4


@pytest.mark.parametrize("pages", [3, 40])
@pytest.mark.parametrize("row_bytes", [1, 4095, 4096, 5000])
@pytest.mark.parametrize("scattered_slots", [True, False])
@pytest.mark.parametrize("scattered_pages", [True, False])
def test_every_way_to_copy_restores_every_byte(
    pages: int, row_bytes: int, *, scattered_slots: bool, scattered_pages: bool
) -> None:
    """Long and short ranges, few and many, in and out of order, each take a way of their own."""
    generator = np.random.default_rng(pages)
    memory = HostMemory()
    entry = pool(memory, layers=1, row_bytes=row_bytes, pages=pages)
    for span in entry.spans:
        memory.write(span, 0, generator.bytes(span.rows * row_bytes))
    order = generator.permutation(pages) if scattered_pages else np.arange(pages)
    slots = generator.permutation(pages) if scattered_slots else np.arange(pages)
    slab = np.zeros((pages, entry.page_bytes), dtype=np.uint8)
    before = memory.snapshot()

    HostAccess().copy_out(plan_of(entry, order.tolist()), host(slab, slots.tolist()))
    memory.poison()
    HostAccess().copy_in(plan_of(entry, order.tolist()), host(slab, slots.tolist()))

    assert memory.snapshot() == before
    for page, slot in zip(order.tolist(), slots.tolist(), strict=True):
        expected = [memory.read(span, page * PAGE, PAGE) for span in entry.spans]
        assert slab[slot].tobytes() == b"".join(expected)


@pytest.mark.parametrize("step", [1, 2, 3, -1])
def test_slots_at_even_steps_are_copied_like_any_others(step: int) -> None:
    memory = HostMemory()
    entry = pool(memory, pages=30)
    write_rows(memory, entry)
    pages = [(7 * i) % 30 for i in range(30)]
    slots = [i * step if step > 0 else 29 - i for i in range(30)]
    slab = np.zeros((90, entry.page_bytes), dtype=np.uint8)
    before = memory.snapshot()

    HostAccess().copy_out(plan_of(entry, pages), host(slab, slots))
    memory.poison()
    HostAccess().copy_in(plan_of(entry, pages), host(slab, slots))

    assert memory.snapshot() == before


def slots_in_runs(count: int) -> list[int]:
    """Return slots of which some lie side by side, in runs of all lengths, and some do not."""
    slots: list[int] = []
    for length in (1, 5, 2, 9, 1, 1, 30, 3, 4, 6, 40, 2):
        first = (slots[-1] if slots else 0) + (2 if length % 2 else 5)
        slots += range(first, first + length)
    return slots[:count]


@pytest.mark.parametrize("pages", [1, 90])
@pytest.mark.parametrize("row_bytes", [1, 1024, 4096, 20_000])
@pytest.mark.parametrize("order", ["side by side", "in runs", "in runs, reversed", "scattered"])
def test_every_range_is_told_of_once_and_right_after_it_was_copied(
    pages: int, row_bytes: int, order: str
) -> None:
    """Blocks end with the pages, with a run of slots, and with what fits into a cache."""
    generator = np.random.default_rng(pages)
    memory = HostMemory()
    entry = pool(memory, layers=1, row_bytes=row_bytes, pages=pages)
    for span in entry.spans:
        memory.write(span, 0, generator.bytes(span.rows * row_bytes))
    slots = {
        "side by side": list(range(3, pages + 3)),
        "in runs": slots_in_runs(pages),
        "in runs, reversed": slots_in_runs(pages)[::-1],
        "scattered": generator.permutation(pages).tolist(),
    }[order]
    slab = np.zeros((max(slots) + 1, entry.page_bytes), dtype=np.uint8)
    numbers = generator.permutation(pages).tolist()
    plan = plan_of(entry, numbers)
    before = memory.snapshot()
    objects = host(slab, slots)
    HostAccess().copy_out(plan, objects)
    memory.poison()
    told: list[tuple[int, int]] = []

    def note(i: int, chosen: slice) -> None:
        start = int(plan.spans.offset[i])
        for position in range(pages)[chosen]:
            row = numbers[position] * PAGE
            copied = memory.read(entry.spans[i], row, PAGE)
            assert copied == slab[slots[position], start : start + PAGE * row_bytes].tobytes()
            told.append((i, position))

    HostAccess().copy_in(plan, replace(objects, copied=note))

    assert memory.snapshot() == before
    assert sorted(told) == [(i, position) for i in range(2) for position in range(pages)]


def test_long_ranges_are_told_of_a_few_at_a_time() -> None:
    """Of what is told of, the processor still has every byte at hand: no more than 256 KiB."""
    memory = HostMemory()
    entry = pool(memory, layers=1, row_bytes=32 * 1024, pages=40)
    slab = np.zeros((40, entry.page_bytes), dtype=np.uint8)
    told: list[slice] = []

    objects = replace(host(slab, list(range(40))), copied=lambda _, pages: told.append(pages))
    HostAccess().copy_in(plan_of(entry, list(range(40))), objects)

    assert {pages.stop - pages.start for pages in told} == {4}


def test_pages_of_scattered_rows_are_copied_and_not_told_of() -> None:
    memory = HostMemory()
    entry = pool(memory, pages=8, fragmented=True)
    write_rows(memory, entry)
    rows = [0, 5, 3, 9]
    plan = entry.page_plan(entry.prepare_locations(rows))
    slab = np.zeros((2, entry.page_bytes), dtype=np.uint8)
    objects = host(slab, [0, 1])
    HostAccess().copy_out(plan, objects)
    expected = [memory.read(span, row) for span in entry.spans for row in rows]
    memory.poison()
    told: list[int] = []

    HostAccess().copy_in(plan, replace(objects, copied=lambda span, _: told.append(span)))

    assert not plan.pages.contiguous
    assert [memory.read(span, row) for span in entry.spans for row in rows] == expected
    assert told == []


@pytest.mark.parametrize("row_bytes", [1, 64, 5000])
@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [7, 0, 3, 4]])
def test_t1_copies_make_checksums_of_what_they_copy_where_a_mover_is_there(
    row_bytes: int, slots: list[int]
) -> None:
    memory, mover = HostMemory(), PythonMover(zlib.crc32)
    entry = pool(memory, row_bytes=row_bytes)
    write_rows(memory, entry)
    plan, before = plan_of(entry, [2, 0, 3, 1]), memory.snapshot()
    slab = np.zeros((8, entry.page_bytes), dtype=np.uint8)

    with using_mover(mover):
        sums = room_for_sums(plan, HostAccess(), zlib.crc32)
        assert sums is not None
        HostAccess().copy_out(plan, replace(host(slab, slots), sums=sums))
        out = sums.tolist()
        memory.poison()
        HostAccess().copy_in(plan, replace(host(slab, slots), sums=sums, copied=lambda *_: None))

    places = zip(plan.spans.offset.tolist(), plan.range_bytes.tolist(), strict=True)
    expected = [[zlib.crc32(slab[slot, a : a + n].data) for slot in slots] for a, n in places]
    assert out == expected
    assert sums.tolist() == expected
    assert memory.snapshot() == before
    assert set(mover.calls) == {"sums", "move_and_sum"}


def test_t1_there_is_no_room_for_checksums_that_nobody_makes() -> None:
    memory = HostMemory()
    entry = pool(memory, pages=8, fragmented=True)
    plan, rows = plan_of(entry, [0, 1]), entry.page_plan(entry.prepare_locations([0, 5, 3, 9]))

    with using_mover(PythonMover(zlib.crc32)):
        assert room_for_sums(plan, HostAccess(), zlib.adler32) is None
        assert room_for_sums(rows, HostAccess(), zlib.crc32) is None
        assert room_for_sums(plan, FaultAccess(HostAccess()), zlib.crc32) is None
    with using_mover(None):
        assert room_for_sums(plan, HostAccess(), zlib.crc32) is None


def test_an_empty_plan_copies_nothing() -> None:
    memory = HostMemory()
    entry = pool(memory)
    slab = np.full((1, 32), 0xEE, dtype=np.uint8)
    before = memory.snapshot()

    HostAccess().copy_out(plan_of(entry, []), host(slab, []))
    HostAccess().copy_in(plan_of(entry, []), host(slab, []))
    told: list[int] = []
    objects = replace(host(slab, []), copied=lambda span, _: told.append(span))
    HostAccess().copy_in(plan_of(entry, []), objects)

    assert (slab == 0xEE).all()
    assert memory.snapshot() == before
    assert told == []


# ---- what does not fit ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "slots", "first_offset", "problem"),
    [
        (32, [0], 0, "2 pages of 1 objects do not fit 1 slots"),
        (32, [0, 1, 2], 0, "2 pages of 1 objects do not fit 3 slots"),
        (32, [0, 4], 0, r"bytes \[0, 32\) of slots 0..4 leave 4 slots of 32 B"),
        (32, [-1, 0], 0, r"slots -1..0 leave 4 slots"),
        (31, [0, 1], 0, r"bytes \[0, 32\) of slots 0..1 leave 4 slots of 31 B"),
        (32, [0, 1], 1, r"bytes \[-1, 31\) of slots"),
        (32, [0, 1], -1, r"bytes \[1, 33\) of slots"),
    ],
)
def test_dh9_an_object_that_does_not_fit_its_slot_is_refused_before_a_byte_moves(
    size: int, slots: list[int], first_offset: int, problem: str
) -> None:
    memory = HostMemory()
    entry = pool(memory)
    slab = np.full((4, size), 0xEE, dtype=np.uint8)
    before = memory.snapshot()
    place = host(slab, slots, first_offset=first_offset)

    for copy in (HostAccess().copy_out, HostAccess().copy_in):
        with pytest.raises(ContractError, match=f"^pool 'kv': .*{problem}"):
            copy(plan_of(entry, [1, 2]), place)

    assert (slab == 0xEE).all()
    assert memory.snapshot() == before


def test_a_plan_of_several_objects_must_be_taken_apart_first() -> None:
    entry = pool(HostMemory(), packed=False)
    slab = np.zeros((1, 32), dtype=np.uint8)

    with pytest.raises(ContractError, match="1 pages of 2 objects do not fit 1 slots"):
        HostAccess().copy_out(plan_of(entry, [1]), host(slab, [0]))


def test_an_empty_plan_fits_any_slots() -> None:
    slab = np.zeros((1, 1), dtype=np.uint8)

    host(slab, []).check(plan_of(pool(HostMemory()), []))


@pytest.mark.parametrize(
    ("slots", "first_offset", "problem"),
    [
        ([0.5], 0, "indices must be integers, got dtype float64"),
        ([True], 0, "indices must be integers, got dtype bool"),
        ([[0]], 0, "indices must have one dimension"),
        ([0], 0.5, "first_offset must be an integer"),
    ],
)
def test_slots_are_checked_like_indices(slots: object, first_offset: object, problem: str) -> None:
    span = BufferSpan(base_ptr=4096, rows=4, row_bytes=8, row_stride=8)

    with pytest.raises(ContractError, match=problem):
        HostObjects(span=span, slots=slots, first_offset=first_offset)  # type: ignore[arg-type]  # wrong types are under test


def test_slots_are_kept_apart_from_the_callers_own() -> None:
    slots = np.array([2, 1])
    span = BufferSpan(base_ptr=4096, rows=4, row_bytes=8, row_stride=8)
    objects = HostObjects(span=span, slots=slots)

    slots[:] = 0

    assert objects.slots.tolist() == [2, 1]


def test_memory_of_another_device_is_never_copied_by_the_host() -> None:
    region = MemoryRegion(base_ptr=1 << 40, size_bytes=1 << 20, device="cuda:0")
    remote = BufferSpan(base_ptr=1 << 40, rows=8, row_bytes=4, row_stride=4, region=region)
    entry = DevicePoolEntry(
        name="kv",
        indices_from_pool="kv",
        components=((remote,),),
        layer_mapping={0: 0},
        page_size=PAGE,
        rows_are_pages=False,
    )
    slab = np.zeros((1, 32), dtype=np.uint8)

    with pytest.raises(ContractError, match="its pool on cuda:0 cannot be copied by the host; use"):
        HostAccess().copy_in(plan_of(entry, [0]), host(slab, [0]))
    with pytest.raises(ContractError, match="its slots on cuda:0 cannot be copied by the host"):
        HostAccess().copy_out(
            plan_of(pool(HostMemory(), layers=1, row_bytes=1), [0]),
            HostObjects(span=replace(remote, row_bytes=4), slots=np.array([0])),
        )


def test_c10_a_plan_of_a_closed_pool_is_never_copied() -> None:
    memory = HostMemory()
    entry = pool(memory)
    plan, slab = plan_of(entry, [1]), np.full((1, 32), 0xEE, dtype=np.uint8)
    before = memory.snapshot()
    entry.retire("the engine sleeps")

    for copy in (HostAccess().copy_out, HostAccess().copy_in):
        with pytest.raises(
            StalePoolError, match="pool 'kv': the engine sleeps; describe the pools"
        ):
            copy(plan, host(slab, [0]))

    assert (slab == 0xEE).all()
    assert memory.snapshot() == before


@pytest.mark.parametrize("pages", [1, 40])
def test_c10_slots_fit_no_plan_of_a_closed_pool(pages: int) -> None:
    entry = pool(HostMemory(), pages=pages)
    plan, slab = plan_of(entry, list(range(pages))), np.zeros((pages, 32), dtype=np.uint8)
    host(slab, list(range(pages))).check(plan)
    entry.retire("the engine sleeps")

    with pytest.raises(StalePoolError, match="the engine sleeps"):
        host(slab, list(range(pages))).check(plan)
    with pytest.raises(StalePoolError, match="the engine sleeps"):
        HostAccess().copy_in(plan, host(slab, list(range(pages))))


def test_an_access_without_buffers_is_closed_any_number_of_times() -> None:
    access: DeviceAccess = HostAccess()

    access.close()
    access.close()


# ---- events -----------------------------------------------------------------------------------


class Event:
    """An event that is done after some queries."""

    def __init__(self, after: int) -> None:
        self.left = after

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


class NeverDone:
    """An event of a stream that hangs."""

    def query(self) -> bool:
        return False


def test_events_are_waited_for_one_after_the_other() -> None:
    events = [Event(0), Event(3), Event(1)]

    done = wait_for_events(events, deadline=time.monotonic() + 60)

    assert done
    assert [event.left for event in events] == [-1, -1, -1]
    assert isinstance(events[0], DeviceEvent)


def test_an_event_that_is_done_counts_after_the_deadline_too() -> None:
    assert wait_for_events([Event(0)], deadline=time.monotonic() - 1)
    assert wait_for_events([], deadline=time.monotonic() - 1)


def test_waiting_ends_at_the_deadline() -> None:
    assert not wait_for_events([Event(0), NeverDone()], deadline=time.monotonic() - 1)


def test_waiting_ends_when_it_is_cancelled() -> None:
    asked: list[bool] = []

    def is_cancelled() -> bool:
        asked.append(True)
        return len(asked) > 2

    done = wait_for_events(
        [NeverDone()], deadline=time.monotonic() + 3600, is_cancelled=is_cancelled
    )

    assert not done
    assert len(asked) == 3
