"""Tests of framed reads: one answer for a whole object, layers ahead, and no byte that was not checked."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest
from framed_dictionary import DictionaryStore, checksum

from kvlinker.device import HostAccess, HostObjects
from kvlinker.errors import ContractError, StoreClosedError, TransferRevokedError
from kvlinker.framed_looks import look_at
from kvlinker.framed_objects import WantedObjects
from kvlinker.frames import PREFIX_BYTES, FrameLayout, encode_headers, header_bytes
from kvlinker.named_values import digits_of_key
from kvlinker.plans import TransferPlan
from kvlinker.pools import KV
from kvlinker.store import ObjectKey, ReadStatus
from kvlinker.testing.layered_pages import LayeredPages
from kvlinker.testing.shelves import LAYERS, Shelf, allow, object_keys

OK, MISS, CORRUPT, FAILED = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT, ReadStatus.FAILED
PAGE = 64 << 10
HEADER = header_bytes(2 * LAYERS)
KEYS = object_keys(3)


@pytest.fixture
def shelf() -> Shelf:
    """Give a shelf with three objects, whose store has seen no header since."""
    shelf = Shelf(DictionaryStore(), page_bytes=PAGE)
    shelf.stock(KEYS)
    fresh = DictionaryStore()
    fresh.values.values = dictionary(shelf).values.values
    return Shelf(fresh, page_bytes=PAGE)


def dictionary(shelf: Shelf) -> DictionaryStore:
    assert isinstance(shelf.store, DictionaryStore)
    return shelf.store


def test_an_object_that_is_read_whole_is_one_answer_also_the_first_time(shelf: Shelf) -> None:
    assert shelf.read(KEYS) == (OK,) * 3

    assert sorted(dictionary(shelf).values.answers) == sorted(
        (key, 0, HEADER + PAGE) for key in KEYS
    )


def test_a_first_layer_comes_with_the_header_and_others_alone(shelf: Shelf) -> None:
    values = dictionary(shelf).values
    shelf.read(KEYS[:1])
    values.answers.clear()
    part = PAGE // (2 * LAYERS)

    with shelf.open(KEYS[:1]) as session:
        assert shelf.read(KEYS[:1], session=session, layer=0) == (OK,)
        assert shelf.read(KEYS[:1], session=session, layer=2) == (OK,)

    v = HEADER + LAYERS * part
    assert [(start, size) for _, start, size in values.answers] == [
        (0, HEADER + part),
        (v, part),
        (HEADER + 2 * part, part),
        (v + 2 * part, part),
    ]


def test_what_does_not_fit_an_answer_is_asked_for_in_pieces() -> None:
    shelf = Shelf(DictionaryStore(answer_bytes=20 << 10), page_bytes=PAGE)
    shelf.stock(KEYS)
    values = dictionary(shelf).values
    values.answers.clear()

    assert shelf.read(KEYS) == (OK,) * 3

    assert max(size for _, _, size in values.answers) <= 20 << 10
    assert sum(size for _, _, size in values.answers) == 3 * (HEADER + PAGE)


def test_l4_layers_that_follow_each_other_are_fetched_once_from_the_third_on(shelf: Shelf) -> None:
    values = dictionary(shelf).values

    with shelf.open(KEYS) as session:
        answers = [shelf.read(KEYS, session=session, layer=layer) for layer in range(LAYERS)]
        assert values.open_fetches == 1

    assert answers == [(OK,) * 3] * LAYERS
    # V of layer 0, whose K came with the header; layer 1; layer 2, and layer 3 as what is expected.
    assert values.fetches == [(1, 0), (2, 0), (2, 2)]
    assert values.open_fetches == 0


@pytest.mark.parametrize(
    "order", [(0, 1, 2, 0, 1, 2, 3), (3, 2, 1, 0), (1, 2, 3, 3, 1), (1, 2, 0, 3)]
)
def test_l4_layers_may_be_asked_for_in_any_order(shelf: Shelf, order: tuple[int, ...]) -> None:
    with shelf.open(KEYS) as session:
        for layer in order:
            assert shelf.read(KEYS, session=session, layer=layer) == (OK,) * 3

    assert dictionary(shelf).values.open_fetches == 0


def test_t1_a_byte_that_changes_in_a_layer_that_was_expected_is_noticed(shelf: Shelf) -> None:
    values = dictionary(shelf).values
    part = PAGE // (2 * LAYERS)

    def flip(key: ObjectKey, start: int, found: bytes) -> bytes:
        is_it = key == KEYS[1] and start == HEADER + 3 * part
        return found[:5] + bytes([found[5] ^ 1]) + found[6:] if is_it else found

    values.change = flip
    with shelf.open(KEYS) as session:
        answers = [shelf.read(KEYS, session=session, layer=layer) for layer in range(LAYERS)]

    assert answers[:3] == [(OK,) * 3] * 3
    assert answers[3] == (OK, CORRUPT, OK)
    assert shelf.store.exists(KEYS) == (True, False, True)
    assert shelf.store.stats().counters["corrupt"] == 1


def test_b71_what_goes_between_two_layers_is_a_miss_and_is_counted_once(shelf: Shelf) -> None:
    values = dictionary(shelf).values
    with shelf.open(KEYS) as session:
        assert shelf.read(KEYS, session=session, layer=0) == (OK,) * 3
        shelf.store.delete(KEYS[:1])
        assert shelf.read(KEYS, session=session, layer=1) == (MISS, OK, OK)
        shelf.stock(KEYS[:1])
        values.answers.clear()
        assert shelf.read(KEYS, session=session, layer=2) == (MISS, OK, OK)

    assert shelf.store.stats().counters["vanished"] == 1
    assert {key for key, _, _ in values.answers} == set(KEYS[1:])


def test_t1_what_was_cut_off_between_two_layers_is_corrupt_and_removed(shelf: Shelf) -> None:
    values = dictionary(shelf).values
    with shelf.open(KEYS) as session:
        assert shelf.read(KEYS, session=session, layer=0) == (OK,) * 3
        name = digits_of_key(KEYS[1])
        values.values[name] = values.values[name][: HEADER + PAGE // (2 * LAYERS) + 5]
        assert shelf.read(KEYS, session=session, layer=1) == (OK, CORRUPT, OK)

    assert shelf.store.exists(KEYS) == (True, False, True)
    assert shelf.store.stats().counters["corrupt"] == 1


@pytest.mark.parametrize("kept", [0, PREFIX_BYTES - 1, PREFIX_BYTES, HEADER - 1, HEADER + 7])
def test_t1_b81_what_was_cut_off_before_it_is_read_is_never_ok(shelf: Shelf, kept: int) -> None:
    values = dictionary(shelf).values
    name = digits_of_key(KEYS[1])
    values.values[name] = values.values[name][:kept]

    assert shelf.read(KEYS) == (OK, CORRUPT if kept else MISS, OK)


@pytest.mark.parametrize("kept", [0, PREFIX_BYTES - 1, PREFIX_BYTES, HEADER - 1])
def test_t1_an_object_of_whose_header_all_answers_are_too_short_is_a_miss_and_stays(
    shelf: Shelf, kept: int
) -> None:
    values = dictionary(shelf).values
    values.change = lambda key, _, found: found[:kept] if key == KEYS[1] else found

    assert shelf.read(KEYS) == (OK, MISS, OK)
    assert shelf.store.stats().counters["missed"] == 1

    values.change = lambda _key, _start, found: found
    assert shelf.read(KEYS) == (OK,) * 3


def test_t1_an_object_that_no_answer_tells_of_is_a_miss(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = dictionary(shelf).values
    begin = values.begin
    monkeypatch.setattr(values, "begin", lambda keys, size: islice(begin(keys, size), 1))

    assert shelf.read(KEYS) == (MISS, MISS, OK)


def test_an_answer_that_ends_behind_the_header_costs_what_is_missing_of_those_that_came_with_it(
    shelf: Shelf,
) -> None:
    values = dictionary(shelf).values
    half = HEADER + PAGE // 2
    values.change = lambda key, start, found: (
        found[:half] if (key, start) == (KEYS[1], 0) else found
    )

    assert shelf.read(KEYS) == (OK,) * 3

    assert sorted(values.answers) == sorted(
        [
            (KEYS[0], 0, HEADER + PAGE),
            (KEYS[1], 0, half),
            (KEYS[0], half, PAGE // 2),
            (KEYS[1], half, PAGE // 2),
            (KEYS[2], 0, HEADER + PAGE),
        ]
    )


@pytest.mark.parametrize("layer", [None, 0, 2])
def test_objects_whose_tables_of_ranges_differ_are_read_together(layer: int | None) -> None:
    sizes = ((48 << 10, 16 << 10), (16 << 10, 48 << 10))
    store = DictionaryStore()
    shelf = Shelf(store, page_bytes=PAGE)
    shelf.stock(KEYS)
    for key, table in zip(KEYS, sizes, strict=False):
        name = digits_of_key(key)
        payload = memoryview(store.values.values[name])[HEADER:]
        layout = FrameLayout(offsets=(0, table[0]), sizes=table)
        sums = [checksum(payload[: table[0]]), checksum(payload[table[0] :])]
        header = encode_headers(
            layout, [key], shelf.fingerprint, np.array([sums], dtype=np.uint64), checksum=checksum
        )
        store.values.values[name] = header.tobytes() + payload.tobytes()

    assert shelf.read(KEYS, layer=layer) == (OK,) * 3


def test_a_read_that_the_pools_refuse_fetches_no_more(shelf: Shelf) -> None:
    class Refusing(HostAccess):
        def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
            host.check(plan)
            raise TransferRevokedError(plan.pool)

    with shelf.open(KEYS) as session:
        for layer in (0, 1):
            shelf.read(KEYS, session=session, layer=layer)
        with pytest.raises(TransferRevokedError) as refused:
            session.read(shelf.layer_plan([32, 33, 34], 2), Refusing())

        assert dictionary(shelf).values.open_fetches == 0
        assert refused.traceback  # whose frames would have kept the fetch


def test_long_headers_are_read_a_few_at_a_time() -> None:
    pages = LayeredPages(600, 64)
    store = DictionaryStore(answer_bytes=2 * header_bytes(600))
    for key in object_keys(5):
        store.write([pages.batch(key)], HostAccess(), may_publish=allow)
    fresh = DictionaryStore(answer_bytes=2 * header_bytes(600))
    fresh.values.values = store.values.values
    wanted = WantedObjects(keys=tuple(object_keys(5)), object_bytes=600 * 64, fingerprint=b"pages")

    look = look_at(fresh.values, fresh.state, wanted)

    assert look.found == [0, 1, 2, 3, 4]
    assert fresh.values.begins[1:] == [(2, header_bytes(600))] * 2 + [(1, header_bytes(600))]


def test_no_more_layouts_are_remembered_than_are_usual() -> None:
    state = DictionaryStore().state

    for number in range(300):
        wanted = WantedObjects(keys=(), object_bytes=number + 1, fingerprint=b"pages")
        state.note(wanted, 1000)

    assert state.header_bytes(b"pages", 1, guess=7) == 7
    assert state.header_bytes(b"pages", 300, guess=7) == 1000


@pytest.mark.parametrize("layer", [None, 2])
def test_t4_an_answer_that_is_too_short_fails_and_costs_no_object(
    shelf: Shelf, layer: int | None
) -> None:
    shelf.read(KEYS)
    values = dictionary(shelf).values
    values.change = lambda key, _, found: (
        found[:-1] if key == KEYS[2] and len(found) > HEADER else found
    )

    assert shelf.read(KEYS, layer=layer) == (OK, OK, FAILED)

    assert shelf.store.exists(KEYS) == (True,) * 3
    assert shelf.store.stats().counters["short_answers"] == 1


@pytest.mark.parametrize("spans", [1, 160, 600, 2600])
def test_objects_of_any_number_of_ranges_come_back_in_a_store_that_knows_none(spans: int) -> None:
    pages = LayeredPages(spans, 64)
    store, fresh = DictionaryStore(), DictionaryStore()
    (key,) = object_keys(1)
    store.write([pages.batch(key)], HostAccess(), may_publish=allow)
    fresh.values.values = store.values.values

    with fresh.open_read(pages.request(key)) as session:
        statuses = [session.read(pages.layer(layer), HostAccess()) for layer in range(spans)]

    assert set(statuses) == {(OK,)}
    assert (pages.memory[:, 1] == pages.memory[:, 0]).all()


def test_ranges_that_are_finer_than_those_that_were_checked_come_back() -> None:
    coarse, fine = LayeredPages(2, 4096), LayeredPages(8, 1024)
    store = DictionaryStore()
    (key,) = object_keys(1)
    store.write([coarse.batch(key)], HostAccess(), may_publish=allow)

    with store.open_read(fine.request(key)) as session:
        statuses = [session.read(fine.layer(layer), HostAccess()) for layer in range(8)]

    assert statuses == [(OK,)] * 8
    assert fine.memory[:, 1].tobytes() == coarse.memory[:, 0].tobytes()


@pytest.mark.parametrize("answer_bytes", [1 << 20, 5 << 10, 3 << 10])
def test_ranges_that_are_coarser_than_those_that_were_checked_come_back(answer_bytes: int) -> None:
    fine, coarse = LayeredPages(8, 1024), LayeredPages(2, 4096)
    store = DictionaryStore(answer_bytes=answer_bytes)
    (key,) = object_keys(1)
    store.write([fine.batch(key)], HostAccess(), may_publish=allow)

    with store.open_read(coarse.request(key)) as session:
        assert session.read(coarse.layer(1), HostAccess()) == (OK,)
        assert session.read(coarse.target, HostAccess()) == (OK,)

    assert coarse.memory[:, 1].tobytes() == fine.memory[:, 0].tobytes()


@pytest.mark.parametrize(("of", "status"), [(0, CORRUPT), (1, MISS)], ids=["own", "foreign"])
def test_a_forged_header_that_is_longer_than_any_need_be_fills_no_memory(
    of: int, status: ReadStatus
) -> None:
    shelf = Shelf(DictionaryStore())
    keys = object_keys(2)
    shelf.stock(keys)
    values = dictionary(shelf).values
    name = digits_of_key(keys[0])
    prefix = bytearray(values.values[digits_of_key(keys[of])][:PREFIX_BYTES])
    prefix[20:24] = (60_000).to_bytes(4, "little")  # ranges, and so 1.4 MB of header
    values.values[name] = bytes(prefix) + bytes(
        header_bytes(60_000) + shelf.page_bytes - PREFIX_BYTES
    )
    values.answers.clear()

    assert shelf.read(keys) == (status, OK)

    assert max(size for _, _, size in values.answers) <= 64 << 10


def test_an_object_of_another_layout_with_a_long_header_is_a_miss_and_stays() -> None:
    pages, other = LayeredPages(600, 64), LayeredPages(599, 64)
    store, fresh = DictionaryStore(), DictionaryStore()
    (key,) = object_keys(1)
    store.write([pages.batch(key)], HostAccess(), may_publish=allow)
    fresh.values.values = store.values.values

    with fresh.open_read(other.request(key)) as session:
        assert session.read(other.target, HostAccess()) == (MISS,)

    assert fresh.exists([key]) == (True,)
    assert fresh.stats().counters["missed"] == 1


def test_a_session_that_was_closed_and_a_plan_that_does_not_fit_are_refused(shelf: Shelf) -> None:
    session = shelf.open(KEYS)
    with pytest.raises(ContractError, match="does not fit a request of 3 objects"):
        session.read(shelf.plan([32]), shelf.access)
    session.close()
    session.close()

    with pytest.raises(StoreClosedError, match="was closed; open another"):
        session.read(shelf.plan([32, 33, 34]), shelf.access)


def test_a_session_is_closed_at_once_while_a_server_is_silent_and_its_read_ends_well(
    shelf: Shelf,
) -> None:
    values = dictionary(shelf).values
    asked, answer = threading.Event(), threading.Event()

    def wait(_key: ObjectKey, _start: int, found: bytes) -> bytes:
        asked.set()
        assert answer.wait(30)
        return found

    values.change = wait
    session = shelf.open(KEYS)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(shelf.read, KEYS, session=session, layer=1)
        assert asked.wait(30)
        session.close()
        answer.set()
        assert read.result() == (OK,) * 3

    assert values.open_fetches == 0


def test_two_threads_may_read_layers_of_one_session(shelf: Shelf) -> None:
    with shelf.open(KEYS) as session, ThreadPoolExecutor(2) as pool:
        plans = [shelf.layer_plan([32, 33, 34], layer) for layer in range(LAYERS)]
        shelf.pools.memory.poison()
        answers = list(pool.map(lambda plan: session.read(plan, shelf.access), plans * 8))

    assert answers == [(OK,) * 3] * (8 * LAYERS)
    right = shelf.pools.page_transfers(KEYS, {KV: [32, 33, 34]})
    assert shelf.pools.wrong_pages(right) == ()
    assert dictionary(shelf).values.open_fetches == 0
