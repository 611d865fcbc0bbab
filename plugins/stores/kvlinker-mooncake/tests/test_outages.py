"""Masters, segments and writers that die and come back: misses and failures in bounded time, never a wrong byte."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from mooncake_cluster import LEASE_SECONDS, MooncakeCluster, OpenStore
from wide_pages import WidePages

from kvlinker.device import HostAccess
from kvlinker.errors import StoreError, StoreTimeoutError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.shelves import Shelf, allow, object_keys
from kvlinker_mooncake import MooncakeStore, MooncakeStoreOptions
from kvlinker_mooncake.client import Client
from kvlinker_mooncake.names import Names

OK, MISS, FAILED = ReadStatus.OK, ReadStatus.MISS, ReadStatus.FAILED
WRITTEN, EXISTS = WriteStatus.WRITTEN, WriteStatus.EXISTS
_PATIENCE_SECONDS = 120.0
"""For what comes soon, or never."""
_WRITER = """
import json, os, signal, sys
import numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
client, memory = MooncakeDistributedStore(), np.ones(640, dtype=np.uint8)
assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1]) == 0
assert client.register_buffer(memory.ctypes.data, memory.nbytes) == 0
names = json.loads(sys.argv[2])
assert client.batch_put_session_start(names, [640] * len(names), ReplicateConfig()) == [0] * len(names)
moved = client.batch_put_from_multi_buffer_ranges(
    names, [[memory.ctypes.data]] * len(names), [[640]] * len(names), [[0]] * len(names)
)
assert moved == [640] * len(names)
os.kill(os.getpid(), signal.SIGKILL)
"""


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds; a store that is left alone for a while does not yet."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            if holds():
                return
        except StoreError:
            pass
        assert time.monotonic() < end
        time.sleep(0.05)


def fails_by_its_own_deadline(call: Callable[[], object], *, seconds: float) -> None:
    """Check that a call ends because its time is over: the client itself goes on, and would answer with a code."""
    with pytest.raises(StoreTimeoutError, match=f"no answer within {seconds} s"):
        call()


def is_not_asked(call: Callable[[], object]) -> None:
    """Check that a call is answered for without the master, which did not answer the last one."""
    with pytest.raises(StoreTimeoutError, match="is not asked again yet"):
        call()


def test_t6_b87_a_dead_master_costs_one_deadline_and_one_that_comes_back_knows_nothing(
    own_cluster: MooncakeCluster, open_store: OpenStore
) -> None:
    store = open_store(own_cluster, pause_seconds=600.0, answer_seconds=1.0)
    beside = open_store(own_cluster)
    shelf, other, keys = Shelf(store), Shelf(beside), object_keys(3)
    other.stock(keys)
    own_cluster.kill_master()

    # The client itself takes 4.3 seconds for each call, but for those that find a connection closed under them.
    with pytest.raises(StoreTimeoutError, match=r"no answer within 1\.0 s|the client says -900"):
        store.delete(object_keys(1, chain="absent"))
    is_not_asked(lambda: store.exists(keys))
    is_not_asked(lambda: shelf.read(keys))
    is_not_asked(lambda: shelf.write(object_keys(1, chain="new")))

    own_cluster.start_master()
    until(lambda: beside.exists(keys) == (False,) * 3)
    assert other.read(keys) == (MISS,) * 3
    until(lambda: set(other.write(keys)) <= {WRITTEN, EXISTS})  # when the segment has joined again
    assert other.read(keys) == (OK,) * 3


def test_t6_a_master_that_hangs_is_waited_for_once_in_a_while(
    own_cluster: MooncakeCluster, open_store: OpenStore
) -> None:
    store = open_store(own_cluster, answer_seconds=0.3, pause_seconds=5.0)
    patient = Shelf(open_store(own_cluster))
    shelf, keys = Shelf(store), object_keys(3)
    patient.stock(keys)
    own_cluster.stop_master()

    fails_by_its_own_deadline(lambda: store.exists(keys), seconds=0.3)
    is_not_asked(lambda: shelf.read(keys))
    own_cluster.continue_master()

    until(lambda: store.exists(keys) == (True,) * 3)
    until(lambda: shelf.read(keys) == (OK,) * 3)


def test_a_dead_segment_s_objects_fail_then_miss_and_are_stored_again(
    own_cluster: MooncakeCluster, open_store: OpenStore
) -> None:
    store = open_store(own_cluster, contended_seconds=0)
    shelf, keys = Shelf(store), object_keys(3)
    shelf.stock(keys)
    own_cluster.kill_segments()

    while store.exists(keys) == (True,) * 3:  # what it says for some seconds
        for layer in (None, 1):
            assert set(shelf.read(keys, layer=layer)) <= {FAILED, MISS}
        assert WRITTEN not in shelf.write(object_keys(1, chain="new"))
        time.sleep(0.3)
    assert shelf.read(keys) == (MISS,) * 3
    assert shelf.write(keys) == (WriteStatus.FULL,) * 3

    own_cluster.start_segment()
    until(lambda: set(shelf.write(keys)) <= {WRITTEN, EXISTS})
    assert shelf.read(keys) == (OK,) * 3


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_b73_a_key_whose_writer_was_killed_is_a_miss_until_it_can_be_written(
    cluster: MooncakeCluster, open_quickly: OpenStore, prefix: str, *, staged: bool
) -> None:
    store = open_quickly(staged=staged, contended_seconds=0)
    shelf, keys = Shelf(store), object_keys(2)
    names = Names(prefix).of_objects(keys)
    killed = subprocess.run(
        [sys.executable, "-c", _WRITER, f"127.0.0.1:{cluster.port}", json.dumps(names)],
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()

    assert shelf.write(keys) == (WriteStatus.FAILED,) * 2, "nobody can say that they are stored"
    assert store.exists(keys) == (False, False)
    assert shelf.read(keys) == (MISS, MISS)
    # The master forgets them one by one, and so one may be there before the other.
    until(lambda: set(shelf.write(keys)) <= {WRITTEN, EXISTS})
    assert shelf.read(keys) == (OK, OK)


def test_a_process_that_ends_with_an_open_store_and_calls_under_way_does_not_crash(
    cluster: MooncakeCluster,
) -> None:
    program = """
import sys, threading, time
from kvlinker_mooncake import MooncakeStore, MooncakeStoreOptions
store = MooncakeStore(MooncakeStoreOptions(master=sys.argv[1], reads="whole"))
def ask():
    while True:
        store.exists([b"x" * 32])
threading.Thread(target=ask, daemon=True).start()
time.sleep(0.2)
"""

    done = subprocess.run(
        [sys.executable, "-c", program, f"127.0.0.1:{cluster.port}"],
        capture_output=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:].decode()


@pytest.mark.usefixtures("inside")
def test_t6_joining_where_no_master_is_takes_no_longer_than_it_may() -> None:
    options = MooncakeStoreOptions(master="127.0.0.1:9", connect_seconds=60.0)

    # The client itself would go on trying for a minute and a half, with all threads of the process.
    with pytest.raises(StoreTimeoutError, match=r"9/kvlinker: joining the cluster: .*refused"):
        MooncakeStore(options)


def test_t6_joining_a_master_that_hangs_takes_no_longer_than_it_may(
    own_cluster: MooncakeCluster, open_store: OpenStore
) -> None:
    own_cluster.stop_master()

    # The kernel takes the connection all the same, and the client would stop all threads for minutes.
    with pytest.raises(StoreTimeoutError, match=r"joining the cluster: timed out"):
        open_store(own_cluster, connect_seconds=0.5)


def test_t3_b78_a_full_cluster_evicts_or_says_so_and_what_is_found_is_right(
    own_cluster: MooncakeCluster, open_store: OpenStore
) -> None:
    wide = WidePages(ranges=16, pages=12, row_bytes=64 << 10)
    store = open_store(own_cluster, reads="whole")
    store.register([wide.region])
    rounds = [object_keys(wide.pages, chain=f"round {number}") for number in range(12)]
    statuses: list[WriteStatus] = []
    for keys in rounds:  # of 12 MiB each, into 64
        statuses += store.write([wide.batch(keys)], HostAccess(), may_publish=allow)[0]
    assert set(statuses) <= {WRITTEN, WriteStatus.FULL}
    assert statuses.count(WRITTEN) > 64

    found: list[ReadStatus] = []
    for keys in rounds:
        wide.forget()
        with store.open_read(wide.request(keys)) as session:
            answers = session.read(wide.target, HostAccess())
        assert wide.landed >= {page for page, answer in enumerate(answers) if answer is OK}
        found += answers

    assert set(found) == {OK, MISS}


@pytest.mark.usefixtures("inside")
def test_b88_objects_that_are_on_disk_alone_are_read_whole_and_by_layer(
    prefix: str, tmp_path: Path
) -> None:
    cluster = MooncakeCluster(tmp_path, segment_bytes=32 << 20, on_disk=True)
    wide, keys = WidePages(ranges=16, pages=8, row_bytes=64 << 10), object_keys(8)
    config = {**cluster.options, "prefix": prefix, "reads": "ranged", "buffer_bytes": 16 << 20}
    options = MooncakeStoreOptions.of_config(config)
    client = Client(options)
    with ExitStack() as stack:
        stack.callback(cluster.close)
        store = MooncakeStore(options, client=client)
        stack.callback(store.close)
        store.register([wide.region])
        names = Names(prefix).of_objects(keys)
        store.write([wide.batch(keys)], HostAccess(), may_publish=allow)
        filling = itertools.count()

        def is_on_disk_alone() -> bool:
            """Write others until memory has no room for the first ones."""
            time.sleep(2 * LEASE_SECONDS)  # since a look keeps them
            for _ in range(6):
                others = object_keys(8, chain=f"filling {next(filling)}")
                store.write([wide.batch(others)], HostAccess(), may_publish=allow)
            found = client.look(names)
            if not all(found):  # memory ran out before the segment had written them to disk
                store.write([wide.batch(keys)], HostAccess(), may_publish=allow)
                time.sleep(2)
            return all(one is not None and not one.in_memory for one in found)

        time.sleep(2)  # most often enough for the segment to write them
        until(is_on_disk_alone)
        with store.open_read(wide.request(keys)) as session:
            assert session.read(wide.target, HostAccess()) == (OK,) * 8
            assert wide.has_landed
            wide.forget()
            for layer in range(16):
                assert session.read(wide.layer(layer), HostAccess()) == (OK,) * 8
            assert wide.has_landed
        assert store.stats().counters["read_whole"] == 8


def test_two_copies_of_an_object_lie_in_two_segments_and_outlive_one_of_them(
    own_cluster: MooncakeCluster, prefix: str
) -> None:
    own_cluster.start_segment()
    config = {**own_cluster.options, "prefix": prefix, "reads": "ranged", "replicas": 2}
    options = MooncakeStoreOptions.of_config(config)
    client = Client(options)
    with ExitStack() as stack:
        store = MooncakeStore(options, client=client)
        stack.callback(store.close)
        shelf, keys = Shelf(store), object_keys(3)
        shelf.stock(keys)
        found = client.look(Names(prefix).of_objects(keys))
        assert [len(one.places) for one in found if one is not None] == [2, 2, 2]

        own_cluster.kill_segment()

        # For as long as the dead one counts, reads may fail; they are never wrong.
        until(lambda: shelf.read(keys) == (OK,) * 3)
