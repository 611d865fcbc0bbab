"""Soak: processes on one cluster that are killed, while its master and its memory die and hang.

The long forms run for KVLINKER_SOAK_SECONDS, ten minutes unless said otherwise.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from mooncake_cluster import MooncakeCluster, OpenStore
from soaked_mooncake import soaked_mooncake

import kvlinker_mooncake
from kvlinker.store import ReadStatus
from kvlinker.testing.shelves import Shelf
from kvlinker.testing.soak import SoakPlan, run_soak
from kvlinker.testing.soak_checks import USUAL_ANSWERS, check_report, check_what_is_left
from kvlinker.testing.store_row_tests import interleave

_log = logging.getLogger(__name__)

SOAK_SECONDS = float(os.environ.get("KVLINKER_SOAK_SECONDS", "600"))
SHORT = SoakPlan(
    seconds=8, calls=60, processes=2, users=1, numbers=6, kills=1, outages=2, page_bytes=(640, 4096)
)
LONG = SoakPlan.long(SOAK_SECONDS)
IMPATIENT = {"answer_seconds": 2.0}
"""Less than a master is frozen at most, so that calls are left behind."""
soak = pytest.mark.soak


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        pytest.param({"staged": True}, SHORT, id="staged-short"),
        pytest.param({"staged": True, **IMPATIENT}, LONG, id="staged-long", marks=soak),
        pytest.param({"reads": "ranged", **IMPATIENT}, LONG, id="direct-long", marks=soak),
    ],
)
def test_b71_b72_b87_processes_on_a_cluster_that_comes_and_goes_see_right_bytes_or_none(
    patient_cluster: MooncakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: Mapping[str, object],
    plan: SoakPlan,
) -> None:
    # Each opening begins new threads of the client; with heaps of their own, what they freed would look like a leak.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    target = soaked_mooncake(patient_cluster, options)
    # A short one makes so few calls that not every answer comes.
    answers = ("written", "read miss") if plan.calls else (*USUAL_ANSWERS, "error")

    report = run_soak(target, tmp_path, plan, answers=answers)

    _log.info("%s", report)
    check_report(report, plan, answers=answers)
    check_what_is_left(lambda: kvlinker_mooncake.open_store(target.config), report, plan)


@soak
@pytest.mark.parametrize("options", [{"staged": True}, {"reads": "ranged"}], ids=str)
def test_b71_ten_thousand_calls_in_random_order_see_whole_objects_or_none(
    open_quickly: OpenStore, options: Mapping[str, object]
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)

    # Leases are short here: a read that takes longer fails, and says so.
    statuses = frozenset({ReadStatus.OK, ReadStatus.MISS, ReadStatus.FAILED})
    interleave(Shelf(open_quickly(**options)), calls=10_000, seed=seed, statuses=statuses)
