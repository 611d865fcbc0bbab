"""Soak: processes on one server that are killed, while the server dies, hangs and loses connections.

The long form runs for ten minutes; KVLINKER_SOAK_SECONDS says otherwise.
"""

from __future__ import annotations

import logging
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from http_proxy import proxy_to
from million_files import put_files
from s3_server import OpenStore, S3Server
from soaked_s3 import soaked_directory, soaked_s3

import kvlinker_s3
from kvlinker.testing.many_objects import ManyObjects
from kvlinker.testing.shelves import Shelf
from kvlinker.testing.soak import SoakPlan, run_soak
from kvlinker.testing.soak_checks import USUAL_ANSWERS, check_report, check_what_is_left
from kvlinker.testing.store_row_tests import interleave

_log = logging.getLogger(__name__)

SOAK_SECONDS = float(os.environ.get("KVLINKER_SOAK_SECONDS", "600"))
SHORT = SoakPlan(
    seconds=9,
    calls=120,
    processes=2,
    users=1,
    page_bytes=(640, 12 << 10),
    numbers=6,
    kills=2,
    stops=1,
    outages=4,
)
SHORT_ALONE = replace(SHORT, seconds=2, calls=150, kills=3, outages=0)
LONG_ALONE = replace(SoakPlan.long(SOAK_SECONDS / 5), outages=0)


@pytest.fixture(autouse=True)
def one_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opening begins new threads: with heaps of their own, what they freed would look like a leak."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(SHORT, id="short"),
        pytest.param(SoakPlan.long(SOAK_SECONDS), id="long", marks=pytest.mark.soak),
    ],
)
def test_b71_b72_b87_processes_on_a_server_that_comes_and_goes_see_right_bytes_or_none(
    own_server: S3Server, tmp_path: Path, plan: SoakPlan
) -> None:
    with proxy_to(own_server.port) as proxy:
        target = soaked_s3(own_server, proxy)
        # A short one makes so few calls that not every answer comes.
        answers = ("error", "written", "read miss") if plan is SHORT else USUAL_ANSWERS

        report = run_soak(target, tmp_path, plan, answers=answers)

        _log.info("%s", report)
        check_report(report, plan, answers=answers)
        check_what_is_left(lambda: kvlinker_s3.open_store(target.config), report, plan)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(SHORT_ALONE, id="short"),
        pytest.param(LONG_ALONE, id="long", marks=pytest.mark.soak),
    ],
)
def test_b71_b72_processes_that_are_killed_leave_whole_objects_in_a_directory(
    tmp_path: Path, plan: SoakPlan
) -> None:
    target = soaked_directory(tmp_path / "objects")
    answers = [*USUAL_ANSWERS, "layer ok"]

    report = run_soak(target, tmp_path, plan, answers=answers)

    _log.info("%s", report)
    check_report(report, plan, answers=answers)
    assert report.errors == 0
    assert check_what_is_left(lambda: kvlinker_s3.open_store(target.config), report, plan) > 0


@pytest.mark.soak
def test_b71_ten_thousand_calls_in_random_order_see_whole_objects_or_none(
    server: S3Server, open_store: OpenStore
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)

    interleave(Shelf(open_store(server.port)), calls=10_000, seed=seed)


@pytest.mark.parametrize(
    "count", [pytest.param(8192, id="short"), pytest.param(1_000_000, marks=pytest.mark.soak)]
)
def test_b76_a_million_objects_in_a_directory_are_found_read_and_cleared(
    tmp_path: Path, count: int
) -> None:
    objects = ManyObjects()
    store = kvlinker_s3.open_store({"url": tmp_path.as_uri(), "prefix": "many"})
    calls = list(objects.calls(count))
    objects.write(store, calls[0][:2])

    put_files(tmp_path / "many", objects, count)

    began = time.perf_counter()
    assert sum(sum(store.exists(keys)) for keys in calls[-4:]) == sum(map(len, calls[-4:]))
    rate = sum(map(len, calls[-4:])) / (time.perf_counter() - began)
    _log.info("%d objects in a directory: %.0f found in a second", count, rate)
    for keys in (calls[0], calls[-1]):
        objects.check(store, keys)
    assert store.clear(objects.namespace) == count
    assert store.stats().objects == 0
    store.close()
