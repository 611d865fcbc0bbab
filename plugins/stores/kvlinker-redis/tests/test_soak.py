"""Soak: processes on one server that are killed, while the server dies, hangs, cuts connections and runs full.

The long form runs for ten minutes; KVLINKER_SOAK_SECONDS says otherwise.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from million_values import MillionValues
from redis_server import RedisServer
from soaked_redis import soaked_redis

import kvlinker_redis
from kvlinker.testing.shelves import Shelf
from kvlinker.testing.soak import SoakPlan, run_soak
from kvlinker.testing.soak_checks import USUAL_ANSWERS, check_report, check_what_is_left
from kvlinker.testing.store_row_tests import interleave
from kvlinker_redis import RedisStore

_log = logging.getLogger(__name__)

SOAK_SECONDS = float(os.environ.get("KVLINKER_SOAK_SECONDS", "600"))
SHORT = SoakPlan(seconds=10, calls=600, kills=4, stops=1, outages=4)
MEMORY = "4mb"
SETTLED_BYTES = 4 << 20
"""What a server without objects may have taken more than before the soak: buffers of clients, fragments."""


def memory_of(server: RedisServer) -> int:
    """Return the bytes that a server uses."""
    with server.client() as client:
        info: object = client.info("memory")
    assert isinstance(info, dict)
    return int(info["used_memory"])


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(SHORT, id="short"),
        pytest.param(SoakPlan.long(SOAK_SECONDS), id="long", marks=pytest.mark.soak),
    ],
)
def test_b71_b72_b87_processes_on_a_server_that_comes_and_goes_see_right_bytes_or_none(
    make_server: Callable[..., RedisServer], tmp_path: Path, plan: SoakPlan
) -> None:
    server = make_server("--maxmemory", MEMORY, "--maxmemory-policy", "allkeys-lru")
    empty = memory_of(server)
    target = soaked_redis(server)

    answers = [*USUAL_ANSWERS, "error", "layer ok", "later ok"]

    report = run_soak(target, tmp_path, plan, answers=answers)

    _log.info("%s", report)
    check_report(report, plan, answers=answers)
    # How much is left is not certain: a server that is started anew has nothing.
    check_what_is_left(lambda: kvlinker_redis.open_store(target.config), report, plan)
    assert memory_of(server) < empty + SETTLED_BYTES
    assert report.peak_descriptors < 32


@pytest.mark.soak
def test_b71_ten_thousand_calls_in_random_order_see_whole_objects_or_none(
    server: RedisServer, open_store: Callable[..., RedisStore]
) -> None:
    interleave(
        Shelf(open_store(server)), calls=10_000, seed=random.SystemRandom().randrange(1 << 30)
    )


@pytest.mark.parametrize(
    "count", [pytest.param(20_000, id="short"), pytest.param(1_000_000, marks=pytest.mark.soak)]
)
def test_b76_a_million_objects_are_found_counted_read_and_cleared(
    make_server: Callable[..., RedisServer],
    open_store: Callable[..., RedisStore],
    prefix: str,
    count: int,
) -> None:
    server = make_server()
    empty = memory_of(server)
    values = MillionValues(open_store(server, answer_seconds=60), server, prefix)

    values.store(count)

    bytes_each = (memory_of(server) - empty) / count
    assert values.count() == count
    began = time.perf_counter()
    assert values.found(count) == count
    rate = count / (time.perf_counter() - began)
    _log.info(
        "%d objects: %.0f B each on the server, %.0f found in a second", count, bytes_each, rate
    )
    values.check_some_bytes(count)
    assert values.clear() == count
    assert values.count() == 0
