"""What a client answers, or does not, on one without a cluster: codes by position, deadlines, and what is refused."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import ModuleType

import pytest
from fake_mooncake import (
    FakeClient,
    StillClock,
    answers,
    hangs,
    name_of,
    open_fake,
    wait_until,
)
from wide_pages import WidePages

from kvlinker.device import HostAccess
from kvlinker.errors import (
    RegistrationError,
    StoreClosedError,
    StoreContractError,
    StoreError,
    StoreTimeoutError,
    UnsupportedOperationError,
)
from kvlinker.spans import MemoryRegion
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing import Gate
from kvlinker.testing.shelves import LAYERS, Shelf, allow, object_keys
from kvlinker_mooncake import raw_client
from kvlinker_mooncake.codes import Code
from kvlinker_mooncake.raw_client import NEEDED_CALLS, make_raw_client

OK, MISS, FAILED = ReadStatus.OK, ReadStatus.MISS, ReadStatus.FAILED
WRITTEN = WriteStatus.WRITTEN
SESSION_START, RANGES = "batch_get_session_start", "batch_get_into_multi_buffer_ranges"
WHOLE = "batch_get_into_multi_buffers"
pytestmark = pytest.mark.usefixtures("clock")


def names_of(fake: FakeClient) -> list[str]:
    return sorted(fake.objects)


def answers_again(call: Callable[[], object]) -> bool:
    """Return whether a call is answered."""
    try:
        call()
    except StoreTimeoutError:
        return False
    return True


# ---- which client ---------------------------------------------------------------------------------


def test_a_client_that_lacks_calls_is_refused_with_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("mooncake.store")
    calls = set(NEEDED_CALLS) - {"batch_get_session_start", "batch_put_session_end"}
    old = type("MooncakeDistributedStore", (), dict.fromkeys(calls, len))
    module.MooncakeDistributedStore = old  # type: ignore[attr-defined]  # a made-up module
    monkeypatch.setitem(__import__("sys").modules, "mooncake.store", module)

    with pytest.raises(
        UnsupportedOperationError, match=r"has no batch_get_session_start, batch_put_session_end;"
    ):
        make_raw_client()


def test_a_client_that_is_not_there_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raw_client, "MODULE", "mooncake_that_nobody_has.store")

    with pytest.raises(StoreError, match=r"pip install mooncake-transfer-engine.*libibverbs1"):
        make_raw_client()


def test_a_cluster_that_refuses_a_client_is_an_error_with_its_code() -> None:
    with pytest.raises(StoreError, match="refused with code -1"):
        open_fake(FakeClient(before=answers(setup=[-1])))


def test_a_join_that_nobody_waits_for_any_more_is_left_again() -> None:
    fake, gate = FakeClient(), Gate()
    fake.before = hangs(gate, "setup")

    with gate, pytest.raises(StoreTimeoutError, match=r"joining the cluster: no answer within"):
        open_fake(fake)
    wait_until(lambda: fake.is_closed)


# ---- reads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [None, 2], ids=["whole", "layer"])
def test_t4_codes_of_a_read_are_told_apart_by_position(layer: int | None) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(4)
    shelf.stock(keys)
    size = 640 if layer is None else 640 // LAYERS
    codes = [size, int(Code.NOT_FOUND), int(Code.NOT_TRANSFERRED), size - 1]
    name = WHOLE if layer is None else RANGES

    with shelf.open(keys) as session:
        fake.before = answers(**{name: codes})
        statuses = session.read(
            shelf.plan(range(4)) if layer is None else shelf.layer_plan(range(4), layer),
            shelf.access,
        )

    assert statuses == (OK, MISS, FAILED, FAILED)


def test_t4_codes_of_a_lease_are_told_apart_and_nothing_is_read_without_one() -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    fake.before = answers(**{SESSION_START: [int(Code.NOT_FOUND), int(Code.NO_SEGMENT)]})

    assert shelf.read(keys, layer=1) == (MISS, FAILED)
    assert not fake.moved_by(RANGES)


@pytest.mark.parametrize("name", [WHOLE, "batch_is_exist", "batch_put_session_start"])
def test_t4_a_client_that_answers_with_another_count_is_refused(name: str) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    fake.before = answers(**{name: [0]})

    calls: dict[str, Callable[[], object]] = {
        WHOLE: lambda: shelf.read(keys),
        "batch_is_exist": lambda: shelf.store.exists(keys),
        "batch_put_session_start": lambda: shelf.write(object_keys(2, chain="new")),
    }

    with pytest.raises(StoreContractError, match="2 objects was answered with 1 results"):
        calls[name]()


def test_b88_an_object_on_disk_alone_is_read_whole_and_by_layer() -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(3)
    shelf.stock(keys)
    fake.on_disk.update(names_of(fake)[:2])

    assert shelf.store.exists(keys) == (True,) * 3
    assert shelf.read(keys) == (OK,) * 3
    with shelf.open(keys) as session:
        for layer in range(LAYERS):
            assert shelf.read(keys, session=session, layer=layer) == (OK,) * 3
    fetched = [buffers for buffers in fake.moved_by(WHOLE) if buffers == 1]
    assert len(fetched) == 2, "each is fetched once for all of its layers"


@pytest.mark.parametrize(
    ("name", "codes"),
    [(SESSION_START, [int(Code.NO_REPLICA)] * 2), (RANGES, [int(Code.REFUSED)] * 2)],
    ids=["-702", "-600"],
)
def test_b88_an_object_whose_ranges_are_refused_is_read_whole(name: str, codes: list[int]) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    fake.before = answers(**{name: codes})

    assert shelf.read(keys, layer=1) == (OK, OK)


@pytest.mark.parametrize("layer", [None, 1], ids=["whole", "layer"])
def test_b88_a_read_whose_lease_is_over_is_tried_a_few_times_more(layer: int | None) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    over = [int(Code.LEASE_OVER)] * 2
    name = WHOLE if layer is None else RANGES
    thrice = iter([over] * 3)
    fake.before = lambda call: next(thrice, None) if call == name else None

    assert shelf.read(keys, layer=layer) == (OK, OK)

    def come(call: str) -> list[int] | None:
        return (
            over[: 1 if layer is not None and call == WHOLE else 2]
            if call in {WHOLE, RANGES}
            else None
        )

    fake.before = come
    assert shelf.read(keys, layer=layer) == (FAILED, FAILED)


@pytest.mark.parametrize("layer", [None, 1], ids=["whole", "layer"])
def test_b87_what_is_not_where_it_was_after_a_read_is_a_miss(layer: int | None) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    moved = name_of(keys[0])

    def move(name: str) -> None:
        if name in {WHOLE, RANGES}:  # as a master that was started anew, and writers after it
            fake.objects[moved] = bytearray(fake.objects[moved])

    fake.before = move

    assert shelf.read(keys, layer=layer) == (MISS, OK)


def test_b87_what_lies_where_it_was_and_is_longer_now_is_a_miss() -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)

    def grow(name: str) -> None:
        if name == "batch_get_replica_desc" and fake.moved_by(WHOLE):
            fake.objects[name_of(keys[0])].append(0)

    fake.before = grow

    assert shelf.read(keys) == (MISS, OK)


@pytest.mark.parametrize("layer", [None, 1], ids=["whole", "layer"])
def test_b72_a_copy_that_is_not_complete_is_not_read(layer: int | None) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    fake.incomplete.add(name_of(keys[0]))

    assert shelf.read(keys, layer=layer) == (MISS, OK)


def test_a_read_session_that_another_one_ended_goes_on() -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)

    with shelf.open(keys) as session:
        assert shelf.read(keys, session=session, layer=0) == (OK, OK)
        assert shelf.read(keys, layer=1) == (OK, OK)
        assert fake.sessions, "the other session's end leaves this one's"
        fake.sessions.clear()  # as another user of the client would
        assert shelf.read(keys, session=session, layer=2) == (OK, OK)
    assert not fake.sessions


@pytest.mark.parametrize("kind", ["ranged", "whole"])
def test_b88_a_store_asks_at_open_whether_ranges_can_be_read(kind: str) -> None:
    fake = FakeClient(serves_ranges=kind == "ranged")

    store = open_fake(fake, reads="auto")

    assert store.capabilities.ranged_reads is (kind == "ranged")
    assert not fake.objects, "nothing of the probe stays"
    assert not fake.sessions


@pytest.mark.parametrize("name", ["batch_put_from_multi_buffer_ranges", WHOLE, RANGES])
def test_t6_a_probe_that_hangs_ends_the_opening_in_time(name: str) -> None:
    fake, gate = FakeClient(), Gate()
    fake.before = hangs(gate, name)

    with gate, pytest.raises(StoreTimeoutError, match=r"no answer within 0\.1 s"):
        open_fake(fake, reads="auto", transfer_seconds=0.1)


def test_a_store_that_reads_ranges_slowly_reads_whole_objects(clock: StillClock) -> None:
    fake = FakeClient()

    def slow(name: str) -> None:
        clock.sleep({RANGES: 0.2, WHOLE: 1.0}.get(name, 0.0))  # of 16 ranges

    fake.before = slow

    assert not open_fake(fake, reads="auto").capabilities.ranged_reads


def test_a_cluster_without_a_segment_is_opened_and_read_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeClient(before=answers(batch_put_session_start=[int(Code.NO_SPACE)]))

    store = open_fake(fake, reads="auto")

    assert not store.capabilities.ranged_reads
    assert "has the cluster a segment with room?" in caplog.text


# ---- writes ---------------------------------------------------------------------------------------


def test_t4_codes_of_a_write_are_told_apart_by_position() -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(4)
    shelf.stock(keys[:1])

    def start(name: str) -> list[int] | None:
        if name != "batch_put_session_start" or fake.writing:
            return None
        fake.writing[new[0]] = bytearray(640)
        return [0, int(Code.NO_SPACE), -1]

    new = [name_of(key) for key in keys[1:]]
    fake.before = start

    statuses = shelf.write(keys)

    assert statuses == (
        WriteStatus.EXISTS,
        WRITTEN,
        WriteStatus.FULL,
        WriteStatus.FAILED,
    )


def test_a_key_that_a_write_names_twice_is_written_once_and_waited_for_by_nobody(
    clock: StillClock,
) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    began = clock.monotonic()

    statuses = shelf.write([keys[0], keys[1], keys[0]])

    assert statuses == (WRITTEN, WRITTEN, WriteStatus.EXISTS)
    assert len(fake.moved_by("batch_put_session_start")) == 1
    assert clock.monotonic() == began


def test_a_write_whose_bytes_did_not_all_arrive_has_failed_and_leaves_nothing() -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    fake.before = answers(batch_put_from_multi_buffer_ranges=[640, int(Code.NOT_TRANSFERRED)])

    assert shelf.write(keys) == (WRITTEN, WriteStatus.FAILED)
    assert len(fake.objects) == 1
    assert not fake.writing


def test_b73_a_put_that_cannot_be_ended_has_failed_and_can_be_made_again(
    clock: StillClock,
) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    fake.before = answers(
        batch_put_session_end=[int(Code.NOT_FOUND)] * 2,
        batch_put_session_revoke=[int(Code.NO_ANSWER)] * 2,
    )

    assert shelf.write(keys) == (WriteStatus.FAILED,) * 2
    assert len(fake.writing) == 2, "neither could they be given up"
    fake.before = lambda _: None
    clock.sleep(60)  # the master is left alone for a while

    assert shelf.write(keys) == (WRITTEN, WRITTEN)


def test_a_put_that_begins_after_its_deadline_is_given_up() -> None:
    fake, gate = FakeClient(), Gate()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    fake.before = hangs(gate, "batch_put_session_start")

    with gate:
        assert shelf.write(keys) == (WriteStatus.FAILED,) * 2
    wait_until(lambda: ("batch_put_session_revoke", 0) in fake.calls)

    assert not fake.writing


# ---- deadlines ------------------------------------------------------------------------------------


def test_t6_a_dead_master_costs_one_wait_and_then_none_for_a_while() -> None:
    fake, gate = FakeClient(), Gate()
    store = open_fake(fake, pause_seconds=60.0)
    keys = object_keys(2)
    fake.before = hangs(gate, "batch_is_exist")

    with gate:
        with pytest.raises(StoreTimeoutError, match=r"no answer within 2\.0 s"):
            store.exists(keys)
        asked = len(fake.calls)
        with pytest.raises(StoreTimeoutError, match="did not answer lately"):
            store.exists(keys)
        with pytest.raises(StoreTimeoutError, match="did not answer lately"):
            store.delete(keys)
    assert len(fake.calls) == asked


def test_t6_no_more_calls_hang_at_once_than_may(clock: StillClock) -> None:
    fake, gate = FakeClient(), Gate()
    store, keys = open_fake(fake, pause_seconds=1.0), object_keys(1)
    fake.before = hangs(gate, "batch_is_exist")

    with gate:
        for _ in range(16):
            with pytest.raises(StoreTimeoutError, match="no answer within"):
                store.exists(keys)
            clock.sleep(2)  # the master is asked again
        with pytest.raises(StoreTimeoutError, match="did not answer lately"):
            store.exists(keys)
        assert len(fake.moved_by("batch_is_exist")) == 16
    fake.before = lambda _: None
    wait_until(lambda: answers_again(lambda: store.exists(keys)))


@pytest.mark.parametrize("call", ["exists", "delete", "read"])
def test_t6_a_client_that_says_that_the_master_is_gone_is_believed_at_once(call: str) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake, pause_seconds=60.0)), object_keys(2)
    shelf.stock(keys)
    gone = [int(Code.NO_ANSWER)] * 2
    fake.before = answers(batch_is_exist=gone, batch_remove=gone, **{WHOLE: gone})
    calls: dict[str, Callable[[], object]] = {
        "exists": lambda: shelf.store.exists(keys),
        "delete": lambda: shelf.store.delete(keys),
        "read": lambda: shelf.read(keys),
    }

    with pytest.raises(StoreTimeoutError, match="the client says -900"):
        calls[call]()
    with pytest.raises(StoreTimeoutError, match="did not answer lately"):
        shelf.store.exists(keys)


def test_t6_a_master_that_describes_nothing_is_asked_whether_it_is_there() -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    fake.before = answers(batch_get_replica_desc=[], batch_is_exist=[int(Code.NO_ANSWER)])

    with pytest.raises(StoreTimeoutError, match="the client says -900"):
        shelf.read(keys)


def test_t6_no_bytes_are_asked_for_once_another_call_found_the_master_gone() -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake, pause_seconds=60.0)), object_keys(2)
    shelf.stock(keys)

    def find_it_gone(name: str) -> list[int] | None:
        if name == "batch_get_replica_desc":
            with suppress(StoreTimeoutError):
                shelf.store.delete(keys)
        return [int(Code.NO_ANSWER)] * 2 if name == "batch_remove" else None

    fake.before = find_it_gone

    with pytest.raises(StoreTimeoutError, match="get: the master did not answer lately"):
        shelf.read(keys)
    assert not fake.moved_by(WHOLE)


@pytest.mark.parametrize("layer", [None, 1], ids=["whole", "layer"])
def test_l5_a_read_into_pools_is_waited_for_whatever_it_takes(
    clock: StillClock, layer: int | None
) -> None:
    fake, gate = FakeClient(), Gate()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    fake.before = hangs(gate, WHOLE, RANGES)

    with ThreadPoolExecutor(1) as pool, gate:
        read = pool.submit(shelf.read, keys, layer=layer)
        gate.wait_for_arrivals()
        clock.sleep(3600)  # longer than every deadline of the store
        time.sleep(0.1)
        assert not read.done(), "it would write into pages that the engine has given to others"
    with pytest.raises(StoreTimeoutError):  # late, as any answer after its deadline
        read.result()


# ---- memory ---------------------------------------------------------------------------------------


def test_b84_regions_are_registered_all_or_none_and_a_refusal_names_region_and_code() -> None:
    fake = FakeClient()
    store = open_fake(fake)
    regions = [MemoryRegion(base_ptr=(1 + i) << 20, size_bytes=4096) for i in range(3)]
    codes = iter([None, None, [-600]])
    fake.before = lambda name: next(codes) if name == "register_buffer" else None

    with pytest.raises(RegistrationError, match=r"region 2 of 3 at 0x300000 with 4096 B .* -600"):
        store.register(regions)

    assert not fake.registered
    store.unregister()


def test_b84_memory_that_is_not_registered_is_neither_read_nor_written() -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    shelf.store.unregister()
    asked = len(fake.calls)

    with pytest.raises(ValueError, match=r"is in none of 0 registered regions"):
        shelf.read(keys)
    with pytest.raises(ValueError, match=r"is in none of 0 registered regions"):
        shelf.write(object_keys(1, chain="new"))
    assert len(fake.calls) == asked


@pytest.mark.parametrize(("ranges", "pages"), [(60, 40), (1500, 2)])
def test_no_call_has_more_buffers_than_the_transport_queues(ranges: int, pages: int) -> None:
    fake, wide = FakeClient(), WidePages(ranges=ranges, pages=pages)
    store, keys = open_fake(fake), object_keys(pages)
    store.register([wide.region])

    (written,) = store.write([wide.batch(keys)], HostAccess(), may_publish=allow)
    with store.open_read(wide.request(keys)) as session:
        statuses = session.read(wide.target, HostAccess())

    assert written == (WRITTEN,) * pages
    assert statuses == (OK,) * pages
    assert wide.has_landed
    assert 900 < max(buffers for _, buffers in fake.calls) <= 960


# ---- life time ------------------------------------------------------------------------------------


def test_no_call_is_made_once_the_client_is_closed_and_it_is_closed_behind_the_last_one() -> None:
    fake, gate = FakeClient(), Gate()
    store = open_fake(fake)
    fake.before = hangs(gate, "batch_is_exist")

    with gate:
        with pytest.raises(StoreTimeoutError):
            store.exists(object_keys(1))
        store.close()
        assert not fake.is_closed, "a call is under way"
        with pytest.raises(StoreClosedError, match="the store was closed"):
            store.exists(object_keys(1))
    wait_until(lambda: fake.is_closed)


def test_a_forked_process_is_told_that_it_has_no_client() -> None:
    store = open_fake(FakeClient())
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for a thread that it has not would wait for ever
        try:
            store.exists(object_keys(1))
        except StoreClosedError as error:
            os._exit(0 if "a forked process has no client" in str(error) else 1)
        os._exit(2)

    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0


def test_a_store_leaves_no_threads(recwarn: pytest.WarningsRecorder) -> None:  # noqa: ARG001  # none may be raised
    before = set(threading.enumerate())
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    shelf.read(keys)

    shelf.store.close()

    wait_until(lambda: set(threading.enumerate()) <= before)
    assert fake.is_closed
    assert not fake.registered
