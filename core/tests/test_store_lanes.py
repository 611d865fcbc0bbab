"""Tests of store lanes: a direction that was given up is not asked again for a while, and one that was closed never."""

from __future__ import annotations

import pytest

from kvlinker.errors import StoreClosedError, StoreTimeoutError
from kvlinker.store_lanes import StoreLane


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lane(clock: Clock) -> StoreLane:
    return StoreLane("store, loads", pause_seconds=10.0, clock=clock)


def test_t6_a_direction_that_was_given_up_is_not_asked_until_its_pause_is_over(
    lane: StoreLane, clock: Clock
) -> None:
    asked: list[float] = []
    lane.give_up()

    for _ in range(3):
        with pytest.raises(StoreTimeoutError, match=r"store, loads: .* is not asked again yet"):
            lane.guarded(lambda: asked.append(clock.now))
        with pytest.raises(StoreTimeoutError, match="is not asked again yet"):
            lane.check_up()
    clock.now += 11.0
    lane.check_up()
    lane.guarded(lambda: asked.append(clock.now))

    assert asked == [111.0]
    lane.check_up()


def test_t6_an_answer_to_a_call_that_was_given_up_does_not_count(lane: StoreLane) -> None:
    lane.guarded(lane.give_up)

    with pytest.raises(StoreTimeoutError):
        lane.check_up()


def test_a_direction_that_was_closed_refuses_every_call(lane: StoreLane) -> None:
    lane.close()
    lane.close()

    for call in (lane.check_open, lane.check_up, lambda: lane.guarded(lambda: None)):
        with pytest.raises(StoreClosedError, match="store, loads: the store was closed"):
            call()


def test_a_call_that_fails_since_it_was_closed_under_it_says_so(lane: StoreLane) -> None:
    def fail() -> None:
        lane.close()
        msg = "bad file descriptor"
        raise OSError(msg)

    with pytest.raises(StoreClosedError):
        lane.guarded(fail)
