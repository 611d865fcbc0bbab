"""What a load may have in memory at a time holds for many short answers as for one long one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from http_proxy import Proxy, proxy_to
from s3_server import BUCKET, S3Server, settings_for

from kvlinker.named_values import Range
from kvlinker.testing.shelves import object_keys
from kvlinker_s3 import S3StoreOptions
from kvlinker_s3.lanes import Lane
from kvlinker_s3.names import Names
from kvlinker_s3.requests import put
from kvlinker_s3.values import S3Values

CALL_BYTES = 1 << 20
KEYS = object_keys(40)


@contextmanager
def values_at(
    proxy: Proxy, prefix: str, value: bytes, call_bytes: int = CALL_BYTES
) -> Iterator[S3Values]:
    """Store a value under each key, and give what reads them through a proxy."""
    config = {"url": f"s3://{BUCKET}", "settings": settings_for(proxy.port), "prefix": prefix}
    options = S3StoreOptions.of_config({**config, "call_bytes": call_bytes})
    names = Names(prefix)
    lane = Lane(options, "loads")
    lane.run([put(name, memoryview(value), replace=True) for name in names.of_objects(KEYS)])
    yield S3Values(lane, names, call_bytes=call_bytes)
    lane.close()


@pytest.mark.parametrize(
    ("layer_bytes", "wanted", "expected"), [(64 << 10, 3, 0), (64 << 10, 1, 2), (4 << 10, 1, 15)]
)
def test_what_is_asked_for_ahead_of_many_objects_is_no_more_than_may_be_in_memory(
    server: S3Server, prefix: str, layer_bytes: int, wanted: int, expected: int
) -> None:
    ranges = [(at * layer_bytes, layer_bytes) for at in range(wanted + expected)]
    answered: list[int] = []
    taken = 0
    with (
        proxy_to(server.port) as proxy,
        values_at(proxy, prefix, bytes(len(ranges) * layer_bytes)) as values,
    ):
        proxy.after = lambda _, answer: answered.append(len(answer.body))

        for one in values.fetch(KEYS, ranges[:wanted], expected=ranges[wanted:]):
            assert sum(answered) - taken <= CALL_BYTES
            taken += layer_bytes * len(one.numbers)

    assert taken == sum(answered) == len(KEYS) * len(ranges) * layer_bytes


@pytest.mark.parametrize(("wanted", "expected"), [(10, 0), (2, 8)])
def test_gaps_that_are_read_along_count_among_what_may_be_in_memory(
    server: S3Server, prefix: str, wanted: int, expected: int
) -> None:
    ranges = [(at * (100 << 10), 1 << 10) for at in range(wanted + expected)]
    answered: list[int] = []
    given = 0
    with (
        proxy_to(server.port) as proxy,
        values_at(proxy, prefix, bytes(1000 << 10)) as values,
    ):
        proxy.after = lambda _, answer: answered.append(len(answer.body))

        # Whoever is slow with the first gets no more than there is room for meanwhile.
        for one in values.fetch(KEYS, ranges[:wanted], expected=ranges[wanted:]):
            given += len(one.numbers)
            if given == len(one.numbers):
                time.sleep(0.3)
                assert sum(answered) <= 2 * CALL_BYTES

    assert given == len(KEYS) * len(ranges)


def test_t4_what_is_guessed_comes_range_by_range_also_where_several_are_asked_for_at_once(
    server: S3Server, prefix: str
) -> None:
    layer_bytes = 56 << 10
    ranges = [(at * layer_bytes, layer_bytes) for at in range(4)]
    with (
        proxy_to(server.port) as proxy,
        values_at(proxy, prefix, bytes(4 * layer_bytes), call_bytes=16 << 20) as values,
    ):
        before = len(proxy.asked)

        fetched = list(values.fetch(KEYS, ranges[:1], expected=ranges[1:]))

        asked = len(proxy.asked) - before

    order = [(one.range, number) for one in fetched for number in one.numbers]
    assert order == [(at, number) for at in range(4) for number in range(len(KEYS))]
    assert asked < len(order)


FAR = 300 << 10
"""So far apart that ranges are requests of their own."""


@pytest.mark.parametrize(
    ("ranges", "lengths"),
    [
        ([(0, 10), (500, 1000)], [10, 500]),
        ([(900, 200), (950, 100)], [100, 50]),
        ([(900, 50), (1200, 100)], [50, 0]),
        ([(0, 10), (1500, 100)], [10, 0]),
        ([(990, 10), (1000, 10)], [10, 0]),
        ([(500, 10), (0, 10), (1200, 10), (505, 10)], [10, 10, 0, 10]),
        ([(2000, 50)], [None]),
        ([(0, 10), (FAR, 10)], [None, None]),
    ],
)
def test_t4_ranges_behind_the_end_of_an_object_have_the_bytes_that_are_there(
    server: S3Server, prefix: str, ranges: list[Range], lengths: list[int | None]
) -> None:
    with proxy_to(server.port) as proxy, values_at(proxy, prefix, bytes(1000)) as values:
        fetched = list(values.fetch(KEYS[:2], ranges))

    found = [[None if view is None else len(view) for view in one.views] for one in fetched]
    assert found == [[length] * 2 for length in lengths]


def test_ranges_stand_where_they_were_asked_for_in_any_order(server: S3Server, prefix: str) -> None:
    content = np.random.default_rng(0).bytes(FAR + 200)
    ranges = [(FAR + 90, 20), (5, 30), (FAR, 100), (20, 1000), (0, 1)]
    with (
        proxy_to(server.port) as proxy,
        values_at(proxy, prefix, content) as values,
    ):
        before = proxy.count("GET")

        views = [one.views[0] for one in values.fetch(KEYS[:1], ranges)]

        assert proxy.count("GET") - before == 2
    found = [None if view is None else bytes(view) for view in views]
    assert found == [content[start : start + size] for start, size in ranges]
