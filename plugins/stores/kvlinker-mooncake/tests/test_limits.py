"""What a Mooncake store refuses, limits and waits for, on a client without a cluster: each by what it does not do."""

from __future__ import annotations

import numpy as np
import pytest
from fake_mooncake import FakeClient, StillClock, answers, open_fake
from wide_pages import WidePages

from kvlinker.device import HostAccess
from kvlinker.errors import ContractError, StoreError
from kvlinker.plans import PreparedPages, SpanColumns, TransferPlan
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.shelves import LAYERS, Shelf, allow, object_keys
from kvlinker_mooncake.codes import Code
from kvlinker_mooncake.parts import parts_of

OK, MISS, FAILED = ReadStatus.OK, ReadStatus.MISS, ReadStatus.FAILED
RANGES, WHOLE = "batch_get_into_multi_buffer_ranges", "batch_get_into_multi_buffers"
PUT = "batch_put_from_multi_buffer_ranges"
pytestmark = pytest.mark.usefixtures("clock")


@pytest.mark.parametrize("layer", [None, 1], ids=["whole", "layer"])
def test_b87_what_is_in_another_segment_after_a_read_is_a_miss_whatever_its_address(
    layer: int | None,
) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)

    def move(call: str) -> None:
        if call in {WHOLE, RANGES}:
            fake.segment = "127.0.0.1:2"

    fake.before = move

    assert shelf.read(keys, layer=layer) == (MISS, MISS)


def test_a_session_reads_on_where_an_object_is_now_once_its_lease_there_was_over() -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)

    with shelf.open(keys) as session:
        assert shelf.read(keys, session=session, layer=0) == (OK, OK)
        fake.sessions.clear()
        fake.objects = {name: bytearray(value) for name, value in fake.objects.items()}
        assert shelf.read(keys, session=session, layer=1) == (OK, OK)


@pytest.mark.parametrize("short", [1, 64])
def test_b84_memory_of_which_the_end_is_not_registered_is_neither_read_nor_written(
    short: int,
) -> None:
    fake, wide, keys = FakeClient(), WidePages(ranges=2, pages=4), object_keys(4)
    store = open_fake(fake)
    region = MemoryRegion(
        base_ptr=wide.region.base_ptr, size_bytes=wide.array.nbytes - short, owner=wide.array
    )
    store.register([region])

    with pytest.raises(ContractError, match=r"'wide\[1\]' is in none of 1 registered regions"):
        store.write([wide.batch(keys)], HostAccess(), may_publish=allow)
    with (
        store.open_read(wide.request(keys)) as session,
        pytest.raises(ContractError, match=r"'wide\[1\]' is in none of 1 registered regions"),
    ):
        session.read(wide.target, HostAccess())
    assert not fake.moved_by(PUT)


def test_no_call_moves_more_than_the_bytes_of_one() -> None:
    fake, wide = FakeClient(), WidePages(ranges=2, pages=8, row_bytes=256 << 10)
    store, keys = open_fake(fake, call_bytes=1 << 20), object_keys(8)
    store.register([wide.region])

    store.write([wide.batch(keys)], HostAccess(), may_publish=allow)
    with store.open_read(wide.request(keys)) as session:
        assert session.read(wide.target, HostAccess()) == (OK,) * 8

    assert fake.moved_by(PUT) == fake.moved_by(WHOLE) == [4, 4, 4, 4]


def test_no_call_moves_more_than_the_bytes_of_one_where_pages_are_scattered() -> None:
    span = BufferSpan(base_ptr=1 << 40, rows=64, row_bytes=256 << 10, row_stride=256 << 10)
    plan = TransferPlan(
        pages=PreparedPages.of_slots("kv", np.arange(0, 32, 2), 2),
        spans=SpanColumns.of_components([[span]], page_rows=2, packed=True),
        part_bytes=(512 << 10,),
    )

    parts = parts_of(plan, range(8), [str(at) for at in range(8)], call_bytes=1 << 20)

    assert [part.buffers for part in parts] == [4, 4, 4, 4]


def test_t6_a_read_begins_no_part_once_its_time_is_over(clock: StillClock) -> None:
    fake, wide, keys = FakeClient(), WidePages(ranges=60, pages=40), object_keys(40)
    store = open_fake(fake)
    store.register([wide.region])
    store.write([wide.batch(keys)], HostAccess(), may_publish=allow)
    fake.before = lambda call: clock.sleep(12) if call == WHOLE else None  # of 20

    with store.open_read(wide.request(keys)) as session:
        statuses = session.read(wide.target, HostAccess())

    assert statuses == (OK,) * 32 + (FAILED,) * 8
    assert len(fake.moved_by(WHOLE)) == 2


def test_t6_a_write_begins_no_part_once_its_time_is_over(clock: StillClock) -> None:
    fake, wide, keys = FakeClient(), WidePages(ranges=60, pages=40), object_keys(40)
    store = open_fake(fake)
    store.register([wide.region])
    fake.before = lambda call: clock.sleep(12) if call == PUT else None  # of 20

    (statuses,) = store.write([wide.batch(keys)], HostAccess(), may_publish=allow)

    assert statuses == (WriteStatus.WRITTEN,) * 32 + (WriteStatus.FAILED,) * 8
    assert len(fake.moved_by(PUT)) == 2
    assert not fake.writing


def test_a_session_keeps_no_more_of_objects_on_disk_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvlinker_mooncake.reading._MAX_KEPT", 640)
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    fake.on_disk.update(fake.objects)

    with shelf.open(keys) as session:
        for layer in range(LAYERS):
            assert shelf.read(keys, session=session, layer=layer) == (OK, OK)

    assert len(fake.moved_by(WHOLE)) == 1 + LAYERS, "one is kept, and the other fetched each time"


def test_nothing_is_published_without_permission() -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)

    (statuses,) = shelf.store.write([shelf.batch(keys)], shelf.access, may_publish=lambda: False)

    assert statuses == (WriteStatus.DISCARDED,) * 2
    assert not fake.objects
    assert not fake.writing


def test_what_is_hidden_is_tried_again_now_and_then_and_not_with_each_question(
    clock: StillClock,
) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake, contended_seconds=0)), object_keys(1)
    shelf.stock(keys)
    fake.before = answers(batch_remove=[int(Code.LEASED)])
    assert shelf.store.delete(keys) == (True,)

    def asked() -> int:
        before = len(fake.moved_by("batch_remove"))
        for _ in range(5):
            assert shelf.store.exists(keys) == (False,)
        return len(fake.moved_by("batch_remove")) - before

    assert asked() == 1
    assert asked() == 0
    clock.sleep(0.3)
    assert asked() == 1


def test_clearing_waits_for_leases_and_removes_what_they_kept(clock: StillClock) -> None:
    fake = FakeClient()
    store = open_fake(fake, lease_seconds=7.0)
    removed: list[float] = []

    def come(call: str) -> list[int] | None:
        if call != "remove_by_regex":
            return None
        removed.append(clock.monotonic())
        return [2] if len(removed) == 1 else [1]

    fake.before = come

    assert store.clear(bytes(12)) == 3
    assert removed[1] - removed[0] >= 7.0


def test_a_client_whose_ranged_gets_bring_nothing_is_refused_at_open() -> None:
    fake = FakeClient(before=answers(**{RANGES: [64 << 10]}))

    with pytest.raises(StoreError, match="ranged gets answered with other bytes than were put"):
        open_fake(fake, reads="auto")
    assert not fake.objects
