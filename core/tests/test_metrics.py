"""Counters close: every token that was looked up ends in exactly one reason."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from kvlinker.metrics import LinkerMetrics, PoolTraffic, TokenOutcome


def test_l11_a_token_is_open_until_it_is_settled() -> None:
    metrics = LinkerMetrics()
    metrics.look_up(10)
    metrics.settle(TokenOutcome.LANDED, 4)

    counted = metrics.snapshot()

    assert counted.tokens_looked_up == 10
    assert counted.tokens_open == 6
    assert counted.tokens[TokenOutcome.LANDED] == 4
    assert set(counted.tokens) == set(TokenOutcome)
    assert counted.closes


def test_l11_a_miss_names_its_pool() -> None:
    metrics = LinkerMetrics()
    metrics.look_up(7)
    metrics.settle(TokenOutcome.MISS, 3, pool="kv")
    metrics.settle(TokenOutcome.MISS, 4, pool="swa")

    counted = metrics.snapshot()

    assert counted.misses_by_pool == {"kv": 3, "swa": 4}
    assert counted.tokens_open == 0


def test_l11_a_token_that_is_settled_twice_shows() -> None:
    metrics = LinkerMetrics()
    metrics.look_up(2)
    metrics.settle(TokenOutcome.LANDED, 2)
    metrics.settle(TokenOutcome.CANCELLED, 2)

    assert not metrics.snapshot().closes


def test_a_snapshot_does_not_change() -> None:
    metrics = LinkerMetrics()
    metrics.count("lookups")
    before = metrics.snapshot()
    metrics.count("lookups", 2)

    assert before.events == {"lookups": 1}
    assert metrics.snapshot().events == {"lookups": 3}


def test_counters_of_several_threads_add_up() -> None:
    metrics = LinkerMetrics()

    def work(_: int) -> None:
        metrics.look_up(3)
        metrics.settle(TokenOutcome.FAILED, 2)
        metrics.count("loads")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(200)))

    counted = metrics.snapshot()
    assert (counted.tokens_looked_up, counted.tokens_open) == (600, 200)
    assert counted.events["loads"] == 200


def test_bytes_and_seconds_are_counted_for_each_pool() -> None:
    metrics = LinkerMetrics()
    metrics.load("kv", 10, 0.5)
    metrics.load("kv", 20, 0.25)
    metrics.offload("swa", 7, 2.0)

    counted = metrics.snapshot()

    assert counted.pools["kv"] == PoolTraffic(load_bytes=30, load_seconds=0.75)
    assert counted.pools["swa"] == PoolTraffic(offload_bytes=7, offload_seconds=2.0)
    assert counted.events == {"load_bytes": 30, "offload_bytes": 7}
