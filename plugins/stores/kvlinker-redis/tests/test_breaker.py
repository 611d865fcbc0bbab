"""The breaker: refuses for a while, then lets one call try."""

from __future__ import annotations

from kvlinker_redis.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_t6_an_open_breaker_refuses_until_its_pause_is_over_and_then_lets_one_call_try() -> None:
    clock = Clock()
    breaker = Breaker(pause_seconds=10, clock=clock)
    answers = [breaker.may_ask()]

    breaker.open()
    clock.now = 9.9
    answers += [breaker.may_ask()]
    clock.now = 10.0
    answers += [breaker.may_ask(), breaker.may_ask()]
    breaker.close()
    answers += [breaker.may_ask(), breaker.may_ask()]

    assert answers == [True, False, True, False, True, True]


def test_t6_a_trial_that_never_ends_is_followed_by_another_one() -> None:
    clock = Clock()
    breaker = Breaker(pause_seconds=10, clock=clock)
    breaker.open()
    clock.now = 10.0
    assert breaker.may_ask()

    clock.now = 20.0

    assert breaker.may_ask()
