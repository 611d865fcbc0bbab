"""A soak does everything with a store, and notices what must not be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvlinker.store import ObjectKey
from kvlinker.testing import MemoryStore
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker.testing.soak import Outage, SoakPlan, SoakReport, SoakTarget, run_soak
from kvlinker.testing.soak_checks import USUAL_ANSWERS, check_report, check_what_is_left
from kvlinker.testing.soak_keys import Family, SoakKeys
from kvlinker.testing.soak_plants import Plant

SHORT = SoakPlan(seconds=2, calls=600, processes=2, numbers=12, kills=3, stops=1, outages=2)
ENDLESS = SoakPlan(seconds=60, processes=1, users=1)


def soaked_memory(away: Path) -> SoakTarget:
    """Return memory, one for each process, that a file makes unreachable."""
    return SoakTarget(
        module="soaked_memory",
        config={"away": str(away)},
        outages=(Outage(name="away", begin=away.touch, end=away.unlink),),
    )


@pytest.fixture
def away(tmp_path: Path) -> Path:
    return tmp_path / "away"


@pytest.fixture
def target(away: Path) -> SoakTarget:
    return soaked_memory(away)


def test_a_soak_that_was_too_short_goes_on_until_someone_had_every_answer(
    target: SoakTarget, tmp_path: Path
) -> None:
    report = run_soak(target, tmp_path, replace(ENDLESS, seconds=0.01), answers=USUAL_ANSWERS)

    check_report(report, ENDLESS)


def test_a_soak_kills_stops_and_cuts_off_and_ends_in_time(
    target: SoakTarget, away: Path, tmp_path: Path
) -> None:
    answers = [*USUAL_ANSWERS, "error", "layer ok", "held"]

    report = run_soak(target, tmp_path, SHORT, answers=answers)

    check_report(report, SHORT, answers=answers)
    assert report.errors > 0
    assert report.outages == {"away": 2}
    assert report.processes > SHORT.processes
    assert SHORT.seconds <= report.seconds < 60
    assert not away.exists()


def test_errors_of_which_no_finished_round_tells_are_answers_too(
    target: SoakTarget, away: Path, tmp_path: Path
) -> None:
    away.touch()

    report = run_soak(target, tmp_path, replace(ENDLESS, page_bytes=(640,)))  # no round ever begins

    assert report.counts["error"] == report.errors > 0


@pytest.mark.parametrize(
    ("plant", "violation"),
    [
        (Plant.LIE, "left wrong bytes"),
        (Plant.RESURRECT, "it was deleted or never stored"),
        (Plant.ERROR, "raised StoreError: planted; no server was away"),
        (Plant.DESCRIPTOR, "descriptors are open"),
        (Plant.THREAD, "threads run"),
        (Plant.MEMORY, "memory grew from"),
        (Plant.HANG, "said nothing for"),
        (Plant.CRASH, "ended with -11"),
    ],
    ids=lambda value: value.value if isinstance(value, Plant) else "",
)
def test_a_soak_notices_what_is_planted(
    target: SoakTarget, tmp_path: Path, plant: Plant, violation: str
) -> None:
    silence = 1 if plant is Plant.HANG else 60
    plan = replace(ENDLESS, plant=plant, silence_seconds=silence, page_bytes=(640,))

    report = run_soak(target, tmp_path, plan)

    assert any(violation in found for found in report.violations), report
    with pytest.raises(AssertionError, match="process 0"):
        check_report(report, plan)


def test_what_a_store_lets_go_of_late_must_not_grow_all_the_same(
    target: SoakTarget, tmp_path: Path
) -> None:
    plan = replace(ENDLESS, plant=Plant.DESCRIPTOR, page_bytes=(640,))

    report = run_soak(replace(target, lets_go_late=True), tmp_path, plan)

    assert any("open descriptors grew from" in found for found in report.violations), report


# ---- what is left -----------------------------------------------------------------------------

KEYS = SoakKeys(kinds=1, numbers=40)
PLAN = SoakPlan(seconds=1, page_bytes=(640,))


def a_report(store: MemoryStore, keys: Sequence[ObjectKey]) -> SoakReport:
    """Store some objects, and return what a soak without any call says."""
    Shelf(store).stock(keys)
    plan = replace(PLAN, seconds=1e-9, processes=2)
    return run_soak(soaked_memory(Path("nowhere")), Path(), plan)


def test_what_is_left_is_read_and_removed() -> None:
    store = MemoryStore()
    report = a_report(store, [*KEYS.shared(Family.STABLE, 0)[:3], *KEYS.own("1.1", 0, 5)[:2]])

    assert check_what_is_left(lambda: store, report, PLAN) == 3

    assert store.stats().objects == 0


def test_wrong_bytes_and_strangers_are_noticed_when_it_is_over() -> None:
    store = MemoryStore()
    report = a_report(store, KEYS.shared(Family.VOLATILE, 0)[:1])
    Shelf(store, seed=b"other").stock(KEYS.shared(Family.STABLE, 0)[:1])

    with pytest.raises(AssertionError, match="left wrong bytes"):
        check_what_is_left(lambda: store, report, PLAN)

    stranger = MemoryStore()
    a_report(stranger, object_keys(2))
    with pytest.raises(AssertionError, match="2 objects are left"):
        check_what_is_left(lambda: stranger, report, PLAN)


def test_a_soak_in_which_nothing_happened_is_none() -> None:
    report = a_report(MemoryStore(), [])

    with pytest.raises(AssertionError, match="nobody was ever answered"):
        check_report(report, PLAN)
