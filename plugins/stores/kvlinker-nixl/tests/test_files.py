"""Objects in a file: what is there after a crash, how much room they take, and what a file system refuses."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash
from idle_time import busiest_thread

from kvlinker.errors import StoreBusyError, StoreClosedError, StoreError, StoreFormatError
from kvlinker.moving import Mover, using_mover
from kvlinker.store import ReadStatus, Store
from kvlinker.testing import PythonMover
from kvlinker.testing.shelves import LAYERS, Shelf, object_keys
from kvlinker_nixl import NixlStoreOptions, open_nixl_store
from kvlinker_nixl.slab_file import RECORD_BYTES
from kvlinker_nixl.state import checksum
from kvlinker_nixl.store import SlotStore

OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
OpenStore = Callable[..., Store]
NAME = "objects.kvlinker-nixl"


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Give what opens a store in one folder; it is closed after the test."""
    stores: list[Store] = []

    def open_it(**options: object) -> Store:
        place = {"backend": "POSIX", "path": str(tmp_path / "store"), "capacity": "4MiB"}
        stores.append(open_nixl_store(NixlStoreOptions.of_config({**place, **options})))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()


def disk_bytes(folder: Path) -> int:
    """Return what files take on disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


def flip_last_byte(file: Path, payload: bytes) -> None:
    """Change the last byte of an object that lies in a file once."""
    raw = bytearray(file.read_bytes())
    assert raw.count(payload) == 1
    raw[raw.find(payload) + len(payload) - 1] ^= 0x10
    file.write_bytes(raw)


# ---- after a crash ----------------------------------------------------------------------------


def test_b72_a_record_that_is_not_whole_is_no_object(open_store: OpenStore, tmp_path: Path) -> None:
    first, second = object_keys(2)
    store = open_store()
    Shelf(store).stock([first, second])
    store.close()
    file = tmp_path / "store" / NAME
    raw = bytearray(file.read_bytes())
    place = raw.find(first)  # of the record; the frame behind it has the key too
    raw[place - 8] ^= 1
    file.write_bytes(raw)

    again = Shelf(open_store())

    assert again.read([first, second]) == (MISS, OK)
    assert again.store.stats().objects == 1


def test_b72_records_of_an_older_cut_of_their_segment_are_no_objects(
    open_store: OpenStore, tmp_path: Path
) -> None:
    keys = object_keys(3)
    store = open_store()
    Shelf(store).stock(keys)
    store.close()
    file = tmp_path / "store" / NAME
    raw = bytearray(file.read_bytes())
    record = raw.find(keys[0]) - (RECORD_BYTES - 32)
    cut = raw[record + 8 : record + 16]
    assert raw.count(cut) == 4  # the segment's own, and three records
    raw[record + 8 : record + 16] = bytes(7) + b"\x01"
    rest = bytes(raw[record + 8 : record + RECORD_BYTES])
    raw[record : record + 8] = xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little")
    file.write_bytes(raw)

    assert Shelf(open_store()).read(keys) == (MISS, OK, OK)


def test_b81_a_record_of_another_length_is_a_miss_and_not_an_object_of_no_bytes(
    open_store: OpenStore,
) -> None:
    (key,) = object_keys(1)
    store = open_store()
    Shelf(store).stock([key])
    longer = Shelf(store, page_bytes=1280)

    assert longer.read([key]) == (MISS,)
    assert longer.read(object_keys(1, chain="absent")) == (MISS,)


@pytest.mark.parametrize("mover", [None, PythonMover(checksum)], ids=["python", "mover"])
@pytest.mark.parametrize("layer", [None, LAYERS - 1], ids=["whole", "layer"])
@pytest.mark.parametrize("staged", [True, False])
def test_t1_a_changed_byte_is_noticed_whoever_makes_checksums(
    open_store: OpenStore, tmp_path: Path, *, mover: Mover | None, layer: int | None, staged: bool
) -> None:
    keys = object_keys(3)
    with using_mover(mover):
        shelf = Shelf(open_store(staged=False))  # whose pools the processor reads and writes itself
        shelf.stock(keys)
        shelf.store.close()
        flip_last_byte(tmp_path / "store" / NAME, shelf.payload(keys[1]))
        shelf.store = open_store(staged=staged)
        if not staged:
            shelf.store.register(shelf.pools.group.regions)

        statuses = shelf.read(keys, layer=layer)

    assert statuses == (OK, CORRUPT, OK)
    assert shelf.store.stats().counters["corrupt"] == 1
    assert shelf.store.exists(keys) == (True, False, True)


@pytest.mark.parametrize("staged", [True, False])
def test_a_file_that_was_cut_behind_the_store_fails_the_read(
    open_store: OpenStore, tmp_path: Path, *, staged: bool
) -> None:
    keys = object_keys(2)
    shelf = Shelf(open_store(staged=staged))
    shelf.stock(keys)
    os.truncate(tmp_path / "store" / NAME, 8192)

    with pytest.raises(StoreError, match="NIXL_ERR_BACKEND"):
        shelf.read(keys)


# ---- room -------------------------------------------------------------------------------------


def test_b76_a_lookup_asks_the_file_system_nothing_and_all_objects_are_in_one_file(
    open_store: OpenStore, tmp_path: Path
) -> None:
    def calls() -> tuple[int, ...]:
        lines = Path("/proc/self/io").read_text().splitlines()
        return tuple(int(line.split()[1]) for line in lines if line.startswith(("syscr", "syscw")))

    shelf = Shelf(open_store())
    for number in range(20):
        shelf.stock(object_keys(16, chain=f"chain {number}"))
    keys = object_keys(16, chain="chain 3")
    first, second = calls(), calls()
    nothing = np.subtract(second, first)

    before = calls()
    assert all(shelf.store.exists(keys))
    asked = np.subtract(calls(), before)

    assert (asked == nothing).all()
    assert [path.name for path in (tmp_path / "store").iterdir()] == [NAME]


def test_b78_bytes_on_disk_stay_below_the_capacity_whatever_the_lengths_and_after_restarts(
    open_store: OpenStore, tmp_path: Path
) -> None:
    for run, size in enumerate((64 << 10, 640, 200 << 10)):
        store = open_store()
        shelf = Shelf(store, page_bytes=size)
        for number in range(5):
            keys = object_keys(16, chain=f"run {run} {number}")
            assert all(status.is_stored for status in shelf.write(keys))
            assert disk_bytes(tmp_path) <= 4 << 20
            assert shelf.read(keys[-4:]) == (OK,) * 4
        store.close()


def test_t3_a_full_disk_makes_writes_full_and_reads_go_on(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=3m,mode=700 none "$0" && exec "$@"'
    script = Path(__file__).with_name("full_disk.py")
    command = ["/usr/bin/env", "unshare", "-rm", "sh", "-c", mount, str(tmp_path)]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {tried.stderr.strip()}")

    done = subprocess.run(
        [*command, sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "ok"), done.stderr


def test_b78_what_was_not_used_for_longest_goes_first(open_store: OpenStore) -> None:
    shelf = Shelf(open_store(), page_bytes=100 << 10)
    keys = object_keys(32)  # as many as there is room for
    shelf.stock(keys)
    assert shelf.store.exists(keys) == (True,) * 32
    assert shelf.read(keys[:1]) == (OK,)

    shelf.stock(object_keys(4, chain="more"))

    assert shelf.store.exists(keys[:1]) == (True,)
    assert shelf.store.exists(keys[1:5]) == (False,) * 4


# ---- what a file system refuses ------------------------------------------------------------------


def test_b89_a_file_system_without_direct_io_is_used_through_the_page_cache_with_one_warning(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really_open = os.open

    def refuse(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    keys = object_keys(3)
    with caplog.at_level(logging.WARNING, logger="kvlinker_nixl"):
        shelf = Shelf(open_store(direct_io=True))
        shelf.stock(keys)

    assert shelf.read(keys) == (OK,) * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "O_DIRECT" in caplog.text
    assert shelf.store.stats().counters["direct_io_refused"] == 1


def test_b89_lengths_that_are_no_blocks_go_through_a_block_of_memory(open_store: OpenStore) -> None:
    keys = object_keys(3)
    shelf = Shelf(open_store(direct_io=True, io="uring"))
    shelf.stock(keys)

    assert shelf.page_bytes % 4096
    assert shelf.read(keys) == (OK,) * 3
    with shelf.open(keys) as session:
        for layer in range(LAYERS):
            assert shelf.read(keys, session=session, layer=layer) == (OK,) * 3
    assert not shelf.store.stats().counters.get("direct_io_refused")


@pytest.mark.parametrize("io", ["uring", "posix_aio"])
def test_every_kind_of_io_moves_the_same_bytes(open_store: OpenStore, io: str) -> None:
    keys = object_keys(4)
    shelf = Shelf(open_store(io=io, staged=False))
    shelf.stock(keys)

    assert shelf.read(keys) == (OK,) * 4


def test_a_folder_with_something_else_in_it_is_refused(
    open_store: OpenStore, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("mine")

    with pytest.raises(StoreFormatError, match="something else"):
        open_store()

    assert [path.name for path in (tmp_path / "store").iterdir()] == ["thesis.tex"]


def test_another_capacity_is_refused_and_the_objects_stay(open_store: OpenStore) -> None:
    keys = object_keys(2)
    store = open_store()
    Shelf(store).stock(keys)
    store.close()

    with pytest.raises(StoreFormatError, match="capacity"):
        open_store(capacity="8MiB")

    assert Shelf(open_store()).read(keys) == (OK, OK)


def test_a_link_in_the_place_of_the_file_is_not_followed(
    open_store: OpenStore, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / "store" / NAME).symlink_to(tmp_path / "other")

    with pytest.raises(StoreError):
        open_store()

    assert (tmp_path / "other").read_bytes() == b""


# ---- processes and threads -------------------------------------------------------------------------


def test_a_forked_child_is_refused_and_the_parent_goes_on(open_store: OpenStore) -> None:
    keys = object_keys(2)
    shelf = Shelf(open_store())
    shelf.stock(keys)

    child = os.fork()
    if child == 0:
        code = 1
        try:
            shelf.store.exists(keys)
        except StoreClosedError:
            code = 0
        os._exit(code)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert shelf.read(keys) == (OK, OK)


def test_t2_a_file_that_is_open_is_refused_until_it_is_closed_whatever_children_do(
    open_store: OpenStore,
) -> None:
    store = open_store()
    with pytest.raises(StoreBusyError, match="is open already, and processes do not share one"):
        open_store()
    closer = os.fork()
    if closer == 0:
        store.close()
        os._exit(0)
    os.waitpid(closer, 0)
    with pytest.raises(StoreBusyError, match="is open already"):
        open_store()

    ends, end = os.pipe()
    keeper = os.fork()
    if keeper == 0:  # it has the parent's descriptors for as long as it lives
        os.close(end)
        os.read(ends, 1)
        os._exit(0)
    try:
        store.close()
        open_store().close()
    finally:
        os.close(ends)
        os.close(end)
        os.waitpid(keeper, 0)


def test_an_open_store_burns_no_core(open_store: OpenStore) -> None:
    shelf = Shelf(open_store(staged=False))
    shelf.stock(object_keys(8))
    session = shelf.open(object_keys(8))
    shelf.read(object_keys(8), session=session)

    assert busiest_thread(os.getpid(), seconds=1.0) < 0.05

    session.close()


def counts(stores: Sequence[Store]) -> list[tuple[int, int]]:
    """Return transfers and registrations that agents of stores have given out."""
    states = [store.state for store in stores if isinstance(store, SlotStore)]
    lines = [line for state in states for line in (state.reads, state.writes)]
    return [(line.agent.transfers, line.agent.registrations) for line in lines]


@pytest.mark.parametrize("staged", [True, False])
def test_nothing_is_left_registered_or_under_way_after_close(
    open_store: OpenStore, tmp_path: Path, *, staged: bool
) -> None:
    store = open_store(staged=staged)
    shelf = Shelf(store)
    keys = object_keys(4)
    shelf.stock(keys)
    shelf.read(keys)
    assert [transfers for transfers, _ in counts([store])] == [0, 0]
    os.truncate(tmp_path / "store" / NAME, 8192)
    with pytest.raises(StoreError):
        shelf.read(keys)

    store.close()

    assert counts([store]) == [(0, 0), (0, 0)]
