"""Loads land layer by layer, every byte in its place, and answer when they no longer touch pool memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from linker_rig import (
    FAMILIES,
    NAMESPACE,
    PATIENT,
    Rig,
    errors_of,
    linked,
    prompts,
    tokens_of,
    wait_for,
)

from kvlinker.device import DeviceEvent
from kvlinker.failures import FailureLog
from kvlinker.layer_counter import LayerCounter
from kvlinker.load_batch import LoadBatch
from kvlinker.metrics import LinkerMetrics, TokenOutcome
from kvlinker.pool_keys import GroupKeys
from kvlinker.pools import KV
from kvlinker.testing import (
    Call,
    Family,
    Gate,
    Hang,
    HostEvent,
    Raise,
    Rule,
    page_keys,
)

KEYS = page_keys(4)
LAYERS = 4


# ---- what lands -------------------------------------------------------------------------------


@pytest.mark.parametrize("ranged", [True, False], ids=["ranged", "whole"])
@pytest.mark.parametrize("family", FAMILIES)
def test_l4_every_byte_lands_in_its_page_and_no_other_byte_changes(
    family: Family, *, ranged: bool
) -> None:
    with linked(family, ranged_reads=ranged) as rig:
        rig.keep(KEYS)

        assert rig.restore("a", KEYS)

        landed = rig.pools.memory.snapshot()
        rig.pools.memory.poison()
        rig.pools.fill(rig.transfers(KEYS, 4))
        assert landed == rig.pools.memory.snapshot()
        rig.assert_at_rest()
        assert tokens_of(rig.linker) == {TokenOutcome.LANDED: 4 * 4}


def test_l4_a_batch_is_one_plan_for_each_pool_and_layer() -> None:
    with linked(Family.DSA) as rig:
        chains = prompts(3, 2)
        for keys in chains:
            rig.keep(keys)
        for number, keys in enumerate(chains):
            rig.linker.lookup(f"r{number}", rig.asked(keys))
            assert rig.linker.load(f"r{number}", rig.transfers(keys, 2 * number))

        index = rig.linker.start_layer_wise_loading()

        assert rig.linker.finish_layer_wise_loading(index)
        reads = [record.pool for record in rig.store.records if record.call is Call.READ]
        assert reads == [KV, "indexer", KV, KV, "indexer", KV]
        assert rig.store.count(Call.OPEN_READ) == 2
        for number, keys in enumerate(chains):
            assert rig.pools.wrong_pages(rig.transfers(keys, 2 * number)) == ()


def test_l4_all_pools_of_a_layer_come_before_the_next_layer() -> None:
    with linked(Family.V4) as rig:
        rig.keep(KEYS)
        assert rig.restore("a", KEYS)

        layers = [
            next(
                layer
                for layer in range(LAYERS)
                for entry in rig.pools.group.entries
                if entry.name == copy.pool
                for position in entry.layer_mapping.get(layer, ())
                if entry.components[0][position].label in copy.labels
            )
            for copy in rig.access.copies
            if copy.call is Call.COPY_IN
        ]
        assert layers == sorted(layers)
        assert set(layers) == set(range(LAYERS))


def test_l4_a_part_of_what_was_found_may_be_loaded() -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))
        assert rig.linker.load("a", rig.transfers(KEYS[:3], 4))

        index = rig.linker.start_layer_wise_loading()

        assert rig.linker.finish_layer_wise_loading(index)
        assert rig.pools.wrong_pages(rig.transfers(KEYS[:3], 4)) == ()
        assert tokens_of(rig.linker) == {TokenOutcome.LANDED: 3 * 4, TokenOutcome.NOT_TAKEN: 4}
        rig.assert_at_rest()


def test_l4_pools_may_be_loaded_without_kv() -> None:
    with linked(Family.MAMBA) as rig:
        rig.keep(KEYS)
        kv, states = rig.transfers(KEYS, 4)
        del kv
        assert rig.linker.load("a", [states])

        index = rig.linker.start_layer_wise_loading()

        assert rig.linker.finish_layer_wise_loading(index)
        assert rig.pools.wrong_pages([states]) == ()


def test_l3_a_load_without_a_lookup_works_as_far_as_the_objects_are_there() -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS)
        assert rig.linker.load("a", rig.transfers(KEYS, 4))

        index = rig.linker.start_layer_wise_loading()

        assert rig.linker.finish_layer_wise_loading(index)
        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()
        assert tokens_of(rig.linker) == {}


# ---- indices and waiting ----------------------------------------------------------------------


def test_l4_nothing_queued_starts_nothing() -> None:
    with linked() as rig:
        assert rig.linker.start_layer_wise_loading() == -1
        assert rig.store.records == ()


def test_l4_each_start_with_something_queued_has_an_index_of_its_own() -> None:
    with linked() as rig:
        rig.keep(KEYS)

        indices = [rig.start(f"r{n}", KEYS) for n in range(3)]

        assert indices == [0, 1, 2]
        assert [rig.linker.finish_layer_wise_loading(i) for i in (1, 0, 2)] == [True] * 3
        rig.assert_at_rest()


@pytest.mark.parametrize("index", [-1, 0, 7, None, "x"])
def test_l4_finishing_an_unknown_batch_is_false(index: object) -> None:
    with linked() as rig:
        assert rig.linker.finish_layer_wise_loading(index) is False  # type: ignore[arg-type]  # engines without types


def test_l4_finishing_a_batch_twice_is_false_the_second_time() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        index = rig.start("a", KEYS)

        assert rig.linker.finish_layer_wise_loading(index)
        assert not rig.linker.finish_layer_wise_loading(index)


def test_l4_b65_a_layer_waits_for_every_pool_of_it() -> None:
    with linked(Family.DSA) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.READ, fault=Hang(gate=gate), pool="indexer"))
        index = rig.start("a", KEYS)
        gate.wait_for_arrivals()

        waiter = rig.waits_for(index, 0)

        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4), layers=[0]) != ()
        assert waiter.still_waits()
        gate.open()
        assert waiter.returns()
        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4), layers=[0]) == ()
        assert rig.linker.finish_layer_wise_loading(index)


def test_l4_a_layer_that_landed_is_not_waited_for_while_later_ones_are_read() -> None:
    with linked(Family.MHA) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.READ, fault=Hang(gate=gate), first=3))
        index = rig.start("a", KEYS)
        gate.wait_for_arrivals()
        rig.linker.layer_done_counter.set_consumer(index)

        rig.linker.layer_done_counter.wait_until(0)
        rig.linker.layer_done_counter.wait_until(1)

        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4), layers=[0, 1]) == ()
        waiter = rig.waits_for(index, 2)
        assert waiter.still_waits()
        gate.open()
        assert waiter.returns()
        assert rig.linker.finish_layer_wise_loading(index)


def test_l4_a_store_of_whole_objects_completes_all_layers_at_the_end() -> None:
    with linked(Family.DSA, ranged_reads=False) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.READ, fault=Hang(gate=gate), pool="indexer"))
        index = rig.start("a", KEYS)
        gate.wait_for_arrivals()

        waiter = rig.waits_for(index, 1)

        assert waiter.still_waits()
        gate.open()
        assert waiter.returns()
        assert rig.linker.finish_layer_wise_loading(index)


def test_c8_a_layer_without_a_pool_of_the_batch_is_not_waited_for() -> None:
    with linked(Family.MAMBA) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.OPEN_READ, fault=Hang(gate=gate)))
        kv = next(t for t in rig.transfers(KEYS, 4) if t.name == KV)
        assert rig.linker.load("a", [kv])
        index = rig.linker.start_layer_wise_loading()
        gate.wait_for_arrivals()
        counter = rig.linker.layer_done_counter
        counter.set_consumer(index)

        for layer in (1, 3, 4, 99, -1):
            counter.wait_until(layer)

        waiter = rig.waits_for(index, 2)
        assert waiter.still_waits()
        gate.open()
        assert waiter.returns()
        assert rig.linker.finish_layer_wise_loading(index)


def test_l4_without_a_consumer_nothing_is_waited_for() -> None:
    with linked() as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.OPEN_READ, fault=Hang(gate=gate)))
        index = rig.start("a", KEYS)
        counter = rig.linker.layer_done_counter

        counter.wait_until(0)
        for consumer in (-1, index + 1):
            counter.set_consumer(consumer)
            counter.wait_until(0)

        gate.open()
        assert rig.linker.finish_layer_wise_loading(index)
        counter.set_consumer(index)
        counter.wait_until(0)


def test_l4_an_engine_can_read_which_batch_it_waits_on() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        index = rig.start("a", KEYS)
        counter = rig.linker.layer_done_counter
        before = counter.consumer_index

        counter.set_consumer(index)

        assert (before, counter.consumer_index) == (-1, index)
        assert rig.linker.finish_layer_wise_loading(index)


def test_l1_waiting_with_what_is_no_index_or_layer_raises_nothing() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        index = rig.start("a", KEYS)
        counter = rig.linker.layer_done_counter

        counter.set_consumer([index])  # type: ignore[arg-type]  # engines without types
        counter.wait_until(0)
        counter.set_consumer(index)
        counter.wait_until({})  # type: ignore[arg-type]  # engines without types

        assert errors_of(rig.linker) == {"wait_errors": 2}
        assert rig.linker.finish_layer_wise_loading(index)


def test_an_interrupt_of_the_users_ends_the_wait() -> None:
    def interrupt(index: int) -> LoadBatch | None:
        raise KeyboardInterrupt(index)

    def expire(batch: LoadBatch) -> None:
        batch.end()

    counter = LayerCounter(interrupt, expire, FailureLog("MemoryStore", LinkerMetrics()))

    with pytest.raises(KeyboardInterrupt):
        counter.wait_until(0)


def test_l4_waiting_returns_when_the_batch_failed_and_finish_reports_it() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.READ, fault=Raise(error=OSError("gone")), first=3))
        index = rig.start("a", KEYS)

        for layer in range(LAYERS):
            assert rig.waits_for(index, layer).returns()

        assert not rig.linker.finish_layer_wise_loading(index)


def batch_of(rig: Rig) -> LoadBatch:
    return LoadBatch(
        index=0,
        requests=(),
        keys=GroupKeys(rig.pools.group, NAMESPACE),
        mapped_layers=frozenset(range(LAYERS)),
        deadline=0.0,
    )


def test_w36_a_layer_may_be_completed_twice_and_never_becomes_incomplete() -> None:
    with linked() as rig:
        batch = batch_of(rig)

        for count in (1, 3, 3, 2):
            batch.complete_layers(count)

        assert batch.layers_done == 3


def test_who_waits_for_the_end_of_a_batch_is_woken_by_that_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that wakes for every layer takes the core that the copy of the next one has a use for."""
    with linked() as rig:
        batch, woken = batch_of(rig), []
        monkeypatch.setattr(batch.over, "notify_all", lambda: woken.append(batch.ended))

        batch.complete_layers(1)
        batch.fail(["a"])
        batch.end()

        assert woken == [True]


def test_l5_a_batch_that_ended_can_fail_no_more() -> None:
    with linked() as rig:
        batch = batch_of(rig)
        batch.end()

        assert not batch.give_up()
        batch.fail(["a"])

        assert batch.has_landed


# ---- events -----------------------------------------------------------------------------------


def test_b63_nothing_is_written_before_the_engines_events() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        running, done = HostEvent(), HostEvent(done=True)
        index = rig.start("a", KEYS, ready=[done, running])
        wait_for(lambda: running.queries > 3, "a question to the event")

        assert rig.access.writes_since(0) == ()
        assert rig.store.count(Call.OPEN_READ) == 0
        running.set()

        assert rig.linker.finish_layer_wise_loading(index)
        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()


def test_l5_events_that_never_come_fail_the_load_and_the_store_is_not_to_blame() -> None:
    with linked(options=replace(PATIENT, load_seconds=0.02)) as rig:
        rig.keep(KEYS)
        index = rig.start("a", KEYS, ready=[HostEvent()])

        assert not rig.linker.finish_layer_wise_loading(index)
        assert rig.access.writes_since(0) == ()
        assert rig.store.count(Call.OPEN_READ) == 0
        assert errors_of(rig.linker) == {"load_errors": 1}
        assert rig.linker.lookup("a", rig.asked(KEYS))[-1] == 4


def test_l5_an_event_of_a_broken_device_fails_the_load() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        index = rig.start("a", KEYS, ready=[HostEvent(error=RuntimeError("device lost"))])

        assert not rig.linker.finish_layer_wise_loading(index)
        assert rig.access.writes_since(0) == ()


class WordlessError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError


def failing_events() -> Iterator[DeviceEvent]:
    """Yield no event: the device cannot record one."""
    yield from ()
    raise WordlessError


@pytest.mark.parametrize("ready", [None, 3, [object()], failing_events()])
def test_l4_events_that_are_none_fail_what_is_queued_and_start_still_has_an_index(
    ready: object,
) -> None:
    with linked() as rig:
        rig.keep(KEYS)
        index = rig.start("a", KEYS, ready=ready)  # type: ignore[arg-type]  # engines without types

        assert index == 0
        assert not rig.linker.finish_layer_wise_loading(index)
        assert tokens_of(rig.linker) == {TokenOutcome.FAILED: 4 * 4}
        rig.assert_at_rest()
