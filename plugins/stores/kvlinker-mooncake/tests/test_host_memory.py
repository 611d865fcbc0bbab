"""What goes through host memory, on a client without a cluster: its buffers, and when they may be used again."""

from __future__ import annotations

import pytest
from fake_mooncake import FakeClient, StillClock, hangs, name_of, open_fake, wait_until
from wide_pages import WidePages

from kvlinker.device import HostAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import StoreTimeoutError, UnsupportedOperationError
from kvlinker.lanes import LaneTask
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker.store import ReadStatus, WriteBatch, WriteStatus
from kvlinker.testing import Gate
from kvlinker.testing.shelves import Shelf, allow, object_keys
from kvlinker_mooncake.codes import Code
from kvlinker_mooncake.parts import row_parts

OK, MISS = ReadStatus.OK, ReadStatus.MISS
WRITTEN = WriteStatus.WRITTEN
WHOLE, PUT = "batch_get_into_multi_buffers", "batch_put_from_multi_buffer_ranges"
pytestmark = pytest.mark.usefixtures("clock")


def test_no_call_of_a_staged_store_has_more_buffers_than_the_transport_queues() -> None:
    fake, wide = FakeClient(), WidePages(ranges=2, pages=1000)
    store, keys = open_fake(fake, staged=True, reads="whole"), object_keys(1000)

    (written,) = store.write([wide.batch(keys)], HostAccess(), may_publish=allow)
    with store.open_read(wide.request(keys)) as session:
        statuses = session.read(wide.target, HostAccess())

    assert (written, statuses) == ((WRITTEN,) * 1000, (OK,) * 1000)
    assert wide.has_landed
    assert fake.moved_by(WHOLE) == fake.moved_by(PUT) == [960, 40]


@pytest.mark.parametrize(
    ("size", "count", "buffers"),
    [
        (640, 3, [3]),
        (1 << 20, 2, [8]),
        ((1 << 20) + 1, 2, [10]),
        (8 << 20, 32, [960, 64]),
        (1 << 31, 2, [960, 960]),
    ],
)
def test_objects_in_host_memory_are_moved_in_buffers_that_a_segment_sends_side_by_side(
    size: int, count: int, buffers: list[int]
) -> None:
    rows, names = [(at, (1 + at) * size) for at in range(count)], [str(at) for at in range(count)]

    parts = list(row_parts(rows, names, size, call_bytes=1 << 40, owner=None))

    assert [part.buffers for part in parts] == buffers
    found = [
        (name, pointer - (1 + at) * size, length, offset)
        for part in parts
        for at, name, *columns in zip(
            part.positions, part.names, part.pointers, part.sizes, part.offsets, strict=True
        )
        for pointer, length, offset in zip(*columns, strict=True)
    ]
    for name in names:
        own = [(place, length) for one, place, length, offset in found if one == name]
        assert own == [(offset, length) for one, _, length, offset in found if one == name]
        ends = [place + length for place, length in own]
        assert [place for place, _ in own] == [0, *ends[:-1]]
        assert ends[-1] == size


def test_a_staged_store_takes_as_much_as_its_host_memory_allows() -> None:
    fake = FakeClient()
    store = open_fake(fake, reads="auto", staged=True, write_bytes=1 << 20)
    shelf, keys = Shelf(store, page_bytes=400 << 10), object_keys(3)

    assert shelf.write(keys) == (WRITTEN, WRITTEN, WriteStatus.FULL)
    assert store.stats().counters["no_room"] == 1
    assert shelf.read(keys) == (OK, OK, MISS)


def test_a_staged_store_registers_no_pools() -> None:
    store = open_fake(FakeClient(), reads="auto", staged=True)

    with pytest.raises(UnsupportedOperationError, match="is staged and registers no pools"):
        store.register([MemoryRegion(base_ptr=4096, size_bytes=4096)])


def test_a_staged_read_is_left_behind_and_its_memory_is_not_used_again(clock: StillClock) -> None:
    fake, gate = FakeClient(), Gate()
    store = open_fake(fake, reads="auto", staged=True, transfer_seconds=0.2)
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)
    fake.before = hangs(gate, WHOLE)

    with gate:
        with pytest.raises(StoreTimeoutError, match=r"get: no answer within 0\.2 s"):
            shelf.read(keys)
        clock.sleep(60)  # the master is left alone for a while
        kept = set(fake.registered)
        shelf.stock(object_keys(2, chain="other"))
        assert len(fake.registered) > len(kept), "what may still be written into is not given away"
    wait_until(lambda: shelf.read(keys) == (OK, OK))


def test_memory_that_a_late_put_still_reads_is_not_filled_again_before_it_is_over(
    clock: StillClock,
) -> None:
    fake, gate = FakeClient(), Gate()
    store = open_fake(fake, reads="auto", staged=True, transfer_seconds=0.2)
    shelf, keys = Shelf(store), object_keys(2)
    fake.before = hangs(gate, PUT)

    with gate:
        assert shelf.write(keys) == (WriteStatus.FAILED,) * 2
        clock.sleep(60)  # the master is left alone for a while
        kept = set(fake.registered)
        fake.before = lambda _: None  # for others; that one hangs
        shelf.stock(object_keys(2, chain="other"))
        assert len(fake.registered) > len(kept), "what is still sent is not written over"
    wait_until(lambda: shelf.write(keys) == (WRITTEN, WRITTEN))


def test_memory_that_was_left_behind_waits_for_its_own_call_and_for_none_that_hangs_later(
    clock: StillClock,
) -> None:
    fake, gate, later = FakeClient(), Gate(), Gate()
    store = open_fake(fake, reads="auto", staged=True, transfer_seconds=0.2)
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)
    fake.before = hangs(gate, WHOLE)
    with gate, pytest.raises(StoreTimeoutError):
        shelf.read(keys)
    clock.sleep(60)  # the master is left alone for a while
    fake.before = hangs(later, "batch_is_exist")

    with later:
        with pytest.raises(StoreTimeoutError):
            store.exists(keys)
        clock.sleep(60)
        assert not fake.moved_by("unregister_buffer")
        wait_until(
            lambda: shelf.read(keys) == (OK, OK) and len(fake.moved_by("unregister_buffer")) == 1
        )


@pytest.mark.parametrize(
    "options", [{"reads": "ranged"}, {"staged": True, "reads": "whole"}], ids=str
)
def test_b82_an_object_whose_length_the_client_could_not_answer_is_not_written(
    options: dict[str, object],
) -> None:
    fake, size = FakeClient(), 1 << 31
    entry = DevicePoolEntry(
        name="long",
        indices_from_pool="kv",
        components=[
            [BufferSpan(base_ptr=1 << 40, rows=2, row_bytes=size, row_stride=size, label="long")]
        ],
        layer_mapping={0: 0},
        page_size=1,
        rows_are_pages=True,
    )
    plan = entry.page_plan(entry.prepare_locations([0, 1]))
    batch = WriteBatch(keys=tuple(object_keys(2)), plan=plan, fingerprint=b"long")

    statuses = open_fake(fake, **options).write([batch], HostAccess(), may_publish=allow)

    assert statuses == ((WriteStatus.FAILED,) * 2,)
    assert not fake.moved_by(PUT)
    assert not fake.moved_by("batch_put_session_start")


@pytest.mark.parametrize("moves", [True, False], ids=["moved", "damaged"])
def test_b87_wrong_bytes_of_an_object_that_went_meanwhile_are_a_miss_and_of_one_that_stayed_are_corrupt(
    *, moves: bool
) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake, reads="whole", staged=True)), object_keys(2)
    shelf.stock(keys)
    name = name_of(keys[0])

    def change(call: str) -> None:
        if call == WHOLE:
            value = fake.objects[name]
            fake.objects[name] = bytearray(value) if moves else value
            fake.objects[name][-1] ^= 1

    fake.before = change

    assert shelf.read(keys) == (MISS if moves else ReadStatus.CORRUPT, OK)
    assert (name in fake.objects) is moves, "what somebody else has put there is not removed"
    counters = shelf.store.stats().counters
    assert (counters["vanished"], counters["corrupt"]) == ((1, 0) if moves else (0, 1))


@pytest.mark.parametrize(("written", "read"), [(16, 8), (8, 16), (16, 16)], ids=str)
def test_t1_an_object_is_checked_whose_ranges_were_cut_otherwise_when_it_was_written(
    written: int, read: int
) -> None:
    fake, keys = FakeClient(), object_keys(3)
    store = open_fake(fake, staged=True, reads="whole")
    source, target = (
        WidePages(ranges=ranges, pages=3, row_bytes=(64 << 10) // ranges)
        for ranges in (written, read)
    )
    store.write([source.batch(keys)], HostAccess(), may_publish=allow)
    fake.objects[name_of(keys[1])][-1] ^= 1

    with store.open_read(target.request(keys)) as session:
        statuses = session.read(target.target, HostAccess())

    assert statuses == (OK, ReadStatus.CORRUPT, OK)
    for page in (0, 2):
        assert target.array[:, 3 + page].tobytes() == source.array[:, page].tobytes()


def test_b88_a_staged_read_whose_lease_is_over_is_tried_a_few_times_more() -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake, staged=True, reads="whole")), object_keys(3)
    shelf.stock(keys)
    over, size = int(Code.LEASE_OVER), len(fake.objects[name_of(keys[0])])
    answered = iter([[over] * 3, [over] * 3])
    fake.before = lambda call: next(answered, None) if call == WHOLE else None

    assert shelf.read(keys) == (OK,) * 3

    fake.before = lambda call: [over] * 3 if call == WHOLE else None
    assert shelf.read(keys) == (ReadStatus.FAILED,) * 3

    some = iter([[size, over, over], [over, over], [over, size], [over]])
    fake.before = lambda call: next(some) if call == WHOLE else None
    with shelf.open(keys) as session:
        statuses = session.read(shelf.plan(range(3)), shelf.access)
    assert statuses[1] is ReadStatus.FAILED
    assert fake.moved_by(WHOLE)[-4:] == [3, 2, 2, 1], "each time those that are left"


def test_t6_a_staged_read_is_tried_again_while_it_has_time(clock: StillClock) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake, staged=True, reads="whole")), object_keys(2)
    shelf.stock(keys)

    def come(call: str) -> list[int] | None:
        if call != WHOLE:
            return None
        clock.sleep(12)  # of 20
        return [int(Code.LEASE_OVER)] * 2

    fake.before = come

    assert shelf.read(keys) == (ReadStatus.FAILED,) * 2
    assert fake.moved_by(WHOLE) == [2, 2]


@pytest.mark.parametrize("size", [1, 640, (64 << 10) + 641])
def test_b81_what_is_too_short_or_too_long_for_an_object_with_a_header_is_a_miss_and_not_fetched(
    size: int,
) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake, staged=True, reads="whole")), object_keys(2)
    shelf.stock(keys[1:])
    fake.objects[name_of(keys[0])] = bytearray(size)

    assert shelf.read(keys) == (MISS, OK)
    assert fake.moved_by(WHOLE) == [1]
    assert shelf.write(keys[:1]) == (WRITTEN,)
    assert shelf.read(keys) == (OK, OK)


class _Interrupts(FakeClient):
    """Once, interrupts who waits for what has come to a gate."""

    gate: Gate | None = None

    def wait(self, task: LaneTask, seconds: float) -> bool:
        while self.gate is not None and not task.wait(0.002):
            if self.gate.arrived:
                self.gate = None
                raise KeyboardInterrupt
        return super().wait(task, seconds)


def test_memory_of_a_read_that_was_interrupted_is_not_used_before_its_bytes_have_come() -> None:
    fake, gate = _Interrupts(), Gate()
    shelf, keys = Shelf(open_fake(fake, reads="whole", staged=True)), object_keys(2)
    shelf.stock(keys)
    fake.before, fake.gate = hangs(gate, WHOLE), gate

    with gate:
        with pytest.raises(KeyboardInterrupt):
            shelf.read(keys)
        fake.before = lambda _: None  # for others; that one hangs
        kept = set(fake.registered)
        shelf.stock(object_keys(2, chain="other"))
        assert len(fake.registered) > len(kept), "what may still be written into is not given away"
    wait_until(lambda: shelf.read(keys) == (OK, OK))
