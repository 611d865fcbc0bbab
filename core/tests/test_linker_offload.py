"""Offloads are read after their events, stored so that no reader is misled, and answered in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from linker_rig import (
    FAMILIES,
    PATIENT,
    Waiter,
    errors_of,
    linked,
    prompts,
    threads_named,
    wait_for,
)

from kvlinker.device import DeviceAccess, DeviceEvent
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import DeviceCopyError, TransferRevokedError
from kvlinker.pools import KV, DevicePoolGroup
from kvlinker.store import ObjectKey, ReadStatus, WriteBatch, WriteStatus
from kvlinker.testing import (
    AnswerNone,
    Call,
    CopyHalf,
    FakePools,
    Family,
    Gate,
    Hang,
    HostEvent,
    LandLate,
    MemoryStore,
    Miscount,
    Moment,
    OpaqueMemory,
    PagePattern,
    Raise,
    Report,
    Rule,
    fake_group,
    page_keys,
)

KEYS = page_keys(4)
HASTY = replace(PATIENT, offload_seconds=0.2, breaker_seconds=1000)


# ---- what is stored ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_l7_what_is_offered_is_stored_and_can_be_restored(family: Family) -> None:
    with linked(family) as rig:
        rig.offer(KEYS)
        assert rig.completion()
        rig.pools.memory.poison()

        assert rig.restore("a", KEYS)
        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()


def test_l7_an_offload_changes_no_byte_of_pool_memory() -> None:
    with linked(Family.V4) as rig:
        transfers = rig.transfers(KEYS)
        rig.pools.fill(transfers)
        before = rig.pools.memory.snapshot()

        assert rig.linker.offload(transfers)
        assert rig.completion()

        assert rig.pools.memory.snapshot() == before
        assert rig.access.writes_since(0) == ()


def test_l7_objects_that_are_stored_already_are_skipped() -> None:
    with linked(Family.DSA) as rig:
        rig.offer(KEYS[:3])
        assert rig.completion()
        rig.offer(KEYS)
        assert rig.completion()
        rig.offer(KEYS)
        assert rig.completion()

        assert len(rig.written()) == 2 * 4
        assert rig.store.count(Call.WRITE) == 2
        events = rig.linker.metrics.snapshot().events
        assert events["offload_objects"] == 2 * 4
        assert events["objects_skipped"] == 2 * 3 + 2 * 4


def test_l7_pools_may_be_offered_one_by_one() -> None:
    with linked(Family.MAMBA) as rig:
        kv, states = rig.transfers(KEYS)
        rig.pools.fill([kv, states])

        assert rig.linker.offload([states])
        assert rig.linker.offload([kv], session_id="of the engine")
        assert [rig.completion(), rig.completion()] == [True, True]

        rig.pools.memory.poison()
        assert rig.restore("a", KEYS)


def test_k3_a_rank_that_does_not_write_a_pool_leaves_it_to_the_one_that_does() -> None:
    pools = fake_group(Family.DSA, memory=OpaqueMemory())
    reader = FakePools(
        DevicePoolGroup(
            [
                with_writer(entry, is_writer=entry.name == "indexer")
                for entry in pools.group.entries
            ],
            4,
            pools.group.page_size,
            layout=pools.group.layout,
        ),
        pools.memory,
        pages=16,
        windows={},
        pattern=PagePattern(),
    )
    with linked(pools=reader) as rig:
        rig.offer(KEYS)
        assert rig.completion()

        assert rig.written() == rig.object_keys("indexer", KEYS)
        none = DevicePoolGroup(
            [with_writer(entry, is_writer=False) for entry in pools.group.entries],
            4,
            pools.group.page_size,
            layout=pools.group.layout,
        )
        idle = FakePools(none, pools.memory, pages=16, windows={}, pattern=PagePattern())
        with linked(pools=idle) as other:
            other.offer(KEYS)
            assert other.completion()
            assert other.store.records == ()


def with_writer(entry: DevicePoolEntry, *, is_writer: bool) -> DevicePoolEntry:
    """Return the same entry for a rank that writes it or does not."""
    return DevicePoolEntry(
        name=entry.name,
        indices_from_pool=entry.indices_from_pool,
        components=entry.components,
        layer_mapping=entry.layer_mapping,
        page_size=entry.page_size,
        rows_are_pages=entry.rows_are_pages,
        replicated=entry.replicated,
        is_writer=is_writer,
    )


# ---- when pages are read ----------------------------------------------------------------------


def test_l7_b62_no_page_is_read_before_its_events() -> None:
    with linked() as rig:
        kernel = HostEvent()
        transfers = rig.transfers(KEYS)
        assert rig.linker.offload(transfers, ready=[HostEvent(done=True), kernel])
        wait_for(lambda: kernel.queries > 3, "a question to the event")

        assert rig.access.copies == ()
        rig.pools.fill(transfers)
        kernel.set()
        assert rig.completion()

        rig.pools.memory.poison()
        assert rig.restore("a", KEYS)
        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()


def test_l7_b64_the_engine_keeps_a_page_until_its_completion_and_gets_it_after_the_last_read() -> (
    None
):
    with linked(Family.DSA) as rig, Gate() as gate:
        rig.access.script.add(Rule(call=Call.COPY_OUT, fault=Hang(gate=gate)))
        rig.offer(KEYS)
        gate.wait_for_arrivals()

        assert rig.linker.num_completed_offloads() == 0
        gate.open()
        assert rig.completion()
        mark = rig.access.mark()
        rig.pools.memory.poison()

        assert rig.restore("a", KEYS)
        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()
        assert rig.access.reads_since(mark) == ()


@pytest.mark.parametrize("moment", [Moment.BEFORE, Moment.BEFORE_PUBLISH])
def test_l7_an_offload_that_was_given_up_is_not_published(moment: Moment) -> None:
    with linked(options=HASTY) as rig:
        with Gate() as gate:
            late = Hang(gate=gate, moment=moment)
            rig.store.script.add(Rule(call=Call.WRITE, fault=late))
            rig.offer(KEYS)
            gate.wait_for_arrivals()
            assert not rig.completion()
        wait_for(lambda: not threads_named("kvlinker-offload"), "the end of the late offload")

        assert rig.memory_store.keys() == ()
        assert errors_of(rig.linker) == {"offload_errors": 1}


@pytest.mark.parametrize("call", [Call.EXISTS, Call.WRITE])
def test_l7_a_page_is_not_read_again_once_its_offload_was_given_up(call: Call) -> None:
    with linked(options=HASTY) as rig:
        with Gate() as gate:
            rig.store.script.add(Rule(call=call, fault=Hang(gate=gate)))
            rig.offer(KEYS)
            gate.wait_for_arrivals()
            assert not rig.completion()
            mark, calls = rig.access.mark(), len(rig.store.records)
        wait_for(lambda: not threads_named("kvlinker-offload"), "the end of the late offload")

        assert len(rig.store.records) == calls

        assert rig.access.reads_since(mark) == ()
        assert rig.memory_store.keys() == ()
        assert errors_of(rig.linker) == {"offload_errors": 1}


def test_l7_a_copy_under_way_at_the_deadline_is_waited_for() -> None:
    with linked(options=replace(HASTY, offload_seconds=0.001)) as rig, Gate() as gate:
        rig.access.script.add(Rule(call=Call.COPY_OUT, fault=Hang(gate=gate)))
        rig.offer(KEYS)
        gate.wait_for_arrivals()

        count = Waiter(rig.completion)

        assert count.still_waits()
        gate.open()
        assert count.returns()
        assert count.answer is False
        assert rig.access.reads_since(rig.access.mark()) == ()


def test_l7_events_that_never_come_complete_false_and_the_store_is_not_to_blame() -> None:
    with linked(options=HASTY) as rig:
        rig.keep(KEYS)
        assert rig.linker.offload(rig.transfers(KEYS, 4), ready=[HostEvent()])

        assert not rig.completion()

        assert rig.linker.lookup("a", rig.asked(KEYS))[-1] == 4
        assert errors_of(rig.linker) == {"offload_errors": 1}


def test_l7_an_event_of_a_broken_device_completes_false() -> None:
    with linked() as rig:
        broken = HostEvent(error=RuntimeError("device lost"))

        assert rig.linker.offload(rig.transfers(KEYS), ready=[broken])

        assert not rig.completion()
        assert rig.access.copies == ()


def failing_events(error: BaseException) -> Iterator[DeviceEvent]:
    """Yield no event: the device cannot record one."""
    yield from ()
    raise error


@pytest.mark.parametrize(
    "ready",
    [None, 3, failing_events(OSError()), failing_events(SystemExit())],
    ids=["none", "a number", "an error", "an exit"],
)
def test_l1_events_that_are_none_complete_false_and_the_answer_is_the_same_on_every_rank(
    ready: object,
) -> None:
    with linked() as rig:
        assert rig.linker.offload(rig.transfers(KEYS), ready=ready)  # type: ignore[arg-type]  # engines without types

        assert not rig.completion()
        assert errors_of(rig.linker) == {"offload_errors": 1}
        assert rig.access.copies == ()


def test_l7_a_store_that_cannot_be_revoked_is_waited_for() -> None:
    with linked(options=HASTY, revocable=False) as rig, Gate() as gate:
        rig.store.script.add(Rule(call=Call.WRITE, fault=Hang(gate=gate)))
        rig.offer(KEYS)
        gate.wait_for_arrivals()
        rig.offer(page_keys(2, chain="other"), page=8)
        completion = Waiter(rig.completion)

        assert completion.still_waits()
        wait_for(lambda: errors_of(rig.linker) == {"offload_errors": 2}, "both deadlines")
        assert rig.linker.num_completed_offloads() == 0
        gate.open()
        assert completion.returns()

        assert completion.answer is False
        assert not rig.completion()
        assert rig.memory_store.keys() == ()


# ---- completions ------------------------------------------------------------------------------


def test_x04_l1_completions_come_in_the_order_of_the_offers() -> None:
    with linked(Family.MHA) as rig, Gate() as gate:
        chains = prompts(6, 1)
        bad = frozenset(rig.object_keys(KV, [*chains[1], *chains[4]]))
        rig.store.script.add(
            Rule(call=Call.WRITE, fault=Hang(gate=gate), times=1),
            Rule(call=Call.WRITE, fault=Report(status=WriteStatus.FAILED), keys=bad),
        )
        for number, keys in enumerate(chains):
            rig.offer(keys, page=number)
        gate.wait_for_arrivals()

        assert rig.linker.num_completed_offloads() == 0
        assert not rig.linker.pop_completed_offload()
        gate.open()

        assert [rig.completion() for _ in chains] == [True, False, True, True, False, True]
        assert rig.linker.num_completed_offloads() == 0
        assert not rig.linker.pop_completed_offload()


def test_x04_l9_dropped_offers_complete_in_their_place() -> None:
    with linked(Family.MHA, options=replace(PATIENT, max_queued_offloads=2)) as rig, Gate() as gate:
        chains = prompts(5, 1)
        rig.store.script.add(Rule(call=Call.WRITE, fault=Hang(gate=gate)))
        for number, keys in enumerate(chains):
            rig.offer(keys, page=number)

        assert rig.linker.num_completed_offloads() == 0
        gate.open()

        assert [rig.completion() for _ in chains] == [True, True, False, False, False]
        events = rig.linker.metrics.snapshot().events
        assert events["offloads_dropped"] == 3
        assert (events["offloads_stored"], events["offloads_failed"]) == (2, 3)
        assert rig.memory_store.keys() == tuple(rig.object_keys(KV, [*chains[0], *chains[1]]))


def test_l9_a_slow_store_makes_offers_overdue_and_never_begins_them() -> None:
    with linked(Family.MHA, options=HASTY) as rig:
        with Gate() as gate:
            rig.store.script.add(Rule(call=Call.WRITE, fault=Hang(gate=gate)))
            for number, keys in enumerate(prompts(3, 1)):
                rig.offer(keys, page=number)

            assert [rig.completion() for _ in range(3)] == [False] * 3
            assert rig.store.count(Call.WRITE) == 1
        events = rig.linker.metrics.snapshot().events
        assert events["offload_errors"] + events.get("offload_refused", 0) == 3


def test_l9_loads_do_not_wait_behind_offloads() -> None:
    with linked(Family.DSA) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.WRITE, fault=Hang(gate=gate)))
        rig.offer(page_keys(2, chain="other"), page=12)
        gate.wait_for_arrivals()

        assert rig.restore("a", KEYS)
        assert rig.linker.num_completed_offloads() == 0


def test_b75_a_store_that_fails_once_in_three_completes_every_offer() -> None:
    with linked(Family.MHA) as rig:
        chains = prompts(9, 1)
        rig.store.script.add(Rule(call=Call.WRITE, fault=Raise(error=OSError("disk")), every=3))
        for number, keys in enumerate(chains):
            rig.offer(keys, page=number)

        assert [rig.completion() for _ in chains] == [False, True, True] * 3
        assert errors_of(rig.linker) == {"offload_errors": 3}


def test_l9_with_every_worker_hung_offers_complete_false_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = replace(PATIENT, offload_seconds=0.001, breaker_seconds=0.001)
    with linked(Family.MHA, options=options) as rig, Gate() as gate:
        rig.store.script.add(Rule(call=Call.EXISTS, fault=Hang(gate=gate)))

        while gate.arrived < 8:
            rig.offer(KEYS)
            assert not rig.completion()
        rig.offer(KEYS)

        assert rig.linker.num_completed_offloads() == 1
        assert not rig.linker.pop_completed_offload()
        assert "offload failed: store=FaultStore pool=- key=-: every worker hangs" in caplog.text


# ---- failures ---------------------------------------------------------------------------------

FAULTS = {
    "write raises": Rule(call=Call.WRITE, fault=Raise(error=OSError("disk"))),
    "write exits": Rule(call=Call.WRITE, fault=Raise(error=SystemExit(1))),
    "write interrupts": Rule(call=Call.WRITE, fault=Raise(error=KeyboardInterrupt())),
    "write raises when done": Rule(
        call=Call.WRITE, fault=Raise(error=OSError("disk"), moment=Moment.AFTER)
    ),
    "write raises before it publishes": Rule(
        call=Call.WRITE, fault=Raise(error=OSError("disk"), moment=Moment.BEFORE_PUBLISH)
    ),
    "write is none": Rule(call=Call.WRITE, fault=AnswerNone()),
    "write counts too many": Rule(call=Call.WRITE, fault=Miscount(change=1)),
    "write counts too few": Rule(call=Call.WRITE, fault=Miscount(change=-1)),
    "write tears": Rule(call=Call.WRITE, fault=CopyHalf(error=OSError("torn"))),
    "write is full": Rule(call=Call.WRITE, fault=Report(status=WriteStatus.FULL)),
    "write fails for one": Rule(
        call=Call.WRITE, fault=Report(status=WriteStatus.FAILED), positions=frozenset({5})
    ),
    "write discards": Rule(call=Call.WRITE, fault=Report(status=WriteStatus.DISCARDED)),
    "write lies": Rule(call=Call.WRITE, fault=Report(status=WriteStatus.WRITTEN)),
    "exists raises": Rule(call=Call.EXISTS, fault=Raise(error=OSError("down")), first=2),
    "exists is none": Rule(call=Call.EXISTS, fault=AnswerNone()),
    "exists counts too many": Rule(call=Call.EXISTS, fault=Miscount(change=1)),
}


@pytest.mark.parametrize("rule", FAULTS.values(), ids=[name.replace(" ", "-") for name in FAULTS])
@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "one-by-one"])
def test_l8_a_failed_offer_completes_false_and_is_stored_when_offered_again(
    rule: Rule, *, atomic: bool
) -> None:
    with linked(Family.DSA, atomic_batches=atomic) as rig:
        rig.store.script.add(rule)
        rig.offer(KEYS)
        assert not rig.completion()
        assert set(errors_of(rig.linker)) == {"offload_errors"}
        assert rig.store.script.fired
        rig.store.script.clear()

        rig.offer(KEYS)
        assert rig.completion()
        rig.pools.memory.poison()

        assert rig.restore("a", KEYS)
        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()


def test_l8_failures_of_several_pools_are_each_logged_with_pool_and_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with linked(Family.DSA) as rig:
        rig.store.script.add(Rule(call=Call.WRITE, fault=Report(status=WriteStatus.FULL)))
        rig.offer(KEYS)

        assert not rig.completion()

        assert errors_of(rig.linker) == {"offload_errors": 2}
        for pool in (KV, "indexer"):
            key = rig.object_keys(pool, KEYS)[0].hex()
            assert (
                f"store=FaultStore pool={pool} key={key}: 4 of 4 pages were not stored"
                in caplog.text
            )


class Keeper(MemoryStore):
    """Deletes nothing, and says so."""

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        return (False,) * len(keys)


def test_l5_what_is_in_quarantine_is_written_anew_although_the_store_says_that_it_has_it() -> None:
    with linked(Family.MHA, memory_store=Keeper(overwrite=True)) as rig:
        rig.offload(KEYS)
        bad = Report(status=ReadStatus.FAILED)
        rig.store.script.add(Rule(call=Call.READ, fault=bad, positions=frozenset({2}), times=1))
        assert not rig.restore("a", KEYS)

        rig.offload(KEYS)

        assert rig.written()[4:] == rig.object_keys(KV, KEYS[2:3])
        assert rig.linker.lookup("a", rig.asked(KEYS)) == [1, 2, 3, 4]


def test_l7_a_device_that_fails_completes_false() -> None:
    with linked() as rig:
        lost = Raise(error=DeviceCopyError("device lost"))
        rig.access.script.add(Rule(call=Call.COPY_OUT, fault=lost))
        rig.offer(KEYS)

        assert not rig.completion()
        assert rig.memory_store.keys() == ()


def test_l7_a_write_that_goes_on_after_it_failed_reads_no_page() -> None:
    with linked() as rig:
        with Gate() as gate:
            rig.store.script.add(Rule(call=Call.WRITE, fault=LandLate(gate=gate)))
            rig.offer(KEYS)
            assert not rig.completion()
            mark = rig.access.mark()
        (landing,) = rig.store.landings
        landing.join()

        assert isinstance(landing.error, TransferRevokedError)
        assert rig.access.reads_since(mark) == ()
        assert rig.memory_store.keys() == ()


class Careless(MemoryStore):
    """Publishes without asking."""

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store."""
        del may_publish
        return super().write(batches, memory, may_publish=lambda: True)


def test_l7_a_store_that_publishes_without_asking_is_found_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with linked(memory_store=Careless()) as rig:
        rig.offer(KEYS)

        assert not rig.completion()
        assert "FaultStore published without asking" in caplog.text


def test_indices_that_the_engine_changes_after_the_offer_do_not_matter() -> None:
    with linked(Family.MHA) as rig:
        transfer = rig.transfers(KEYS)[0]
        rig.pools.fill([transfer])
        slots, event = np.array(transfer.device_indices), HostEvent()
        assert rig.linker.offload([replace(transfer, device_indices=slots)], ready=[event])
        slots[:] = 0
        event.set()
        assert rig.completion()

        rig.pools.memory.poison()
        assert rig.restore("a", KEYS)
        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()
