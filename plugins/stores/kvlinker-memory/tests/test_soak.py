"""Soak: processes that share memory, and are killed one by one and all together.

The long form runs for a fifth of KVLINKER_SOAK_SECONDS, which is ten minutes unless said otherwise.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

import kvlinker_memory
from kvlinker.testing.soak import SoakPlan, SoakTarget, run_soak
from kvlinker.testing.soak_checks import USUAL_ANSWERS, check_report, check_what_is_left

_log = logging.getLogger(__name__)

SOAK_SECONDS = float(os.environ.get("KVLINKER_SOAK_SECONDS", "600")) / 5
LONG = replace(SoakPlan.long(SOAK_SECONDS), outages=0)
"""There is no server that could be away."""
SHORT = SoakPlan(seconds=2, calls=300, processes=2, numbers=12, kills=3, stops=1)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(SHORT, id="short"),
        pytest.param(LONG, id="long", marks=pytest.mark.soak),
    ],
)
def test_b71_b72_processes_that_are_killed_leave_whole_objects_to_the_others(
    in_memory: Path, tmp_path: Path, plan: SoakPlan
) -> None:
    # So small that objects are evicted.
    config = {"path": str(in_memory / "store"), "capacity": "4MiB"}
    target = SoakTarget(module="kvlinker_memory", config=config)
    answers = [*USUAL_ANSWERS, "layer ok", "held"]

    report = run_soak(target, tmp_path, plan, answers=answers)

    _log.info("%s", report)
    check_report(report, plan, answers=answers)
    assert report.errors == 0
    assert report.counts["held and lost"] == 0
    check_what_is_left(lambda: kvlinker_memory.open_store(target.config), report, plan)
