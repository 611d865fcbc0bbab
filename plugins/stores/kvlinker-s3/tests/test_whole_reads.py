"""Whole objects are copied before they are compared: what is not right is told all the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from http_proxy import proxy_to
from numpy.typing import NDArray
from s3_server import BUCKET, OpenStore, S3Server, settings_for
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
from kvlinker_s3 import S3StoreOptions
from kvlinker_s3.directory import Directory
from kvlinker_s3.lanes import Lane
from kvlinker_s3.names import Names
from kvlinker_s3.requests import begin_of, delete, put
from kvlinker_s3.values import S3Values

OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
pytestmark = pytest.mark.skipif(current_mover() is None, reason="nothing compiled is installed")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = kvlinker_s3.open_store({"url": tmp_path.as_uri()})
    yield store
    store.close()


@pytest.fixture(params=["directory", "server"])
def either(request: pytest.FixtureRequest) -> Store:
    """Give a store in a directory, and one in a server."""
    if request.param == "directory":
        found: object = request.getfixturevalue("store")
    else:
        server, open_store = map(request.getfixturevalue, ("server", "open_store"))
        found = open_store(server.port)
    assert isinstance(found, Store)
    return found


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


def test_l4_whole_objects_are_summed_in_the_pass_that_copies_them(either: Store) -> None:
    pages, keys, access = SummedPages(pages=40), object_keys(40), NotedAccess()
    pages.stock(either, keys)

    assert pages.read_anew(either, keys, access) == (OK,) * 40
    assert set(access.summed) == {True}


@pytest.mark.parametrize("pages", [1, 3, 40])
@pytest.mark.parametrize("row_bytes", [16, 1000, 100_000])
def test_l4_whole_objects_of_any_length_and_number_come_back(
    either: Store, pages: int, row_bytes: int
) -> None:
    rig, keys = SummedPages(pages=pages, ranges=3, row_bytes=row_bytes), object_keys(pages)
    rig.stock(either, keys)

    assert rig.read_anew(either, keys) == (OK,) * pages


def test_t1_a_changed_byte_among_whole_objects_of_a_server_is_told_and_counted_once(
    server: S3Server, open_store: OpenStore, prefix: str
) -> None:
    store = open_store(server.port)
    pages, keys = SummedPages(pages=4), object_keys(4)
    pages.stock(store, keys)
    config = {"url": f"s3://{BUCKET}", "settings": settings_for(server.port), "prefix": prefix}
    lane, names = Lane(S3StoreOptions.of_config(config), "test"), Names(prefix)
    _, bad, gone, cut = names.of_objects(keys)
    whole = [
        bytearray(one.raw) for one in lane.run([begin_of(bad, 4096), begin_of(cut, 4096)]) if one
    ]
    whole[0][-1] ^= 1
    lane.run([put(bad, memoryview(whole[0]), replace=True)])
    lane.run([put(cut, memoryview(whole[1])[:-1], replace=True)])
    lane.run([delete([gone])])
    lane.close()

    with store.open_read(pages.request(keys)) as session:
        assert pages.read(session) == pages.read(session) == (OK, CORRUPT, MISS, CORRUPT)

    counters = store.stats().counters
    assert (counters["corrupt"], counters["missed"]) == (2, 1)
    assert store.exists(keys) == (True, False, False, False)


def test_whole_objects_of_a_server_are_no_more_than_may_be_in_memory(
    server: S3Server, prefix: str
) -> None:
    size, keys = 200 << 10, object_keys(12)
    with proxy_to(server.port) as proxy:
        config = {"url": f"s3://{BUCKET}", "settings": settings_for(proxy.port), "prefix": prefix}
        lane, names = Lane(S3StoreOptions.of_config(config), "loads"), Names(prefix)
        lane.run(
            [put(name, memoryview(bytes(size)), replace=True) for name in names.of_objects(keys)]
        )
        values = S3Values(lane, names, call_bytes=1 << 20)
        lock, held, most, taken = threading.Lock(), [0], [0], set[int]()

        def hold(part: slice, rows: NDArray[np.uint8], _: Sequence[Beginning | None]) -> None:
            with lock:
                held[0] += rows.nbytes
                most[0] = max(most[0], held[0])
                taken.update(range(part.start, part.stop))
            time.sleep(0.02)
            with lock:
                held[0] -= rows.nbytes

        values.each_whole(keys, size, hold)
        lane.close()

    assert taken == set(range(12))
    assert size < most[0] <= 1 << 20


def test_a_lookup_does_not_wait_for_all_of_a_long_load(server: S3Server, prefix: str) -> None:
    size, keys = 200 << 10, object_keys(30)
    config = {"url": f"s3://{BUCKET}", "settings": settings_for(server.port), "prefix": prefix}
    lane = Lane(S3StoreOptions.of_config({**config, "concurrency": 2}), "loads")
    names = Names(prefix)
    lane.run([put(name, memoryview(bytes(size)), replace=True) for name in names.of_objects(keys)])
    values = S3Values(lane, names, call_bytes=1 << 20)
    taken, begun = list[slice](), threading.Event()

    def note(part: slice, _rows: NDArray[np.uint8], _found: Sequence[Beginning | None]) -> None:
        taken.append(part)
        begun.set()
        time.sleep(0.02)

    def look() -> int:
        begun.wait(60)
        values.sizes(keys[:2])  # one alone needs no thread
        return len(taken)

    with ThreadPoolExecutor(1) as pool:
        looked = pool.submit(look)
        values.each_whole(keys, size, note)
        assert looked.result(60) < len(taken) == 30
    lane.close()


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


def test_objects_whose_ranges_were_cut_in_another_way_are_compared_and_read(either: Store) -> None:
    written, read = SummedPages(pages=3), SummedPages(pages=3, ranges=2, row_bytes=512)
    keys = object_keys(3)
    written.stock(either, keys)
    read.array[:, :3] = _joined(written.array[:, :3])

    assert read.read_anew(either, keys) == (OK,) * 3


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


def test_l5_a_copy_that_fails_is_raised_when_no_other_is_under_way(either: Store) -> None:
    pages, keys = SummedPages(pages=8, ranges=3, row_bytes=1 << 20), object_keys(8)
    pages.stock(either, keys)
    access = RefusingAccess()

    with pytest.raises(DeviceCopyError, match="the device is gone"):
        pages.read_anew(either, keys, access)

    assert access.ended == 1
    assert pages.read_anew(either, keys) == (OK,) * 8


def test_a_session_that_is_closed_under_its_first_read_reads_to_the_end(either: Store) -> None:
    pages, keys, gate = SummedPages(pages=4), object_keys(4), Gate()
    pages.stock(either, keys)
    session = either.open_read(pages.request(keys))

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
