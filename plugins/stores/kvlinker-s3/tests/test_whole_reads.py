"""Whole objects of a directory are copied before they are compared: what is not right is told all the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from summed_pages import SummedPages

import kvlinker_s3
from kvlinker.device import HostAccess, HostObjects
from kvlinker.errors import DeviceCopyError, StoreClosedError, StoreError
from kvlinker.moving import current_mover, using_mover
from kvlinker.named_values import Beginning
from kvlinker.plans import TransferPlan
from kvlinker.store import ReadStatus, Store
from kvlinker.testing import Gate
from kvlinker.testing.shelves import object_keys
from kvlinker_s3.directory import Directory

OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
pytestmark = pytest.mark.skipif(current_mover() is None, reason="nothing compiled is installed")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = kvlinker_s3.open_store({"url": tmp_path.as_uri()})
    yield store
    store.close()


def file_of(folder: Path, key: bytes) -> Path:
    (path,) = folder.rglob(key.hex()[26:])
    return path


class NotedAccess(HostAccess):
    """Notes which copies make checksums, and holds them at a gate."""

    def __init__(self, gate: Gate | None = None) -> None:
        super().__init__()
        self.summed: list[bool] = []
        self._gate = gate

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        self.summed.append(host.sums is not None)
        if self._gate is not None:
            self._gate.pass_through()
        super().copy_in(plan, host)


def test_l4_whole_objects_are_summed_in_the_pass_that_copies_them(store: Store) -> None:
    pages, keys, access = SummedPages(pages=40), object_keys(40), NotedAccess()
    pages.stock(store, keys)

    assert pages.read_anew(store, keys, access) == (OK,) * 40
    assert set(access.summed) == {True}


def test_l4_whole_objects_are_compared_first_where_nothing_sums_what_it_copies(
    store: Store,
) -> None:
    pages, keys, access = SummedPages(pages=5), object_keys(5), NotedAccess()
    pages.stock(store, keys)

    with using_mover(None):
        assert pages.read_anew(store, keys, access) == (OK,) * 5
    assert set(access.summed) == {False}


@pytest.mark.parametrize("place", [3, 130, 700, -1], ids=["magic", "table", "bytes", "last"])
def test_t1_a_changed_byte_among_whole_objects_is_told_dropped_and_counted_once(
    store: Store, tmp_path: Path, place: int
) -> None:
    pages, keys = SummedPages(pages=5), object_keys(5)
    pages.stock(store, keys)
    _, bad, gone, cut, _ = (file_of(tmp_path, key) for key in keys)
    raw = bytearray(bad.read_bytes())
    raw[place] ^= 1
    bad.write_bytes(raw)
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:-1])
    before = dict(store.stats().counters)

    with store.open_read(pages.request(keys)) as session:
        first, again = pages.read(session), pages.read(session)

    assert first == again == (OK, CORRUPT, MISS, CORRUPT, OK)
    counted = {name: count - before[name] for name, count in store.stats().counters.items()}
    assert (counted["corrupt"], counted["missed"]) == (2, 1)
    assert store.exists(keys) == (True, False, False, False, True)


def test_b71_files_that_go_between_two_reads_are_misses(store: Store, tmp_path: Path) -> None:
    pages, keys = SummedPages(pages=3), object_keys(3)
    pages.stock(store, keys)

    with store.open_read(pages.request(keys)) as session:
        before = pages.read(session)
        file_of(tmp_path, keys[1]).unlink()
        after = [pages.read(session, layer=layer) for layer in (None, 1)]

    assert before == (OK, OK, OK)
    assert after == [(OK, MISS, OK)] * 2


def test_objects_whose_ranges_were_cut_in_another_way_are_compared_and_read(store: Store) -> None:
    written, read = SummedPages(pages=3), SummedPages(pages=3, ranges=2, row_bytes=512)
    keys = object_keys(3)
    written.stock(store, keys)
    read.array[:, :3] = _joined(written.array[:, :3])

    assert read.read_anew(store, keys) == (OK,) * 3


def _joined(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return two neighbouring ranges of each page as one: [ranges / 2, pages, 2 x bytes]."""
    return np.concatenate([rows[::2], rows[1::2]], axis=2)


def test_where_reading_means_waiting_as_many_files_are_read_at_once_as_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = kvlinker_s3.open_store(
        {"url": tmp_path.as_uri(), "concurrency": 6, "call_bytes": 64 << 20}
    )
    pages, keys = SummedPages(pages=20, ranges=3, row_bytes=1 << 20), object_keys(20)
    pages.stock(store, keys)
    begun, changed, counts = Directory.begun, threading.Condition(), [0]

    def far(
        self: Directory, names: Sequence[str], rows: NDArray[np.uint8]
    ) -> list[Beginning | None]:
        with changed:
            counts.append(counts[-1] + 1)
            changed.notify_all()
            changed.wait_for(lambda: max(counts) == 6, 0.05)
            counts.append(counts[-1] - 1)
        return begun(self, names, rows)

    monkeypatch.setattr(Directory, "begun", far)

    assert pages.read_anew(store, keys) == (OK,) * 20
    assert max(counts) == 6
    store.close()


class RefusingAccess(HostAccess):
    """Fails the second copy while the first is under way, and notes what ended."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.ended = 0

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        if self.gate.arrived:
            threading.Timer(0.1, self.gate.open).start()
            msg = "the device is gone"
            raise DeviceCopyError(msg)
        self.gate.pass_through()
        super().copy_in(plan, host)
        self.ended += 1


def test_l5_a_copy_that_fails_is_raised_when_no_other_is_under_way(store: Store) -> None:
    pages, keys = SummedPages(pages=8, ranges=3, row_bytes=1 << 20), object_keys(8)
    pages.stock(store, keys)
    access = RefusingAccess()

    with pytest.raises(DeviceCopyError, match="the device is gone"):
        pages.read_anew(store, keys, access)

    assert access.ended == 1
    assert pages.read_anew(store, keys) == (OK,) * 8


def test_a_session_that_is_closed_under_its_first_read_reads_to_the_end(store: Store) -> None:
    pages, keys, gate = SummedPages(pages=4), object_keys(4), Gate()
    pages.stock(store, keys)
    session = store.open_read(pages.request(keys))

    with ThreadPoolExecutor(1) as pool, gate:
        read = pool.submit(pages.read, session, NotedAccess(gate))
        gate.wait_for_arrivals()
        session.close()
        gate.open()
        assert read.result(60) == (OK,) * 4

    for layer in (None, 1):
        with pytest.raises(StoreClosedError, match="this read session was closed"):
            pages.read(session, layer=layer)


def test_a_file_that_the_system_refuses_fails_the_read_and_the_next_one_tries_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, keys = SummedPages(pages=4), object_keys(4)
    pages.stock(store, keys)

    def refuse(*_: object) -> list[Beginning | None]:
        raise PermissionError(13, "refused")

    with store.open_read(pages.request(keys)) as session:
        with monkeypatch.context() as patch:
            patch.setattr(Directory, "begun", refuse)
            with pytest.raises(StoreError, match="loads: a request failed"):
                pages.read(session)
        assert pages.read(session) == (OK,) * 4
