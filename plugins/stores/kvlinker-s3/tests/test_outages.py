"""Outages: servers that die, hang, run full or answer nonsense cost time and misses, and never a wrong byte."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_proxy import Answer, Asked, Proxy, proxy_to
from s3_server import OpenStore, S3Server, free_port, settings_for

from kvlinker.device import HostAccess
from kvlinker.errors import StoreClosedError, StoreError, StoreTimeoutError
from kvlinker.frames import header_bytes
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.layered_pages import LayeredPages
from kvlinker.testing.shelves import LAYERS, Shelf, allow, object_keys

OK, MISS, CORRUPT, FAILED = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT, ReadStatus.FAILED
WRITTEN, EXISTS, FULL = WriteStatus.WRITTEN, WriteStatus.EXISTS, WriteStatus.FULL
NEVER = 1000.0


def is_payload(asked: Asked) -> bool:
    """Whether ranges of a payload are asked for, and no header."""
    return asked.first_byte > 0


BEHIND = 2
"""A layer that does not stand right behind the header: its ranges are requests of their own."""


# ---- death and restart ------------------------------------------------------------------------


def test_b87_a_server_that_was_killed_and_restarted_has_lost_its_objects_and_takes_new_ones(
    own_server: S3Server, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(own_server.port, retry_seconds=0.05))
    keys = object_keys(3)
    shelf.stock(keys)

    with shelf.open(keys) as session:
        assert shelf.read(keys, session=session, layer=0) == (OK,) * 3
        own_server.kill()
        with pytest.raises(StoreTimeoutError, match="loads: the server cannot be reached"):
            shelf.read(keys, session=session, layer=1)
        assert shelf.write(keys) == (WriteStatus.FAILED,) * 3
        with pytest.raises(StoreTimeoutError, match=r"offloads: .* is not asked again yet"):
            shelf.write(keys)
        own_server.start()
        time.sleep(0.06)
        assert shelf.read(keys, session=session, layer=1) == (MISS,) * 3

    assert shelf.store.exists(keys) == (False,) * 3
    shelf.stock(keys)
    assert shelf.read(keys) == (OK,) * 3


def test_t6_a_dead_server_costs_one_wait_for_loads_and_one_for_offloads(
    server: S3Server, open_store: OpenStore
) -> None:
    with proxy_to(server.port) as proxy:
        shelf = Shelf(open_store(proxy.port, pause_seconds=NEVER, retry_seconds=0.05))
        keys = object_keys(4)
        shelf.stock(keys)
        proxy.before = lambda _: Answer(status=500)
        with pytest.raises(StoreTimeoutError, match=r"loads: the server cannot be reached: .*500"):
            shelf.read(keys)
        proxy.before = None
        asked = len(proxy.asked)
        for _ in range(100):
            with pytest.raises(StoreTimeoutError, match=r"loads: .* is not asked again yet"):
                shelf.store.exists(keys)
        # Requests of the read that failed may still come; lookups ask with HEAD.
        assert "HEAD" not in {one.method for one in proxy.asked[asked:]}

        # The other direction has not been told, and finds the server.
        assert shelf.write(object_keys(2, chain="more")) == (WRITTEN, WRITTEN)


def test_opening_a_store_without_a_server_says_where_it_was_looked_for(
    open_store: OpenStore,
) -> None:
    port = free_port()

    with pytest.raises(StoreTimeoutError, match=f"loads: .*cannot be reached: .*:{port}/"):
        open_store(port, retry_seconds=0.05)


def test_an_error_that_passes_within_the_retries_is_not_noticed(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy.port, retry_seconds=30, answer_seconds=30))
    keys = object_keys(3)
    lock, left = threading.Lock(), [6]

    def fail_at_times(asked: Asked) -> Answer | None:
        with lock:
            left[0] -= 1
            fails = left[0] >= 0
        return Answer(status=503, is_reset=asked.method == "GET") if fails else None

    proxy.before = fail_at_times
    assert shelf.write(keys) == (WRITTEN,) * 3
    left[0] = 2
    assert shelf.read(keys) == (OK,) * 3
    assert left[0] < 0


def test_a_server_that_fails_some_of_the_objects_fails_those_alone(
    open_store: OpenStore, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(open_store(proxy.port))
    keys = object_keys(3)
    refused = keys[1].hex()[26:]

    def refuse_one(asked: Asked) -> Answer | None:
        is_it = asked.method == "PUT" and refused in asked.path
        return Answer(status=405, body=b"not this one") if is_it else None

    with proxy.troubled(before=refuse_one):
        assert shelf.write(keys) == (WRITTEN, WriteStatus.FAILED, WRITTEN)

    assert shelf.read(keys) == (OK, MISS, OK)
    assert "not this one" in caplog.text
    assert shelf.store.stats().counters["errors"] == 1


def test_a_server_that_dies_before_the_objects_are_sent_fails_them_and_raises_nothing(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy.port, retry_seconds=0.05))
    keys = object_keys(2)

    def may_publish() -> bool:
        proxy.before = lambda _: Answer(status=503, is_reset=True)
        return True

    assert shelf.write(keys, may_publish=may_publish) == (WriteStatus.FAILED,) * 2
    proxy.before = None
    assert shelf.store.exists(keys) == (False, False)


# ---- hanging ------------------------------------------------------------------------------------


def test_t6_a_frozen_server_costs_the_deadline(proxy: Proxy, open_store: OpenStore) -> None:
    shelf = Shelf(open_store(proxy.port, answer_seconds=0.3, retry_seconds=0.1))
    keys = object_keys(2)
    shelf.stock(keys)
    thawed = threading.Event()

    def freeze(_: Asked) -> None:
        thawed.wait(30)

    with (
        proxy.troubled(before=freeze),
        pytest.raises(StoreTimeoutError, match="loads: the server cannot be reached"),
    ):
        shelf.read(keys)
    thawed.set()

    # The late answers came on connections that nobody uses any more.
    assert shelf.store.exists([*object_keys(2, chain="absent"), *keys]) == (
        *(False, False),
        *(True, True),
    )
    assert shelf.read(keys) == (OK, OK)


def test_a_slow_server_costs_time_and_no_object(open_store: OpenStore, proxy: Proxy) -> None:
    shelf = Shelf(open_store(proxy.port, answer_seconds=30))
    keys = object_keys(4)
    proxy.before = lambda _: time.sleep(0.1)

    assert shelf.write(keys) == (WRITTEN,) * 4
    assert shelf.read(keys) == (OK,) * 4
    with shelf.open(keys) as session:
        for layer in range(LAYERS):
            assert shelf.read(keys, session=session, layer=layer) == (OK,) * 4


def test_l9_loads_go_on_while_the_server_takes_no_writes(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy.port, concurrency=2, answer_seconds=60))
    beside = shelf.beside()
    stored, others = object_keys(2), object_keys(4, chain="others")
    shelf.stock(stored)
    go_on, held = threading.Event(), threading.Event()

    def hold_writes(asked: Asked) -> None:
        if asked.method == "PUT":
            held.set()
            go_on.wait(60)

    proxy.before = hold_writes
    with ThreadPoolExecutor(1) as pool:
        write = pool.submit(shelf.write, others)
        assert held.wait(30)
        for _ in range(5):
            assert beside.read(stored) == (OK, OK)
            assert shelf.store.exists(others) == (False,) * 4
        assert not write.done()
        go_on.set()
        assert write.result() == (WRITTEN,) * 4


def test_requests_at_once_are_bounded(open_store: OpenStore, proxy: Proxy) -> None:
    shelf = Shelf(open_store(proxy.port, concurrency=3, answer_seconds=60))
    keys = object_keys(16)
    lock = threading.Lock()
    running, most = set[int](), [0]
    first_two, asked = threading.Barrier(2), itertools.count()

    def note(_: Asked) -> None:
        with lock:
            running.add(threading.get_ident())
            most[0] = max(most[0], len(running))
            is_early = next(asked) < first_two.parties
        if is_early:  # however late the second one comes
            first_two.wait(60)
        time.sleep(0.01)
        with lock:
            running.discard(threading.get_ident())

    proxy.before = note

    assert shelf.write(keys) == (WRITTEN,) * 16
    assert shelf.read(keys) == (OK,) * 16
    assert 2 <= most[0] <= 3


def test_closing_the_store_under_a_call_ends_it(open_store: OpenStore, proxy: Proxy) -> None:
    shelf = Shelf(open_store(proxy.port, concurrency=1, answer_seconds=60))
    keys = object_keys(4)
    shelf.stock(keys)
    go_on, held = threading.Event(), threading.Event()

    def hold(_: Asked) -> None:
        held.set()
        go_on.wait(60)

    proxy.before = hold
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(shelf.read, keys)
        assert held.wait(30)
        shelf.store.close()
        go_on.set()
        with pytest.raises(StoreClosedError):
            read.result()


# ---- answers that are none --------------------------------------------------------------------


def test_t1_a_byte_that_changes_on_the_way_never_reaches_a_page(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy.port))
    flipped, sound = object_keys(2)
    shelf.stock([flipped, sound])
    wanted = shelf.payload(flipped)[100:120]

    def flip(_: Asked, answer: Answer) -> None:
        answer.body = answer.body.replace(wanted, wanted[:-1] + bytes([wanted[-1] ^ 1]))

    proxy.after = flip

    assert shelf.read([flipped, sound]) == (CORRUPT, OK)


@pytest.mark.parametrize("layer", [None, BEHIND])
@pytest.mark.parametrize("cut", [0, 50])
def test_t4_answers_that_end_early_are_tried_again_and_then_an_error(
    open_store: OpenStore, proxy: Proxy, cut: int, layer: int | None
) -> None:
    shelf = Shelf(open_store(proxy.port))
    keys = object_keys(2)
    shelf.stock(keys)

    def cut_short(asked: Asked, answer: Answer) -> None:
        if layer is None or is_payload(asked):
            answer.cut = cut

    with (
        proxy.troubled(after=cut_short),
        pytest.raises(StoreTimeoutError, match=r"the server cannot be reached: .*body"),
    ):
        shelf.read(keys, layer=layer)

    assert shelf.read(keys) == (OK, OK)


@pytest.mark.parametrize("layer", [None, BEHIND])
def test_t4_an_answer_that_is_shorter_than_the_range_fails_and_costs_no_object(
    open_store: OpenStore, proxy: Proxy, layer: int | None
) -> None:
    shelf = Shelf(open_store(proxy.port))
    short, sound = object_keys(2)
    shelf.stock([short, sound])

    def shorten(asked: Asked, answer: Answer) -> None:
        is_only_header = not is_payload(asked) and len(answer.body) <= header_bytes(8)
        if asked.method == "GET" and short.hex()[26:] in asked.path and not is_only_header:
            answer.body = answer.body[:-5]

    with proxy.troubled(after=shorten):
        assert shelf.read([short, sound], layer=layer) == (FAILED, OK)

    assert shelf.read([short, sound]) == (OK, OK)
    assert shelf.store.stats().counters["short_answers"] == 1


def test_b71_an_object_that_goes_and_comes_back_while_it_is_read_is_a_miss(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy.port))
    keys = object_keys(2)
    shelf.stock(keys)

    def be_gone(asked: Asked) -> Answer | None:
        is_it = is_payload(asked) and keys[0].hex()[26:] in asked.path
        return Answer(status=404) if is_it else None

    proxy.before = be_gone

    assert shelf.read(keys, layer=BEHIND) == (MISS, OK)
    assert shelf.store.stats().counters["vanished"] == 1


@pytest.mark.parametrize("asked_for", ["headers", "payload"])
def test_t4_a_whole_body_in_the_place_of_a_range_is_refused(
    open_store: OpenStore, proxy: Proxy, asked_for: str
) -> None:
    shelf = Shelf(open_store(proxy.port))
    keys = object_keys(2)
    shelf.stock(keys)

    def forget_the_range(asked: Asked) -> None:
        if asked_for == "headers" or is_payload(asked):
            asked.headers.pop("range", None)

    with (
        proxy.troubled(before=forget_the_range),
        pytest.raises(StoreError, match="does not answer with the range that it was asked for"),
    ):
        shelf.read(keys, layer=BEHIND)

    assert shelf.read(keys) == (OK, OK)
    assert shelf.store.stats().counters.get("corrupt", 0) == 0


def test_t4_another_range_than_the_one_asked_for_is_refused(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy.port))
    keys = object_keys(1)
    shelf.stock(keys)

    def shift(asked: Asked) -> None:
        if is_payload(asked):
            first, last = asked.headers["range"].removeprefix("bytes=").split("-")
            asked.headers["range"] = f"bytes={int(first) - 1}-{int(last) - 1}"

    proxy.before = shift
    with pytest.raises(StoreError, match="does not answer with the range that it was asked for"):
        shelf.read(keys, layer=BEHIND)


def test_a_wrong_etag_says_nothing_of_the_bytes_and_right_ones_are_read(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy.port))
    keys = object_keys(2)
    numbers = iter(range(1000))

    def mislabel(_: Asked, answer: Answer) -> None:
        if "etag" in answer.headers:
            answer.headers["etag"] = f'"{next(numbers)}"'

    proxy.after = mislabel

    assert shelf.write(keys) == (WRITTEN, WRITTEN)
    assert shelf.read(keys) == (OK, OK)
    assert shelf.write(keys) == (EXISTS, EXISTS)
    assert (
        next(numbers) >= 2 + 2 + 2
    )  # answers to writes, to reads, and to looks after the second write


def test_a_server_that_refuses_ranges_longer_than_the_object_is_asked_for_shorter_ones(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy.port))
    keys = object_keys(2)
    shelf.stock(keys)
    another = Shelf(open_store(proxy.port))  # which does not know yet how long headers are

    def refuse_long_ones(asked: Asked, answer: Answer) -> None:
        if asked.is_ranged and answer.status == 206:
            last = int(asked.headers["range"].split("-")[1])
            if last >= int(answer.headers["content-range"].split("/")[1]):
                answer.status, answer.body = 400, b"invalid range"

    proxy.after = refuse_long_ones

    assert another.read([*object_keys(1, chain="absent"), *keys]) == (MISS, OK, OK)


# ---- writes that the server knows or not -------------------------------------------------------


def test_a_server_without_conditional_writes_is_written_to_all_the_same(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy.port))
    keys, more = object_keys(3), object_keys(2, chain="more")

    def refuse_conditions(asked: Asked) -> Answer | None:
        return Answer(status=501) if "if-none-match" in asked.headers else None

    proxy.before = refuse_conditions

    assert shelf.write(keys) == (WRITTEN,) * 3
    before = proxy.count("PUT")
    assert shelf.write([*keys, *more]) == (EXISTS,) * 3 + (WRITTEN,) * 2
    assert proxy.count("PUT") - before == 2  # it is not asked for conditions again
    assert shelf.read(keys) == (OK,) * 3


def test_an_object_whose_answer_was_lost_is_found_by_the_next_try(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy.port, retry_seconds=30, answer_seconds=30))
    keys = object_keys(1)
    lost = [True]

    def lose_the_first(asked: Asked, answer: Answer) -> None:
        if asked.method == "PUT" and lost[0]:
            lost[0] = False
            answer.status = 503

    proxy.after = lose_the_first

    assert shelf.write(keys) == (EXISTS,)
    assert shelf.read(keys) == (OK,)


def test_t3_a_server_that_is_full_is_said_to_be_full_and_keeps_what_it_has(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy.port))
    stored, more = object_keys(2), object_keys(2, chain="more")
    shelf.stock(stored)
    proxy.before = lambda asked: (
        Answer(status=507, body=b"<Code>XMinioStorageFull</Code>")
        if asked.method == "PUT"
        else None
    )

    assert shelf.write([*stored, *more]) == (EXISTS, EXISTS, FULL, FULL)
    assert shelf.read([*stored, *more]) == (OK, OK, MISS, MISS)
    assert shelf.store.stats().counters["full"] == 2


# ---- who may, and how much ----------------------------------------------------------------------


def test_a_server_that_refuses_the_key_is_an_error_that_shows_no_secret(
    open_store: OpenStore, proxy: Proxy
) -> None:
    body = b"<Error><Code>SignatureDoesNotMatch</Code></Error>"
    proxy.before = lambda _: Answer(status=403, body=body)

    with pytest.raises(StoreError, match=r"the server refuses: .*SignatureDoesNotMatch") as caught:
        open_store(proxy.port)

    assert "sesame" not in str(caught.value)
    assert str(caught.value).endswith("; look at the keys, at what they may do, and at the region")


def test_opening_a_store_on_a_bucket_that_is_not_there_says_what_to_do(
    server: S3Server, open_store: OpenStore
) -> None:
    with pytest.raises(StoreError, match=r"NoSuchBucket.*; make the bucket, or mend url"):
        open_store(server.port, url="s3://nobody")


def test_nothing_goes_in_plain_text_to_a_place_that_no_setting_names(
    open_store: OpenStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dict(settings_for(proxy.port))
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(settings.pop("endpoint")))

    with pytest.raises(StoreError):
        open_store(proxy.port, settings=settings)

    assert proxy.asked == []


def test_a_key_comes_from_where_the_settings_say(
    open_store: OpenStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KV_S3_TEST_SECRET")
    with pytest.raises(StoreError, match="KV_S3_TEST_SECRET is not set"):
        open_store(proxy.port)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    chain = {name: value for name, value in settings_for(proxy.port).items() if "key" not in name}

    open_store(proxy.port, settings=chain)

    assert "Credential=from-the-environment/" in proxy.asked[-1].headers["authorization"]


def test_l4_a_layer_is_read_without_the_others_and_neighbours_in_one_request(
    open_store: OpenStore, proxy: Proxy
) -> None:
    pages = LayeredPages(64, 30 << 10)
    (key,) = object_keys(1)
    store = open_store(proxy.port)
    store.write([pages.batch(key)], HostAccess(), may_publish=allow)
    answered: list[int] = []

    def note(asked: Asked, answer: Answer) -> None:
        if is_payload(asked):
            answered.append(len(answer.body))

    proxy.after = note
    with store.open_read(pages.request(key)) as session:
        assert session.read(pages.layer(5), HostAccess()) == (OK,)
        assert answered == [30 << 10]
        assert (pages.memory[5, 1] == pages.memory[5, 0]).all()
        assert not (pages.memory[4, 1] == pages.memory[4, 0]).all()
        assert session.read(pages.target, HostAccess()) == (OK,)

    assert answered == [30 << 10, 64 * (30 << 10)]
    assert (pages.memory[:, 1] == pages.memory[:, 0]).all()


def test_an_object_that_is_read_whole_is_one_request_also_the_first_time(
    server: S3Server, open_store: OpenStore, proxy: Proxy
) -> None:
    keys = object_keys(3)
    Shelf(open_store(server.port)).stock(keys)
    shelf = Shelf(open_store(proxy.port))  # which has seen no header yet
    before = len(proxy.asked)

    assert shelf.read(keys) == (OK,) * 3
    assert len(proxy.asked) - before == 3


def test_l4_layers_that_follow_each_other_are_asked_for_together(
    open_store: OpenStore, proxy: Proxy
) -> None:
    pages = LayeredPages(64, 8 << 10)
    (key,) = object_keys(1)
    store = open_store(proxy.port)
    store.write([pages.batch(key)], HostAccess(), may_publish=allow)
    before = len(proxy.asked)

    with store.open_read(pages.request(key)) as session:
        for layer in range(64):
            assert session.read(pages.layer(layer), HostAccess()) == (OK,)

    assert (pages.memory[:, 1] == pages.memory[:, 0]).all()
    # The header with layer 0, layers 1 and 2, and then 1, 2, 4, 8, 16 and the rest.
    assert len(proxy.asked) - before == 3 + 6


def test_no_call_has_more_bytes_in_memory_than_it_may(open_store: OpenStore, proxy: Proxy) -> None:
    pages = LayeredPages(64, 30 << 10)
    (key,) = object_keys(1)
    store = open_store(proxy.port, call_bytes=1 << 20)
    store.write([pages.batch(key)], HostAccess(), may_publish=allow)
    answered: list[int] = []
    proxy.after = lambda _, answer: answered.append(len(answer.body))

    with store.open_read(pages.request(key)) as session:
        assert session.read(pages.target, HostAccess()) == (OK,)

    assert max(answered) <= 1 << 20
    assert sum(answered) == header_bytes(64) + 64 * (30 << 10)
    assert (pages.memory[:, 1] == pages.memory[:, 0]).all()
