"""What a server does at the worst moment: it refuses, or is emptied, between two requests of one call."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
from http_proxy import Answer, Asked, Proxy
from obstore.store import ObjectStore
from s3_server import BUCKET, OpenStore, settings_for

import kvlinker_s3
from kvlinker.errors import StoreError, StoreTimeoutError
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker_s3 import S3StoreOptions, lanes
from kvlinker_s3.lanes import Lane
from kvlinker_s3.state import StoreState
from kvlinker_s3.writing import S3Write

OK, MISS = ReadStatus.OK, ReadStatus.MISS
WRITTEN = WriteStatus.WRITTEN


def error_of(code: str, status: int) -> Answer:
    return Answer(status=status, body=f"<Error><Code>{code}</Code></Error>".encode())


def test_keys_that_are_withdrawn_between_two_layers_are_an_error_and_cost_no_object(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy.port))
    keys = object_keys(3)
    shelf.stock(keys)

    with shelf.open(keys) as session:
        before = shelf.read(keys, session=session, layer=0)
        with (
            proxy.troubled(before=lambda _: error_of("AccessDenied", 403)),
            pytest.raises(StoreError, match="the server refuses") as caught,
        ):
            shelf.read(keys, session=session, layer=1)

    assert before == (OK,) * 3
    assert "sesame" not in str(caught.value)
    assert shelf.read(keys) == (OK,) * 3


def test_writes_that_are_refused_in_the_midst_fail_alone_and_raise_nothing(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy.port, concurrency=1))
    keys, puts = object_keys(4), itertools.count()

    def refuse_later(asked: Asked) -> Answer | None:
        is_late = asked.method == "PUT" and next(puts) >= 2
        return error_of("AccessDenied", 403) if is_late else None

    with proxy.troubled(before=refuse_later):
        statuses = shelf.write(keys)

    assert statuses == (WRITTEN, WRITTEN, WriteStatus.FAILED, WriteStatus.FAILED)
    assert next(puts) == 3  # behind the one that is refused, no other is asked for
    assert shelf.store.exists(keys) == (True, True, False, False)
    assert shelf.write(keys[2:]) == (WRITTEN, WRITTEN)


def test_a_bucket_that_vanishes_under_a_store_is_misses_and_failed_writes(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy.port))
    keys, others = object_keys(3), object_keys(2, chain="others")
    shelf.stock(keys)

    with shelf.open(keys) as session:
        shelf.read(keys, session=session, layer=0)
        with proxy.troubled(before=lambda _: error_of("NoSuchBucket", 404)):
            read = shelf.read(keys, session=session, layer=1)
            written = shelf.write(others)
            with pytest.raises(StoreError, match="make the bucket, or mend url"):
                shelf.store.stats()

    assert read == (MISS,) * 3
    assert written == (WriteStatus.FAILED,) * 2
    assert shelf.read(keys) == (OK,) * 3


def test_a_clock_that_is_wrong_is_said_to_be(open_store: OpenStore, proxy: Proxy) -> None:
    proxy.before = lambda _: error_of("RequestTimeTooSkewed", 403)

    with pytest.raises(StoreError, match="set this machine's clock"):
        open_store(proxy.port)


@pytest.mark.parametrize("total", ["*", "0", "10", "99999999999999999999"])
def test_t4_a_server_that_makes_up_lengths_is_refused_and_costs_no_object(
    open_store: OpenStore, proxy: Proxy, total: str
) -> None:
    shelf = Shelf(open_store(proxy.port))
    keys = object_keys(2)
    shelf.stock(keys)

    def lie(_asked: Asked, answer: Answer) -> None:
        if "content-range" in answer.headers:
            ranged = answer.headers["content-range"].split("/")[0]
            answer.headers["content-range"] = f"{ranged}/{total}"

    with proxy.troubled(after=lie), pytest.raises(StoreError, match="the server "):
        shelf.read(keys)

    assert shelf.read(keys) == (OK, OK)


@pytest.mark.parametrize("status", [200, 206, 302, 400, 409, 412, 418])
def test_t4_a_page_of_somebody_in_the_place_of_every_answer_is_an_error(
    open_store: OpenStore, proxy: Proxy, status: int
) -> None:
    shelf = Shelf(open_store(proxy.port))
    keys = object_keys(2)
    shelf.stock(keys)
    page = Answer(status=status, headers={"location": "/login"}, body=b"<html>log in</html>")

    with proxy.troubled(before=lambda _: page), pytest.raises(StoreError):
        shelf.read(keys)
    with proxy.troubled(before=lambda _: page), pytest.raises(StoreError):
        shelf.store.exists(keys)

    assert shelf.store.exists(keys) == (True, True)
    assert shelf.read(keys) == (OK, OK)
    assert shelf.store.stats().counters["corrupt"] == 0


def test_t6_a_listing_that_never_ends_and_lists_nothing_costs_the_deadline(
    open_store: OpenStore, proxy: Proxy
) -> None:
    store = open_store(proxy.port, request_seconds=0.3)
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>1</NextContinuationToken>"
    page = f"<ListBucketResult>{more}</ListBucketResult>"

    with proxy.troubled(before=lambda _: Answer(status=200, body=page.encode())):
        with pytest.raises(StoreTimeoutError, match=r"no page of a listing came within 0.5 s"):
            store.stats()
        asked = len(proxy.asked)

    assert 2 < len(proxy.asked) <= asked + 1  # nobody goes on asking


def test_t6_a_server_that_sends_a_little_now_and_then_costs_the_time_of_a_request(
    proxy: Proxy, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(proxy.port, answer_seconds=30, request_seconds=0.5))
    keys = object_keys(2)
    shelf.stock(keys)

    def drip(_: Asked, answer: Answer) -> None:
        answer.pause_seconds = 0.1

    with (
        proxy.troubled(after=drip),
        pytest.raises(StoreTimeoutError, match="loads: the server cannot be reached"),
    ):
        shelf.read(keys)

    assert shelf.read(keys) == (OK, OK)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_t6_a_server_that_has_too_much_to_do_is_left_alone(
    open_store: OpenStore, proxy: Proxy, status: int
) -> None:
    shelf = Shelf(open_store(proxy.port))
    keys = object_keys(2)
    shelf.stock(keys)

    with (
        proxy.troubled(before=lambda _: Answer(status=status)),
        pytest.raises(StoreTimeoutError, match=f"loads: the server cannot be reached: .*{status}"),
    ):
        shelf.read(keys)

    assert shelf.read(keys) == (OK, OK)


def test_objects_that_cannot_be_removed_together_are_removed_one_by_one(
    open_store: OpenStore, proxy: Proxy
) -> None:
    store = open_store(proxy.port)
    keys = object_keys(3)
    Shelf(store).stock(keys)
    removals = itertools.count()

    def be_gone_once(asked: Asked) -> Answer | None:
        is_removal = asked.method in {"POST", "DELETE"}
        return Answer(status=404) if is_removal and not next(removals) else None

    with proxy.troubled(before=be_gone_once):
        assert store.clear(keys[0][:NAMESPACE_BYTES]) == 3

    assert next(removals) == 1 + 3
    assert store.exists(keys) == (False,) * 3


def test_frames_of_a_write_that_failed_may_still_be_read_and_are_not_used_again(
    proxy: Proxy, prefix: str
) -> None:
    config = {"url": f"s3://{BUCKET}", "settings": settings_for(proxy.port), "prefix": prefix}
    state = StoreState(S3StoreOptions.of_config({**config, "retry_seconds": 0.05}))
    shelf = Shelf(kvlinker_s3.open_store(config))
    write = S3Write(state, [shelf.batch(object_keys(1))])
    places: list[int] = []

    def note() -> bool:
        places.append(write.row(write.works[0], 0).ctypes.data)
        return True

    with proxy.troubled(before=lambda _: Answer(status=503)):
        statuses = write.run(shelf.access, note)
    again = state.framed.blocks.take(64)
    state.writes.close()
    shelf.store.close()

    assert statuses == ((WriteStatus.FAILED,),)
    assert again.ctypes.data != places[0]


def test_what_nobody_waits_for_any_more_is_not_asked_for(tmp_path: Path) -> None:
    lane = Lane(S3StoreOptions(url=tmp_path.as_uri(), concurrency=1), "loads")
    is_begun, may_end = threading.Event(), threading.Event()
    asked: list[int] = []

    def ask(number: int) -> lanes.Asked[None]:
        def answer(_: ObjectStore) -> None:
            asked.append(number)
            if number == 1:
                is_begun.set()
                assert may_end.wait(60)

        return lanes.Asked(requests=[answer], bytes=1)

    answers = lane.stream([ask(number) for number in range(4)], ahead_bytes=10)
    next(answers)
    assert is_begun.wait(60)
    answers.close()
    may_end.set()
    lane.run([lambda _: None] * 2)
    lane.close()

    assert asked == [0, 1]


class CountingLane(Lane):
    """A lane that counts how often it gives its server up."""

    def __init__(self, options: S3StoreOptions) -> None:
        super().__init__(options, "loads")
        self.given_up = 0
        self.has_given_up = threading.Event()

    def give_up(self) -> None:
        super().give_up()
        self.given_up += 1
        self.has_given_up.set()


def test_t6_a_request_that_fails_behind_another_of_its_call_costs_no_second_pause(
    tmp_path: Path,
) -> None:
    lane = CountingLane(S3StoreOptions(url=tmp_path.as_uri()))

    def fail(_: ObjectStore) -> None:
        raise TimeoutError

    def fail_late(client: ObjectStore) -> None:
        assert lane.has_given_up.wait(60)
        fail(client)

    answers = lane.attempt([fail, fail_late])
    lane.close()

    assert [type(answer) for answer in answers] == [StoreTimeoutError] * 2
    assert lane.given_up == 1
