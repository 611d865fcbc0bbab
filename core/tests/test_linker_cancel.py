"""Cancelling and aborting leave nothing behind, and a request id can be used again at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from linker_rig import PATIENT, Rig, linked, prompts, tokens_of, wait_for

from kvlinker.metrics import TokenOutcome
from kvlinker.testing import Call, Family, Gate, Hang, Raise, Rule, page_keys

KEYS = page_keys(4)
TOKENS = 4 * 4


def test_l6_cancelling_a_queued_load_releases_everything() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))
        assert rig.linker.load("a", rig.transfers(KEYS, 4))

        assert rig.linker.cancel_queued_load("a") is True

        rig.assert_at_rest()
        assert tokens_of(rig.linker) == {TokenOutcome.CANCELLED: TOKENS}
        assert rig.linker.start_layer_wise_loading() == -1
        assert rig.access.writes_since(0) == ()


@pytest.mark.parametrize("rid", ["b", "", None, 3])
def test_l6_cancelling_what_is_not_queued_is_false(rid: object) -> None:
    with linked() as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))

        assert rig.linker.cancel_queued_load(rid) is False  # type: ignore[arg-type]  # engines without types
        assert rig.linker.cancel_queued_load("a") is False


def test_l6_cancelling_twice_is_false_the_second_time() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        assert rig.linker.load("a", rig.transfers(KEYS, 4))

        assert rig.linker.cancel_queued_load("a")
        assert not rig.linker.cancel_queued_load("a")


def test_l6_b52_dh11_after_the_start_cancel_is_false_and_the_rows_are_filled() -> None:
    with linked() as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.READ, fault=Hang(gate=gate), first=2))
        index = rig.start("a", KEYS)
        gate.wait_for_arrivals()

        assert rig.linker.cancel_queued_load("a") is False
        gate.open()
        assert rig.linker.finish_layer_wise_loading(index)

        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()
        rig.assert_at_rest()


def test_b52_dh11_what_was_cancelled_is_never_filled_and_never_reported_as_filled() -> None:
    with linked() as rig:
        first, second = prompts(2, 2)
        rig.keep(first)
        rig.keep(second)
        before = rig.pools.memory.snapshot()
        for rid, keys, page in (("a", first, 4), ("b", second, 8)):
            rig.linker.lookup(rid, rig.asked(keys))
            assert rig.linker.load(rid, rig.transfers(keys, page))
        assert rig.linker.cancel_queued_load("a")

        index = rig.linker.start_layer_wise_loading()
        assert rig.linker.finish_layer_wise_loading(index)

        assert rig.pools.wrong_pages(rig.transfers(second, 8)) == ()
        rig.pools.memory.poison()
        rig.pools.fill(rig.transfers(second, 8))
        expected = rig.pools.memory.snapshot()
        rig.pools.memory.poison()
        assert rig.pools.memory.snapshot() == before
        assert rig.restore("b", second, page=8)
        assert rig.pools.memory.snapshot() == expected


def test_l6_cancelling_the_only_queued_load_leaves_others_that_run() -> None:
    with linked() as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.READ, fault=Hang(gate=gate)))
        index = rig.start("a", KEYS)
        gate.wait_for_arrivals()
        rig.linker.lookup("a", rig.asked(KEYS))
        assert rig.linker.load("a", rig.transfers(KEYS, 8))

        assert rig.linker.cancel_queued_load("a")

        gate.open()
        assert rig.linker.finish_layer_wise_loading(index)
        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()
        rig.assert_at_rest()


def after_lookup(rig: Rig) -> None:
    """Drop the request, so that the linker never hears of it."""
    rig.linker.lookup("a", rig.asked(KEYS))


def after_load(rig: Rig) -> None:
    """Cancel the request while its load is queued."""
    after_lookup(rig)
    assert rig.linker.load("a", rig.transfers(KEYS, 4))
    assert rig.linker.cancel_queued_load("a")


def after_start(rig: Rig) -> None:
    """Abort the request while its load runs."""
    index = rig.start("a", KEYS)
    assert not rig.linker.cancel_queued_load("a")
    assert rig.linker.finish_layer_wise_loading(index)


def after_finish(rig: Rig) -> None:
    """Abort the request when its load has landed."""
    assert rig.restore("a", KEYS)


def after_failure(rig: Rig) -> None:
    """Let the load fail."""
    rig.store.script.add(Rule(call=Call.READ, fault=Raise(error=OSError("gone")), times=1))
    assert not rig.restore("a", KEYS)


def after_reset(rig: Rig) -> None:
    """Flush the cache with a load queued."""
    after_lookup(rig)
    assert rig.linker.load("a", rig.transfers(KEYS, 4))
    rig.linker.reset()


@pytest.mark.parametrize(
    "abort", [after_lookup, after_load, after_start, after_finish, after_failure, after_reset]
)
def test_l6_after_an_abort_at_any_stage_the_request_id_can_be_used_at_once(
    abort: Callable[[Rig], None],
) -> None:
    options = replace(PATIENT, quarantine_seconds=0.001, hold_seconds=0.001)
    with linked(options=options) as rig:
        rig.keep(KEYS)
        abort(rig)
        wait_for(lambda: rig.linker.lookup("a", rig.asked(KEYS)) != [], "the end of the pause")

        assert rig.restore("a", KEYS, page=8)

        assert rig.pools.wrong_pages(rig.transfers(KEYS, 8)) == ()
        rig.assert_at_rest()


@pytest.mark.parametrize(
    "abort", [after_lookup, after_load, after_start, after_finish, after_reset]
)
def test_l6_after_an_abort_at_any_stage_every_table_is_empty(abort: Callable[[Rig], None]) -> None:
    with linked(options=replace(PATIENT, hold_seconds=0.05)) as rig:
        rig.keep(KEYS)
        abort(rig)

        wait_for(lambda: rig.linker.pending == 0, "the expiry of what nobody came for")
        rig.assert_at_rest()


def test_l6_l11_hundreds_of_aborts_leave_nothing() -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS)
        stages = [after_load, after_start, after_finish, after_reset]
        for number in range(400):
            stages[number % 4](rig)

        rig.linker.reset()
        rig.assert_at_rest()
        assert sum(tokens_of(rig.linker).values()) == 400 * TOKENS
