"""Deadlines and resets at any moment of a transfer: what was answered stays true."""

from __future__ import annotations

from dataclasses import replace

import pytest
from linker_rig import PATIENT, Rig, Waiter, linked, wait_for

from kvlinker.linker import LinkerOptions
from kvlinker.testing import Call, Family, Gate, Hang, MemoryStore, Rule, page_keys

KEYS = page_keys(4)
MOMENTS = [0.00001 * 1.2**step for step in range(34)]
"""Seconds, from before the first call of the store to long after the last."""


def impatient(seconds: float) -> LinkerOptions:
    return replace(PATIENT, load_seconds=seconds, offload_seconds=seconds)


def assert_nothing_follows(rig: Rig, mark: int, before: dict[str, bytes]) -> None:
    wait_for(lambda: rig.memory_store.kept() == 0, "the end of the late transfer")
    assert rig.access.writes_since(mark) == ()
    assert rig.pools.memory.snapshot() == before


@pytest.mark.parametrize("family", [Family.DSA, Family.V4])
def test_l5_a_deadline_at_any_moment_of_a_load_leaves_it_filled_or_failed(family: Family) -> None:
    landed = []
    for seconds in (*MOMENTS, 20.0):
        with linked(family, options=impatient(seconds)) as rig:
            rig.keep(KEYS)
            index = rig.start("a", KEYS)
            rig.linker.layer_done_counter.set_consumer(index)
            rig.linker.layer_done_counter.wait_until(1)
            landed.append(rig.linker.finish_layer_wise_loading(index))
            mark, before = rig.access.mark(), rig.pools.memory.snapshot()

            assert not landed[-1] or rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()
            assert_nothing_follows(rig, mark, before)
            rig.assert_at_rest()
    assert landed[-1]


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "one-by-one"])
def test_l7_a_deadline_at_any_moment_of_an_offload_stores_right_bytes_or_none(
    *, atomic: bool
) -> None:
    stored = []
    for seconds in (*MOMENTS, 20.0):
        store = MemoryStore(atomic_batches=atomic)
        with linked(options=impatient(seconds), memory_store=store) as rig:
            rig.offer(KEYS)
            stored.append(rig.completion())
            mark = rig.access.mark()
            rig.pools.memory.poison()  # the engine's page belongs to another request now
            rig.linker.close()
            assert rig.access.reads_since(mark) == ()

        with linked(memory_store=store) as reader:
            found = reader.linker.lookup("a", reader.asked(KEYS))
            assert not stored[-1] or found[-1:] == [4]
            if found:
                assert reader.restore("a", KEYS[: found[-1]])
                assert reader.pools.wrong_pages(reader.transfers(KEYS[: found[-1]], 4)) == ()
    assert stored[-1]


@pytest.mark.parametrize("calls", range(10))
def test_l5_a_reset_before_any_call_of_the_store_leaves_nothing(calls: int) -> None:
    """A DSA batch makes eight calls: two sessions opened, six reads."""
    with linked(options=replace(PATIENT, quiesce_seconds=0.01)) as rig:
        rig.keep(KEYS)
        with Gate() as gate:
            hang = Hang(gate=gate)
            if calls < 2:
                rig.store.script.add(Rule(call=Call.OPEN_READ, fault=hang, first=calls + 1))
            elif calls < 8:
                rig.store.script.add(Rule(call=Call.READ, fault=hang, first=calls - 1))
            else:
                rig.store.script.add(Rule(call=Call.CLOSE_READ, fault=hang, first=calls - 7))
            index = rig.start("a", KEYS)
            gate.wait_for_arrivals()

            rig.linker.reset()

            mark, before = rig.access.mark(), rig.pools.memory.snapshot()
            assert not rig.linker.finish_layer_wise_loading(index)
        assert_nothing_follows(rig, mark, before)
        rig.assert_at_rest()


@pytest.mark.parametrize(
    ("end", "number"),
    [(Call.COPY_IN, n) for n in range(1, 7)] + [(Call.COPY_OUT, 1), (Call.COPY_OUT, 2)],
)
def test_l5_l7_a_reset_during_any_copy_waits_for_that_copy(end: Call, number: int) -> None:
    with linked(options=replace(PATIENT, quiesce_seconds=0.01)) as rig:
        rig.keep(KEYS)
        with Gate() as gate:
            rig.access.script.add(Rule(call=end, fault=Hang(gate=gate), first=number))
            if end is Call.COPY_IN:
                rig.start("a", KEYS)
            else:
                rig.offer(page_keys(3, chain="other"), page=12)
            gate.wait_for_arrivals()
            ending = Waiter(rig.linker.reset)

            assert ending.still_waits()
            gate.open()
            assert ending.returns()

        assert_nothing_follows(rig, rig.access.mark(), rig.pools.memory.snapshot())
        assert rig.access.reads_since(rig.access.mark()) == ()


def test_l5_many_small_loads_and_resets_from_two_sides_leave_nothing() -> None:
    store = MemoryStore()
    with (
        linked(Family.DSA, memory_store=store) as rig,
        linked(Family.DSA, memory_store=store) as other,
    ):
        rig.keep(KEYS)
        for number in range(100):
            one = (rig, other)[number % 2]
            index = one.start(f"r{number}", KEYS[: number % 4 + 1])
            if number % 5 == 0:
                one.linker.reset()
                mark, before = one.access.mark(), one.pools.memory.snapshot()
                assert not one.linker.finish_layer_wise_loading(index)
                assert one.access.writes_since(mark) == ()
                assert one.pools.memory.snapshot() == before
            else:
                assert one.linker.finish_layer_wise_loading(index)
                assert one.pools.wrong_pages(one.transfers(KEYS[: number % 4 + 1], 4)) == ()
        for one in (rig, other):
            one.assert_at_rest()
