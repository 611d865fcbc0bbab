"""Soak: processes that are killed while they use NIXL, and a peer that dies and hangs meanwhile.

The long forms run for KVLINKER_SOAK_SECONDS, ten minutes unless said otherwise.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from bucket_server import BucketServer
from peer_process import PeerProcess
from soaked_nixl import soaked_bucket, soaked_file, soaked_peer

import kvlinker_nixl
from kvlinker.testing.shelves import Shelf
from kvlinker.testing.soak import SoakPlan, SoakTarget, run_soak
from kvlinker.testing.soak_checks import USUAL_ANSWERS, check_report, check_what_is_left
from kvlinker.testing.store_row_tests import interleave

_log = logging.getLogger(__name__)

SOAK_SECONDS = float(os.environ.get("KVLINKER_SOAK_SECONDS", "600"))
SHORT = SoakPlan(seconds=3, calls=120, processes=2, numbers=12, kills=2, outages=2)
LONG = SoakPlan.long(SOAK_SECONDS)
LONG_ALONE = replace(LONG, processes=1)
"""A folder is open in one process at a time."""
soak = pytest.mark.soak


def soak_it(target: SoakTarget, scratch: Path, plan: SoakPlan, *more: str) -> None:
    """Soak a store, and check what must hold after it."""
    # A short one makes so few calls that not every answer comes.
    answers = [*(("written", "read miss") if plan.calls else USUAL_ANSWERS), *more]

    report = run_soak(target, scratch, plan, answers=answers)

    _log.info("%s", report)
    check_report(report, plan, answers=answers)
    check_what_is_left(lambda: kvlinker_nixl.open_store(target.config), report, plan)


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        pytest.param(
            {"staged": False}, replace(SHORT, processes=1, outages=0, kills=3), id="direct-short"
        ),
        pytest.param({"staged": False}, LONG_ALONE, id="direct-long", marks=soak),
        pytest.param({"staged": True}, LONG_ALONE, id="staged-long", marks=soak),
        pytest.param({"direct_io": True}, LONG_ALONE, id="past-the-page-cache-long", marks=soak),
    ],
)
def test_b71_b72_processes_that_are_killed_leave_whole_objects_in_a_file(
    tmp_path: Path, options: Mapping[str, object], plan: SoakPlan
) -> None:
    target = soaked_file(tmp_path / "store", options)

    soak_it(target, tmp_path, replace(plan, outages=0))


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        pytest.param({"staged": True}, SHORT, id="staged-short"),
        pytest.param({"staged": True}, LONG, id="staged-long", marks=soak),
        pytest.param({"staged": False}, LONG, id="direct-long", marks=soak),
    ],
)
def test_b71_b72_b87_processes_whose_peer_comes_and_goes_see_right_bytes_or_none(
    peer: PeerProcess, tmp_path: Path, options: Mapping[str, object], plan: SoakPlan
) -> None:
    soak_it(soaked_peer(peer, options), tmp_path, plan, "error")


@soak
def test_b71_b72_processes_that_are_killed_leave_whole_objects_in_a_bucket(
    bucket: BucketServer, tmp_path: Path
) -> None:
    plan = replace(SoakPlan.long(SOAK_SECONDS / 5), outages=0)

    soak_it(soaked_bucket(bucket), tmp_path, plan)


@soak
@pytest.mark.parametrize("staged", [False, True])
def test_b71_ten_thousand_calls_in_random_order_see_whole_objects_or_none(
    tmp_path: Path, *, staged: bool
) -> None:
    target = soaked_file(tmp_path, {"staged": staged})
    store = kvlinker_nixl.open_store(target.config)

    interleave(Shelf(store), calls=10_000, seed=random.SystemRandom().randrange(1 << 30))

    store.close()
