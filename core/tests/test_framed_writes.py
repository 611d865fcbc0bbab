"""Tests of framed writes: nothing is published without permission, and every object has the answer that is true."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from framed_dictionary import DictionaryStore, DictionaryWrite

from kvlinker.device import DeviceAccess, HostAccess
from kvlinker.errors import StoreClosedError, StoreError
from kvlinker.framed_writes import FramedBatch, FramedWrite
from kvlinker.store import WriteBatch, WriteStatus
from kvlinker.testing.layered_pages import LayeredPages
from kvlinker.testing.shelves import Shelf, allow, made_up_batch, object_keys

WRITTEN, EXISTS, FULL = WriteStatus.WRITTEN, WriteStatus.EXISTS, WriteStatus.FULL
FAILED, DISCARDED = WriteStatus.FAILED, WriteStatus.DISCARDED


class DraftedWrite(FramedWrite):
    """A write that notes what it is asked, and fails to publish batches from some number on."""

    def __init__(
        self, store: DictionaryStore, batches: Sequence[WriteBatch], *, fails: int = 99
    ) -> None:
        super().__init__(
            store.values, store.state, batches, label="drafts", max_object_bytes=1 << 20
        )
        self.events: list[str] = []
        self.error: StoreError = StoreError("the server is gone")
        self._fails = fails

    def stage(self, work: FramedBatch, memory: DeviceAccess) -> None:
        for positions, _ in self.frames_of(work, memory, most_bytes=2048, most=99):
            self.events.append(f"stage {len(positions)}")

    def publish(self, work: FramedBatch) -> None:
        if self.works.index(work) >= self._fails:
            raise self.error
        self.events.append("publish")
        for at in work.fresh.tolist():
            work.statuses[at] = WRITTEN

    def end(self) -> None:
        self.events.append("end")


@pytest.fixture
def store() -> DictionaryStore:
    return DictionaryStore()


@pytest.fixture
def shelf(store: DictionaryStore) -> Shelf:
    return Shelf(store)


def test_frames_are_staged_a_few_at_a_time_and_published_batch_by_batch(
    store: DictionaryStore, shelf: Shelf
) -> None:
    first, second = object_keys(5), object_keys(2, chain="second")
    batches = [shelf.batch(first), shelf.batch(second, first_page=5)]
    write = DraftedWrite(store, batches)

    statuses = write.run(shelf.access, allow)

    assert statuses == ((WRITTEN,) * 5, (WRITTEN,) * 2)
    assert write.events == ["stage 2", "stage 2", "stage 1", "stage 2", *["publish"] * 2, "end"]


def test_l7_without_permission_everything_is_discarded(
    store: DictionaryStore, shelf: Shelf
) -> None:
    write = DraftedWrite(store, [shelf.batch(object_keys(2))])

    assert write.run(shelf.access, lambda: False) == ((DISCARDED,) * 2,)
    assert write.events == ["stage 2", "end"]
    assert store.stats().counters["discarded"] == 2


def test_what_is_raised_before_the_permission_ends_the_write(
    store: DictionaryStore, shelf: Shelf
) -> None:
    write = DraftedWrite(store, [shelf.batch(object_keys(2))])

    def refuse() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write.run(shelf.access, refuse)
    assert write.events == ["stage 2", "end"]


def test_a_batch_that_cannot_be_published_fails_and_the_one_before_it_is_written(
    store: DictionaryStore, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = object_keys(2), object_keys(1, chain="second")
    batches = [shelf.batch(first), shelf.batch(second, first_page=2)]

    statuses = DraftedWrite(store, batches, fails=1).run(shelf.access, allow)

    assert statuses == ((WRITTEN,) * 2, (FAILED,))
    assert "drafts: not everything was stored: the server is gone" in caplog.text
    assert store.stats().counters["errors"] == 1


def test_a_store_that_is_closed_under_a_write_says_so(store: DictionaryStore, shelf: Shelf) -> None:
    write = DraftedWrite(store, [shelf.batch(object_keys(1))], fails=0)
    write.error = StoreClosedError("it was closed")

    with pytest.raises(StoreClosedError):
        write.run(shelf.access, allow)
    assert write.events[-1] == "end"


def test_t4_a_key_that_a_call_names_twice_is_written_once(
    store: DictionaryStore, shelf: Shelf
) -> None:
    one, other = object_keys(2)
    batches = [shelf.batch([one, other]), shelf.batch([one], first_page=2), shelf.batch([])]

    statuses = DictionaryWrite(store, batches).run(shelf.access, allow)

    assert statuses == ((WRITTEN, WRITTEN), (EXISTS,), ())
    assert store.stats().counters["written"] == 2


def test_t4_a_key_that_a_call_names_twice_and_that_fails_is_there_for_neither(
    store: DictionaryStore, shelf: Shelf
) -> None:
    (key,) = object_keys(1)
    batches = [shelf.batch([key]), shelf.batch([key], first_page=1)]

    statuses = DraftedWrite(store, batches, fails=0).run(shelf.access, allow)

    assert statuses == ((FAILED,), (FAILED,))


def test_b82_an_object_that_is_too_long_fails_and_is_not_copied(store: DictionaryStore) -> None:
    batch = made_up_batch(object_keys(1), page_bytes=(1 << 20) + 64)

    assert DraftedWrite(store, [batch]).run(HostAccess(), allow) == ((FAILED,),)


def test_an_object_whose_header_nobody_would_read_fails(store: DictionaryStore) -> None:
    pages = LayeredPages(4000, 16)
    (key,) = object_keys(1)

    assert store.write([pages.batch(key)], HostAccess(), may_publish=allow) == ((FAILED,),)
    assert store.stats().objects == 0


def test_what_finds_no_room_is_full_and_blocks_are_used_again(store: DictionaryStore) -> None:
    shelf = Shelf(store, page_bytes=1 << 20)
    keys = object_keys(5)

    assert shelf.write(keys) == (WRITTEN,) * 3 + (FULL,) * 2
    assert store.state.counters["no_room"] == 2
    assert shelf.write(keys) == (EXISTS,) * 3 + (WRITTEN,) * 2


def test_all_batches_of_a_call_share_the_room_in_host_memory(store: DictionaryStore) -> None:
    shelf = Shelf(store, page_bytes=1 << 20)
    first, second = object_keys(2), object_keys(2, chain="second")
    batches = [shelf.batch(first), shelf.batch(second)]

    statuses = store.write(batches, shelf.access, may_publish=allow)

    assert statuses == ((WRITTEN, WRITTEN), (WRITTEN, FULL))


def test_t4_what_is_found_stands_at_the_positions_that_were_asked_for(
    store: DictionaryStore, shelf: Shelf
) -> None:
    keys = object_keys(4)
    shelf.stock(keys[2:3])
    write = DictionaryWrite(store, [shelf.batch(keys)])

    assert write.found(write.works[0], [1, 2, 3]) == {2}
    assert write.found(write.works[0], [3, 1]) == set()
    assert write.found(write.works[0], []) == set()


@pytest.mark.parametrize("may_be_read", [False, True])
def test_a_block_that_somebody_may_still_read_is_not_used_again(
    store: DictionaryStore, shelf: Shelf, *, may_be_read: bool
) -> None:
    write = DictionaryWrite(store, [shelf.batch(object_keys(2))])
    rows: list[int] = []

    def note() -> bool:
        rows.append(write.row(write.works[0], 0).ctypes.data)
        write.may_be_read = may_be_read
        return True

    write.run(shelf.access, note)

    again = store.state.blocks.take(64)
    assert (again.ctypes.data == rows[0]) is not may_be_read
