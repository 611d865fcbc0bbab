"""Cleanup releases what stores hold, whatever they do at it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from linker_rig import threads_named, wait_for

from kvlinker.cleanup import Cleanup
from kvlinker.failures import FailureLog
from kvlinker.metrics import LinkerMetrics
from kvlinker.testing import Gate


class Place:
    """A cleanup and what it counted."""

    def __init__(self, *, seconds: float = 30.0) -> None:
        self.metrics = LinkerMetrics()
        self.cleanup = Cleanup(FailureLog("Store", self.metrics), seconds=seconds)

    @property
    def errors(self) -> int:
        return self.metrics.snapshot().events.get("release_errors", 0)


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.cleanup.close(30)


def test_l3_releases_happen_soon_and_in_order(place: Place) -> None:
    done: list[int] = []

    taken = [place.cleanup.later(partial(done.append, number)) for number in range(9)]

    assert taken == [True] * 9
    wait_for(lambda: done == list(range(9)), "the releases")


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_l3_a_release_that_fails_is_counted_and_stops_no_other(
    place: Place, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error

    done: list[int] = []

    place.cleanup.now(fail)
    place.cleanup.later(fail)
    place.cleanup.later(lambda: done.append(1))

    wait_for(lambda: done == [1], "the last release")
    assert place.errors == 2


def test_l3_releases_that_hang_are_left_behind_up_to_a_bound() -> None:
    place = Place(seconds=0.001)
    with Gate() as gate:
        wait_for(lambda: not place.cleanup.later(gate.pass_through), "the bound")

        assert gate.arrived <= 8
    wait_for(lambda: place.cleanup.later(lambda: None), "the return of a thread")
    place.cleanup.close(30)


def test_l10_closing_lets_queued_releases_run() -> None:
    place, done = Place(), list[int]()
    place.cleanup.later(lambda: done.append(1))

    assert place.cleanup.close(30)
    place.cleanup.close(30)

    assert done == [1]
    assert not place.cleanup.later(lambda: done.append(2))
    wait_for(lambda: not threads_named("kvlinker-cleanup"), "the end of the thread")
    assert done == [1]


def test_l3_what_was_taken_runs_also_while_it_closes() -> None:
    place, done, taken = Place(), list[int](), list[bool]()

    def refused() -> bool:
        taken.append(place.cleanup.later(lambda: done.append(1)))
        return not taken[-1]

    with ThreadPoolExecutor(1) as pool, Gate() as gate:
        place.cleanup.later(gate.pass_through)
        gate.wait_for_arrivals()
        closing = pool.submit(place.cleanup.close, 30)
        wait_for(refused, "the close")
        gate.open()

        assert closing.result()

    assert len(done) == taken.count(True)


def test_l10_closing_does_not_wait_for_a_release_that_hangs() -> None:
    place = Place()
    with Gate() as gate:
        place.cleanup.later(gate.pass_through)
        gate.wait_for_arrivals()

        assert not place.cleanup.close(0.01)

        assert not gate.is_open
