"""Reset and close give up everything, wait for what touches pool memory, and for nothing else."""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from linker_rig import (
    NAMESPACE,
    PATIENT,
    Waiter,
    errors_of,
    linked,
    prompts,
    threads_named,
    tokens_of,
    wait_for,
)

from kvlinker.errors import StoreError
from kvlinker.linker import Linker
from kvlinker.metrics import TokenOutcome
from kvlinker.testing import (
    Call,
    Family,
    FaultStore,
    Gate,
    Hang,
    HostEvent,
    MemoryStore,
    Moment,
    OpaqueMemory,
    Raise,
    Rule,
    fake_group,
    page_keys,
)

KEYS = page_keys(4)
TOKENS = 4 * 4
BRISK = replace(PATIENT, quiesce_seconds=0.02)

ENDS: dict[str, Callable[[Linker], None]] = {"reset": Linker.reset, "close": Linker.close}
each_end = pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)


@each_end
def test_l10_twice_is_no_harm_and_no_stored_object_is_deleted(
    end: Callable[[Linker], None],
) -> None:
    with linked() as rig:
        rig.keep(KEYS)
        stored = set(rig.memory_store.keys())
        rig.linker.lookup("a", rig.asked(KEYS))

        end(rig.linker)
        end(rig.linker)

        assert set(rig.memory_store.keys()) == stored
        assert rig.store.count(Call.DELETE) == 0
        assert tokens_of(rig.linker) == {TokenOutcome.ABANDONED: TOKENS}
        rig.assert_at_rest()


@each_end
def test_l10_queued_loads_are_cancelled(end: Callable[[Linker], None]) -> None:
    with linked() as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))
        assert rig.linker.load("a", rig.transfers(KEYS, 4))

        end(rig.linker)

        assert rig.linker.start_layer_wise_loading() == -1
        assert tokens_of(rig.linker) == {TokenOutcome.CANCELLED: TOKENS}
        rig.assert_at_rest()


@each_end
def test_l5_a_load_under_way_writes_nothing_after_the_answer(end: Callable[[Linker], None]) -> None:
    with linked(options=BRISK) as rig:
        rig.keep(KEYS)
        with Gate() as gate:
            rig.store.script.add(Rule(call=Call.READ, fault=Hang(gate=gate), first=3))
            index = rig.start("a", KEYS)
            gate.wait_for_arrivals()
            forward = rig.waits_for(index, 3)

            end(rig.linker)

            mark, before = rig.access.mark(), rig.pools.memory.snapshot()
            assert forward.returns()
            assert not rig.linker.finish_layer_wise_loading(index)
        wait_for(lambda: rig.memory_store.kept() == 0, "the end of the late read")

        assert rig.access.writes_since(mark) == ()
        assert rig.pools.memory.snapshot() == before
        assert tokens_of(rig.linker) == {TokenOutcome.FAILED: TOKENS}


@each_end
def test_l5_a_copy_under_way_is_waited_for(end: Callable[[Linker], None]) -> None:
    with linked(options=BRISK) as rig:
        rig.keep(KEYS)
        with Gate() as gate:
            rig.access.script.add(Rule(call=Call.COPY_IN, fault=Hang(gate=gate), first=2))
            rig.start("a", KEYS)
            gate.wait_for_arrivals()
            ending = Waiter(lambda: end(rig.linker))

            assert ending.still_waits()
            gate.open()
            assert ending.returns()
        mark = rig.access.mark()

        wait_for(lambda: rig.memory_store.kept() == 0, "the end of the late read")
        assert rig.access.writes_since(mark) == ()


@each_end
def test_l5_a_store_that_cannot_be_revoked_is_waited_for(end: Callable[[Linker], None]) -> None:
    with linked(options=BRISK, revocable=False) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(
            Rule(call=Call.READ, fault=Hang(gate=gate), first=2),
            Rule(call=Call.WRITE, fault=Hang(gate=gate)),
        )
        rig.start("a", KEYS)
        rig.offer(page_keys(2, chain="other"), page=12)
        gate.wait_for_arrivals(2)
        ending = Waiter(lambda: end(rig.linker))

        assert ending.still_waits()
        gate.open()
        assert ending.returns()

        assert rig.store.count(Call.READ) == 2
        assert rig.access.writes_since(rig.access.mark()) == ()


@each_end
def test_l7_an_offload_that_is_overtaken_is_never_published(end: Callable[[Linker], None]) -> None:
    with linked(options=BRISK) as rig:
        with Gate() as gate:
            late = Hang(gate=gate, moment=Moment.BEFORE_PUBLISH)
            rig.store.script.add(Rule(call=Call.WRITE, fault=late))
            rig.offer(KEYS)
            gate.wait_for_arrivals()

            end(rig.linker)

            assert rig.memory_store.keys() == ()
        wait_for(lambda: not threads_named("kvlinker-offload"), "the end of the late write")
        assert rig.memory_store.keys() == ()
        assert rig.linker.num_completed_offloads() == 0
        assert rig.linker.metrics.snapshot().events["offloads_reset"] == 1


@each_end
def test_l7_an_offload_that_waits_for_its_events_reads_nothing_any_more(
    end: Callable[[Linker], None],
) -> None:
    with linked() as rig:
        kernel = HostEvent()
        assert rig.linker.offload(rig.transfers(KEYS), ready=[kernel])
        wait_for(lambda: kernel.queries > 0, "a question to the event")

        end(rig.linker)
        kernel.set()

        assert rig.access.copies == ()
        assert rig.memory_store.keys() == ()
        assert errors_of(rig.linker) == {}


@each_end
def test_l10_a_store_that_hangs_is_waited_for_once_and_not_for_each_offer(
    end: Callable[[Linker], None],
) -> None:
    with linked(Family.MHA, options=replace(PATIENT, quiesce_seconds=0.2)) as rig:
        with Gate() as gate:
            rig.store.script.add(Rule(call=Call.EXISTS, fault=Hang(gate=gate)))
            for number, keys in enumerate(prompts(14, 1)):
                rig.offer(keys, page=number)
            gate.wait_for_arrivals()

            end(rig.linker)

            assert gate.arrived == 1  # the others never began
        assert rig.linker.pending == 0


@each_end
def test_l10_loads_behind_one_that_hangs_never_begin(end: Callable[[Linker], None]) -> None:
    with linked(Family.MHA, options=BRISK) as rig:
        rig.keep(KEYS)
        with Gate() as gate:
            rig.store.script.add(Rule(call=Call.OPEN_READ, fault=Hang(gate=gate)))
            for number in range(3):
                rig.start(f"r{number}", KEYS)
            gate.wait_for_arrivals()

            end(rig.linker)

            assert gate.arrived == 1
        wait_for(lambda: rig.memory_store.kept() == 0, "the end of the late read")
        rig.assert_at_rest()
        assert tokens_of(rig.linker) == {TokenOutcome.FAILED: 3 * TOKENS}


def test_l10_a_batch_that_landed_and_was_not_finished_is_abandoned() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        index = rig.start("a", KEYS)
        assert rig.waits_for(index, 3).returns()
        wait_for(lambda: rig.store.count(Call.CLOSE_READ) == 2, "the end of the batch")

        rig.linker.reset()

        assert tokens_of(rig.linker) == {TokenOutcome.ABANDONED: TOKENS}
        rig.assert_at_rest()


def test_l5_what_a_reset_stopped_is_not_quarantined() -> None:
    with linked(options=BRISK) as rig:
        rig.keep(KEYS)
        with Gate() as gate:
            rig.store.script.add(Rule(call=Call.READ, fault=Hang(gate=gate), first=3, times=1))
            rig.start("a", KEYS)
            gate.wait_for_arrivals()
            rig.linker.reset()
        wait_for(lambda: rig.memory_store.kept() == 0, "the end of the late read")

        assert rig.linker.lookup("a", rig.asked(KEYS))[-1] == 4
        assert errors_of(rig.linker) == {}


def test_l10_after_a_reset_everything_works() -> None:
    with linked(Family.V4) as rig:
        rig.keep(KEYS)
        rig.linker.reset()

        assert rig.restore("a", KEYS)
        rig.offload(page_keys(2, chain="other"))
        assert rig.restore("b", page_keys(2, chain="other"))


def test_k2_a_reset_may_begin_a_new_namespace_and_an_old_one_is_found_again() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        new = replace(NAMESPACE, weights_version="2")

        rig.linker.reset(namespace=new)
        assert rig.linker.lookup("a", rig.asked(KEYS)) == []
        rig.offload(KEYS[:2])
        assert rig.linker.lookup("a", rig.asked(KEYS)) == []  # remembered
        assert rig.linker.lookup("b", rig.asked(KEYS)) == [1, 2]

        rig.linker.reset(namespace=NAMESPACE)
        assert rig.linker.lookup("a", rig.asked(KEYS))[-1] == 4


def test_k2_b34_a_new_namespace_that_is_none_begins_an_epoch_of_its_own() -> None:
    nameless: object = "weights 2"
    with linked() as rig:
        rig.keep(KEYS)

        rig.linker.reset(namespace=nameless)  # type: ignore[arg-type]  # an adapter without a type checker

        assert errors_of(rig.linker) == {"reset_errors": 1}
        assert rig.linker.lookup("a", rig.asked(KEYS)) == []
        rig.offload(KEYS[:2])
        assert rig.restore("b", KEYS[:2])

        rig.linker.reset(namespace=NAMESPACE)
        assert rig.linker.lookup("c", rig.asked(KEYS))[-1] == 4


# ---- close ------------------------------------------------------------------------------------


def test_l1_after_close_everything_is_a_miss_or_false() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        index = rig.start("a", KEYS)
        rig.linker.close()
        asked = len(rig.store.records)

        assert rig.linker.lookup("a", rig.asked(KEYS)) == []
        assert rig.linker.load("a", rig.transfers(KEYS, 4)) is False
        assert rig.linker.start_layer_wise_loading() == -1
        assert rig.linker.finish_layer_wise_loading(index) is False
        assert rig.linker.failed_requests(index) == frozenset()
        assert rig.linker.cancel_queued_load("a") is False
        assert rig.linker.offload(rig.transfers(KEYS)) is False
        assert rig.linker.num_completed_offloads() == 0
        assert rig.linker.pop_completed_offload() is False
        rig.linker.layer_done_counter.set_consumer(index)
        rig.linker.layer_done_counter.wait_until(0)
        rig.linker.reset()
        assert len(rig.store.records) == asked
        rig.assert_at_rest()


def test_b61_the_store_stays_open_and_its_objects_are_free() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))

        rig.linker.close()
        rig.linker.close()

        assert rig.memory_store.kept() == 0
        assert rig.store.count(Call.CLOSE) == 0
        assert all(rig.memory_store.exists(rig.object_keys("indexer", KEYS)))


def test_b61_what_a_killed_process_held_is_freed_by_its_lease() -> None:
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    options = replace(PATIENT, hold_seconds=30, load_seconds=10)
    with linked(memory_store=store, options=options) as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))

        now[0] += 30 + 9
        assert store.kept() == 2 * len(KEYS)  # for a load that begins at the last moment
        now[0] += 1

        assert store.kept() == 0


def test_l10_a_store_that_fails_to_forget_memory_is_reported() -> None:
    pools = fake_group(memory=OpaqueMemory())
    rule = Rule(call=Call.UNREGISTER, fault=Raise(error=StoreError("lost")))
    store = FaultStore(MemoryStore(registers_memory=True), [rule])
    linker = Linker(pools.group, store, NAMESPACE, device=pools.access())

    linker.close()

    assert errors_of(linker) == {"close_errors": 1}


def test_l10_a_store_that_hangs_when_it_forgets_memory_is_left_behind_and_reported() -> None:
    pools = fake_group(memory=OpaqueMemory())
    with Gate() as gate:
        rule = Rule(call=Call.UNREGISTER, fault=Hang(gate=gate))
        store = FaultStore(MemoryStore(registers_memory=True), [rule])
        linker = Linker(pools.group, store, NAMESPACE, device=pools.access(), options=BRISK)

        linker.close()

        gate.wait_for_arrivals()
        assert not gate.is_open
        assert errors_of(linker) == {"close_errors": 1}


def test_b67_an_object_that_is_evicted_while_it_is_loaded_stays_readable() -> None:
    with linked(Family.MHA, leases=False, capacity_bytes=4 * 16 * 40) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.READ, fault=Hang(gate=gate)))
        index = rig.start("a", KEYS)
        gate.wait_for_arrivals()

        rig.offer(page_keys(2, chain="other"), page=12)
        assert not rig.completion()
        gate.open()

        assert rig.linker.finish_layer_wise_loading(index)
        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()

        def offer_again() -> bool:
            rig.offer(page_keys(2, chain="other"), page=12)
            return rig.completion()

        wait_for(offer_again, "room once the load is over")


# ---- nobody closes ----------------------------------------------------------------------------


def test_e4_the_threads_of_a_forgotten_linker_end() -> None:
    # A store that hangs for ever, in another test, leaves its thread behind.
    before = set(threads_named("kvlinker-"))

    def use_one() -> None:
        pools = fake_group(memory=OpaqueMemory())
        linker = Linker(pools.group, MemoryStore(), NAMESPACE, device=pools.access())
        transfers = pools.page_transfers(KEYS, {"kv": range(4)})
        assert linker.offload(transfers)
        wait_for(lambda: linker.num_completed_offloads() == 1, "the completion")
        assert linker.lookup("a", pools.lookup_transfers(KEYS)) == [1, 2, 3, 4]
        assert linker.load("a", transfers)
        assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
        assert len(set(threads_named("kvlinker-")) - before) >= 4

    use_one()
    gc.collect()

    wait_for(lambda: before.issuperset(threads_named("kvlinker-")), "the end of all threads")


def test_e4_an_exit_closes_the_linker_of_this_process_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exits: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", exits.append)
    with linked() as rig:
        (leave,) = exits
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))

        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            leave()
        assert rig.linker.pending == 1
        leave()
        leave()

        assert rig.linker.pending == 0
        assert rig.memory_store.kept() == 0
        assert not rig.linker.offload(rig.transfers(KEYS))


def test_e4_an_exit_after_the_linker_is_gone_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", exits.append)
    pools = fake_group(memory=OpaqueMemory())
    Linker(pools.group, MemoryStore(), NAMESPACE, device=pools.access())
    gc.collect()

    exits[0]()

    assert threads_named("kvlinker-lookup") == []


def test_e4_a_linker_that_nobody_closed_is_closed_at_exit() -> None:
    script = """
import atexit
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker
from kvlinker.testing import Call, FaultStore, MemoryStore, fake_group, page_keys, OpaqueMemory

store = FaultStore(MemoryStore(registers_memory=True))
atexit.register(lambda: print(store.count(Call.RELEASE), store.count(Call.UNREGISTER)))
pools = fake_group(memory=OpaqueMemory())
linker = Linker(pools.group, store, KeyNamespace(model_id="m", producer="p"), device=pools.access())
keys = page_keys(2)
assert linker.offload(pools.page_transfers(keys, {"kv": range(2)}))
while not linker.num_completed_offloads():
    pass
assert linker.lookup("a", pools.lookup_transfers(keys)) == [1, 2]
"""
    command = [sys.executable, "-c", script]

    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)

    assert ended.stdout.split() == ["1", "1"]
    assert ended.stderr == ""


def test_e4_a_store_that_hangs_does_not_keep_a_process_from_exiting() -> None:
    script = """
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker, LinkerOptions
from kvlinker.testing import Call, FaultStore, Gate, Hang, MemoryStore, OpaqueMemory, Rule
from kvlinker.testing import fake_group, page_keys

gate = Gate(limit_seconds=1000)
store = FaultStore(MemoryStore(), [Rule(call=Call.EXISTS, fault=Hang(gate=gate))])
pools = fake_group(memory=OpaqueMemory())
options = LinkerOptions(quiesce_seconds=0.05, lookup_seconds=0.05)
namespace = KeyNamespace(model_id="m", producer="p")
linker = Linker(pools.group, store, namespace, device=pools.access(), options=options)
assert linker.offload(pools.page_transfers(page_keys(2), {"kv": range(2)}))
gate.wait_for_arrivals()
assert linker.lookup("a", pools.lookup_transfers(page_keys(2))) == []
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_e4_a_forked_child_does_not_close_its_parents_linker() -> None:
    script = """
import os, sys
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker
from kvlinker.testing import Call, FaultStore, MemoryStore, OpaqueMemory, fake_group, page_keys

store = FaultStore(MemoryStore(registers_memory=True))
pools = fake_group(memory=OpaqueMemory())
linker = Linker(pools.group, store, KeyNamespace(model_id="m", producer="p"), device=pools.access())
import atexit
linker.lookup("a", pools.lookup_transfers(page_keys(2)))
child = os.fork()
if child == 0:
    assert linker.lookup("b", pools.lookup_transfers(page_keys(2))) == []
    atexit._run_exitfuncs()
    os._exit(store.count(Call.UNREGISTER))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)


def test_l12_closing_from_another_thread_ends_what_waits() -> None:
    with linked(options=BRISK) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.READ, fault=Hang(gate=gate)))
        index = rig.start("a", KEYS)
        gate.wait_for_arrivals()
        finish = Waiter(lambda: rig.linker.finish_layer_wise_loading(index))
        assert finish.still_waits()

        closer = threading.Thread(target=rig.linker.close)
        closer.start()

        assert finish.returns()
        assert finish.answer is False
        closer.join(30)
        assert tokens_of(rig.linker) == {TokenOutcome.FAILED: TOKENS}
