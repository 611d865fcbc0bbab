"""A load that fails says so, fills nothing late, and is not promised again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from linker_rig import PATIENT, Rig, Waiter, errors_of, linked, prompts, tokens_of, wait_for

from kvlinker.errors import DeviceCopyError, StoreError, TransferRevokedError
from kvlinker.metrics import TokenOutcome
from kvlinker.pools import KV
from kvlinker.store import ReadStatus
from kvlinker.testing import (
    AnswerNone,
    Answers,
    Call,
    CopyHalf,
    Evict,
    Family,
    Fault,
    FaultedCall,
    Gate,
    Hang,
    HostEvent,
    LandLate,
    Miscount,
    Moment,
    Raise,
    Report,
    Rule,
    Tamper,
    TamperKind,
    page_keys,
)

KEYS = page_keys(4)
LAYERS = 4
HASTY = replace(PATIENT, load_seconds=0.2, breaker_seconds=1000)


class Background(Fault):
    """Answers at once that all is well, and copies in another thread when its gate opens."""

    def __init__(self, gate: Gate) -> None:
        self.late = LandLate(gate=gate)

    @property
    def calls(self) -> frozenset[Call]:
        return frozenset({Call.READ})

    def around(
        self, call: FaultedCall, affected: frozenset[int], proceed: Callable[[], Answers]
    ) -> Answers:
        with suppress(StoreError):
            self.late.around(call, affected, proceed)
        return [ReadStatus.OK] * call.count


FAULTS = {
    "open raises": Rule(call=Call.OPEN_READ, fault=Raise(error=OSError("gone"))),
    "open of the second pool raises": Rule(
        call=Call.OPEN_READ, fault=Raise(error=OSError("gone")), first=2
    ),
    "open exits": Rule(call=Call.OPEN_READ, fault=Raise(error=SystemExit(1))),
    "open is none": Rule(call=Call.OPEN_READ, fault=AnswerNone()),
    "read raises": Rule(call=Call.READ, fault=Raise(error=OSError("gone"))),
    "read raises late": Rule(call=Call.READ, fault=Raise(error=OSError("gone")), first=6),
    "read raises when done": Rule(
        call=Call.READ, fault=Raise(error=OSError("gone"), moment=Moment.AFTER), first=6
    ),
    "read interrupts": Rule(call=Call.READ, fault=Raise(error=KeyboardInterrupt())),
    "read exits": Rule(call=Call.READ, fault=Raise(error=SystemExit(1))),
    "read is none": Rule(call=Call.READ, fault=AnswerNone()),
    "read counts too many": Rule(call=Call.READ, fault=Miscount(change=1)),
    "read counts too few": Rule(call=Call.READ, fault=Miscount(change=-1)),
    "read tears": Rule(call=Call.READ, fault=CopyHalf(error=OSError("torn"))),
    "read misses": Rule(call=Call.READ, fault=Report(status=ReadStatus.MISS)),
    "read fails": Rule(call=Call.READ, fault=Report(status=ReadStatus.FAILED)),
    "read finds corruption": Rule(call=Call.READ, fault=Report(status=ReadStatus.CORRUPT)),
    "read of the last layer fails": Rule(
        call=Call.READ, fault=Report(status=ReadStatus.FAILED), first=6, positions=frozenset({3})
    ),
    "read lies": Rule(call=Call.READ, fault=Report(status=ReadStatus.OK)),
    "read lies about one page": Rule(
        call=Call.READ, fault=Report(status=ReadStatus.OK), first=2, positions=frozenset({2})
    ),
    "eviction": Rule(call=Call.OPEN_READ, fault=Evict()),
    "bad disk": Rule(call=Call.OPEN_READ, fault=Tamper()),
    "short object": Rule(call=Call.OPEN_READ, fault=Tamper(kind=TamperKind.SHORTEN)),
    "long object": Rule(call=Call.READ, fault=Tamper(kind=TamperKind.LENGTHEN)),
    "empty object": Rule(call=Call.READ, fault=Tamper(kind=TamperKind.EMPTY)),
}
"""In a DSA group a batch opens two sessions and makes six reads."""


@pytest.fixture(params=FAULTS, ids=lambda name: name.replace(" ", "-"))
def faulty(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Give a rig whose stored prefix cannot be read as promised."""
    with linked(Family.DSA) as rig:
        rig.keep(KEYS)
        rig.store.script.add(FAULTS[str(request.param)])
        yield rig


def test_l5_e1_a_load_that_cannot_be_filled_is_never_reported_as_filled(faulty: Rig) -> None:
    index = faulty.start("a", KEYS)

    for layer in range(LAYERS):
        assert faulty.waits_for(index, layer).returns()
    assert faulty.linker.finish_layer_wise_loading(index) is False

    assert faulty.store.script.fired
    assert faulty.linker.failed_requests(index) == {"a"}
    assert tokens_of(faulty.linker) == {TokenOutcome.FAILED: 4 * 4}
    assert errors_of(faulty.linker) == {"load_errors": 1}
    faulty.assert_at_rest()


def test_l5_e2_what_could_not_be_read_is_not_promised_to_the_retry(faulty: Rig) -> None:
    assert not faulty.restore("a", KEYS)
    faulty.store.script.clear()

    again = faulty.linker.lookup("a", faulty.asked(KEYS))

    assert 4 not in again
    for length in again:
        assert faulty.linker.load(f"r{length}", faulty.transfers(KEYS[:length], 4))
        index = faulty.linker.start_layer_wise_loading()
        assert faulty.linker.finish_layer_wise_loading(index)
        assert faulty.pools.wrong_pages(faulty.transfers(KEYS[:length], 4)) == ()


def test_l5_what_was_quarantined_is_written_anew_by_the_next_offload(faulty: Rig) -> None:
    assert not faulty.restore("a", KEYS)
    faulty.store.script.clear()

    faulty.offload(KEYS)

    assert faulty.restore("b", KEYS)
    assert faulty.pools.wrong_pages(faulty.transfers(KEYS, 4)) == ()


# ---- which requests fail ----------------------------------------------------------------------


def test_b50_only_the_requests_whose_objects_are_gone_fail() -> None:
    with linked(Family.DSA) as rig:
        chains = prompts(3, 2)
        for keys in chains:
            rig.keep(keys)
        for number, keys in enumerate(chains):
            rig.linker.lookup(f"r{number}", rig.asked(keys))
            assert rig.linker.load(f"r{number}", rig.transfers(keys, 2 * number))
        gone = rig.object_keys("indexer", chains[1])
        rig.store.script.add(Rule(call=Call.OPEN_READ, fault=Evict(), keys=frozenset(gone)))

        index = rig.linker.start_layer_wise_loading()
        for layer in range(LAYERS):
            assert rig.waits_for(index, layer).returns()
        assert not rig.linker.finish_layer_wise_loading(index)

        assert rig.linker.failed_requests(index) == {"r1"}
        for number in (0, 2):
            assert rig.pools.wrong_pages(rig.transfers(chains[number], 2 * number)) == ()
        assert tokens_of(rig.linker) == {TokenOutcome.LANDED: 16, TokenOutcome.FAILED: 8}
        rig.assert_at_rest()


def test_b50_two_of_thirty_two_objects_fail_one_request() -> None:
    keys = page_keys(16)
    with linked(Family.DSA) as rig:
        rig.keep(keys)
        bad = frozenset(rig.object_keys(KV, keys[5:7]))
        rig.store.script.add(Rule(call=Call.READ, fault=Report(status=ReadStatus.FAILED), keys=bad))

        assert not rig.restore("a", keys, page=0)

        assert errors_of(rig.linker) == {"load_errors": 1}
        assert rig.linker.lookup("a", rig.asked(keys)) == [1, 2, 3, 4, 5]


def test_l5_the_requests_that_failed_are_known_until_another_batch_is_finished() -> None:
    with linked(Family.MHA) as rig:
        first, second = prompts(2, 2)
        rig.keep(first)
        rig.keep(second)
        rule = Rule(call=Call.READ, fault=Report(status=ReadStatus.FAILED), times=1)
        rig.store.script.add(rule)
        index = rig.start("a", first)
        assert not rig.linker.finish_layer_wise_loading(index)

        assert rig.linker.failed_requests(index) == {"a"}
        assert rig.linker.failed_requests(index + 1) == frozenset()
        assert rig.restore("b", second, page=8)
        assert rig.linker.failed_requests(index) == frozenset()
        assert rig.linker.failed_requests(index + 1) == frozenset()


def test_l5_the_requests_that_failed_so_far_are_known_while_the_batch_runs() -> None:
    with linked(Family.MHA) as rig, Gate() as gate:
        first, second = prompts(2, 2)
        rig.keep(first)
        rig.keep(second)
        rig.store.script.add(
            Rule(
                call=Call.READ,
                fault=Report(status=ReadStatus.MISS),
                keys=frozenset(rig.object_keys(KV, second)),
            ),
            Rule(call=Call.READ, fault=Hang(gate=gate), first=2),
        )
        for rid, keys, page in (("a", first, 0), ("b", second, 2)):
            rig.linker.lookup(rid, rig.asked(keys))
            assert rig.linker.load(rid, rig.transfers(keys, page))
        index = rig.linker.start_layer_wise_loading()
        gate.wait_for_arrivals()

        assert rig.linker.failed_requests(index) == {"b"}
        gate.open()
        assert not rig.linker.finish_layer_wise_loading(index)


def test_b53_the_failure_of_one_pool_ends_the_prefix_in_all_of_them() -> None:
    with linked(Family.DSA) as rig:
        rig.keep(KEYS)
        page = frozenset(rig.object_keys("indexer", KEYS[3:]))
        rig.store.script.add(
            Rule(call=Call.READ, fault=Report(status=ReadStatus.FAILED), keys=page)
        )
        assert not rig.restore("a", KEYS)

        assert rig.linker.lookup("a", rig.asked(KEYS)) == [1, 2, 3]
        assert rig.restore("b", KEYS[:3], page=8)
        assert rig.pools.wrong_pages(rig.transfers(KEYS[:3], 8)) == ()


def test_b56_whole_and_ranged_reads_end_in_the_same_bytes_after_the_same_fault() -> None:
    ended: list[object] = []
    for ranged in (True, False):
        with linked(Family.DSA, ranged_reads=ranged) as rig:
            rig.keep(KEYS)
            page = frozenset(rig.object_keys("indexer", KEYS[2:3]))
            rig.store.script.add(Rule(call=Call.OPEN_READ, fault=Evict(), keys=page))
            assert not rig.restore("a", KEYS)
            recomputed = rig.transfers(KEYS, 8)
            length = rig.linker.lookup("a", rig.asked(KEYS))[-1]
            rig.pools.fill(recomputed)
            rig.pools.memory.poison(0x11)
            assert rig.linker.load("a", rig.transfers(KEYS[:length], 8))
            index = rig.linker.start_layer_wise_loading()
            assert rig.linker.finish_layer_wise_loading(index)
            ended.append((length, rig.pools.memory.snapshot()))

    assert ended[0] == ended[1]


def test_e3_corrupt_bytes_are_never_restored_and_leave_the_store() -> None:
    with linked(Family.DSA) as rig:
        rig.keep(KEYS)
        (bad,) = rig.object_keys(KV, KEYS[2:3])
        rig.memory_store.tamper(bad, TamperKind.FLIP.apply(rig.memory_store.payload(bad)))

        assert not rig.restore("a", KEYS)

        assert rig.linker.failed_requests(0) == {"a"}
        assert rig.memory_store.exists([bad]) == (False,)
        assert rig.memory_store.stats().counters["corrupt"] == 1
        for span in rig.pools.group.entry_map[KV].spans:
            meant_for_it = rig.pools.memory.read(span, 6 * 4, 4)
            assert meant_for_it == b"\xff" * len(meant_for_it)
        assert rig.linker.lookup("a", rig.asked(KEYS)) == [1, 2]


@pytest.mark.parametrize("kind", [TamperKind.SHORTEN, TamperKind.LENGTHEN, TamperKind.EMPTY])
@pytest.mark.parametrize("ranged", [True, False], ids=["ranged", "whole"])
def test_dh9_an_object_of_another_length_is_a_miss_and_not_loaded_as_far_as_it_goes(
    kind: TamperKind, *, ranged: bool
) -> None:
    with linked(Family.MHA, ranged_reads=ranged) as rig:
        rig.keep(KEYS)
        for key in rig.object_keys(KV, KEYS):
            rig.memory_store.tamper(key, kind.apply(rig.memory_store.payload(key)))
        before = rig.pools.memory.snapshot()

        assert not rig.restore("a", KEYS)

        assert rig.pools.memory.snapshot() == before
        assert rig.linker.lookup("a", rig.asked(KEYS)) == []


# ---- no write after the answer ----------------------------------------------------------------


def test_l5_after_a_deadline_the_store_writes_no_more() -> None:
    with linked(options=HASTY) as rig:
        rig.keep(KEYS)
        with Gate() as gate:
            rig.store.script.add(Rule(call=Call.READ, fault=Hang(gate=gate), first=3))
            index = rig.start("a", KEYS)
            gate.wait_for_arrivals()
            assert not rig.linker.finish_layer_wise_loading(index)
            mark, before = rig.access.mark(), rig.pools.memory.snapshot()
        wait_for(lambda: rig.memory_store.kept() == 0, "the end of the late read")

        assert rig.access.writes_since(mark) == ()
        assert rig.pools.memory.snapshot() == before
        assert errors_of(rig.linker) == {"load_errors": 1}
        rig.assert_at_rest()


def test_w37_l4_a_loader_that_dies_without_a_word_is_waited_for_until_the_deadline() -> None:
    with linked(options=HASTY) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.OPEN_READ, fault=Hang(gate=gate)))
        index = rig.start("a", KEYS)

        assert rig.waits_for(index, 0).returns()
        assert rig.waits_for(index, 3).returns()

        assert not rig.linker.finish_layer_wise_loading(index)
        assert rig.linker.failed_requests(index) == {"a"}


def test_l5_a_copy_under_way_at_the_deadline_is_waited_for() -> None:
    with linked(options=replace(HASTY, load_seconds=0.001)) as rig:
        rig.keep(KEYS)
        with Gate() as gate:
            rig.access.script.add(Rule(call=Call.COPY_IN, fault=Hang(gate=gate), first=2))
            index = rig.start("a", KEYS)
            gate.wait_for_arrivals()
            finish = Waiter(lambda: rig.linker.finish_layer_wise_loading(index))
            assert finish.still_waits()
            gate.open()
            assert finish.returns()
        mark = rig.access.mark()

        assert finish.answer is False
        wait_for(lambda: rig.memory_store.kept() == 0, "the end of the late read")
        assert rig.access.writes_since(mark) == ()


def test_l5_a_read_that_lands_after_it_failed_is_refused() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        with Gate() as gate:
            rig.store.script.add(Rule(call=Call.READ, fault=LandLate(gate=gate), first=3))
            assert not rig.restore("a", KEYS)
            mark, before = rig.access.mark(), rig.pools.memory.snapshot()
        (landing,) = rig.store.landings
        landing.join()

        assert isinstance(landing.error, TransferRevokedError)
        assert rig.access.writes_since(mark) == ()
        assert rig.pools.memory.snapshot() == before


def test_b58_a_store_that_counts_before_it_copies_is_found_out() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        with Gate() as gate:
            rig.store.script.add(Rule(call=Call.READ, fault=Background(gate), first=2))
            index = rig.start("a", KEYS)
            assert rig.waits_for(index, 1).returns()
            assert not rig.linker.finish_layer_wise_loading(index)
            mark = rig.access.mark()
        for landing in rig.store.landings:
            landing.join()

        assert rig.access.writes_since(mark) == ()
        assert isinstance(rig.store.landings[0].error, TransferRevokedError)


def test_l5_a_device_that_fails_fails_the_load_and_not_the_store() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        lost = Raise(error=DeviceCopyError("device lost"))
        rig.access.script.add(Rule(call=Call.COPY_IN, fault=lost, first=4))

        assert not rig.restore("a", KEYS)

        assert rig.linker.lookup("b", rig.asked(page_keys(1, chain="other"))) == []
        assert errors_of(rig.linker) == {"load_errors": 1}


def test_l5_a_store_that_cannot_be_revoked_is_waited_for() -> None:
    with linked(options=HASTY, revocable=False) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.READ, fault=Hang(gate=gate)))
        index = rig.start("a", KEYS)
        gate.wait_for_arrivals()

        assert rig.waits_for(index, 0).returns()  # the forward runs on
        finish = Waiter(lambda: rig.linker.finish_layer_wise_loading(index))
        assert finish.still_waits()
        gate.open()

        assert finish.returns()
        assert finish.answer is False
        assert errors_of(rig.linker) == {"load_errors": 1}
        rig.assert_at_rest()


def test_l5_what_waits_behind_a_store_that_cannot_be_revoked_is_not_begun() -> None:
    with linked(options=HASTY, revocable=False) as rig, Gate() as gate:
        first, second = prompts(2, 2)
        rig.keep(first)
        rig.keep(second)
        rig.store.script.add(Rule(call=Call.READ, fault=Hang(gate=gate)))
        hung = rig.start("a", first)
        gate.wait_for_arrivals()
        behind = rig.start("b", second, page=8)

        assert not rig.linker.finish_layer_wise_loading(behind)

        assert rig.store.count(Call.OPEN_READ) == 2
        gate.open()
        assert not rig.linker.finish_layer_wise_loading(hung)
        rig.assert_at_rest()


def test_l12_a_batch_behind_a_hung_one_runs_once_that_is_given_up() -> None:
    options = replace(PATIENT, load_seconds=0.2)
    with linked(options=options) as rig, Gate() as gate:
        first, second = prompts(2, 2)
        rig.keep(first)
        rig.keep(second)
        rig.store.script.add(Rule(call=Call.READ, fault=Hang(gate=gate), times=1))
        hung = rig.start("a", first)
        gate.wait_for_arrivals()

        assert not rig.linker.finish_layer_wise_loading(hung)
        assert rig.linker.lookup("b", rig.asked(second)) == []  # the breaker is open
        assert rig.linker.load("b", rig.transfers(second, 8))
        behind = rig.linker.start_layer_wise_loading()
        assert not rig.linker.finish_layer_wise_loading(behind)

        assert rig.linker.failed_requests(behind) == {"b"}


def test_t6_l5_what_an_open_breaker_refused_is_not_quarantined() -> None:
    with linked(options=replace(PATIENT, breaker_seconds=1000)) as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))
        rig.store.script.add(Rule(call=Call.EXISTS, fault=Raise(error=OSError("gone"))))
        while "lookup_refused" not in rig.linker.metrics.snapshot().events:
            assert rig.linker.lookup("b", rig.asked(KEYS)) == []
        assert rig.linker.load("a", rig.transfers(KEYS, 4))
        index = rig.linker.start_layer_wise_loading()

        assert not rig.linker.finish_layer_wise_loading(index)

        assert rig.store.count(Call.OPEN_READ) == 0
        assert rig.linker.metrics.snapshot().events["load_refused"] == 1
        assert rig.linker.depths.quarantined == 0


def test_l5_a_load_that_waited_behind_another_is_not_quarantined() -> None:
    with linked(options=HASTY) as rig:
        first, second = prompts(2, 2)
        rig.keep(first)
        rig.keep(second)
        engine = HostEvent()
        indices = [
            rig.start("a", first, ready=[engine]),
            rig.start("b", second, page=8, ready=[engine]),
        ]

        assert [rig.linker.finish_layer_wise_loading(i) for i in indices] == [False, False]

        assert rig.linker.lookup("a", rig.asked(first))[-1] == 2
        assert rig.linker.lookup("b", rig.asked(second))[-1] == 2


def test_l3_a_session_that_fails_or_hangs_at_its_close_keeps_nobody_waiting() -> None:
    with linked(Family.MHA, options=replace(PATIENT, quiesce_seconds=0.02)) as rig:
        rig.keep(KEYS)
        with Gate() as gate:
            rig.store.script.add(
                Rule(call=Call.CLOSE_READ, fault=Raise(error=OSError("gone")), times=1),
                Rule(call=Call.CLOSE_READ, fault=Hang(gate=gate), first=2, times=1),
            )
            for number in range(4):
                assert rig.restore(f"r{number}", KEYS)
            gate.wait_for_arrivals()
        assert errors_of(rig.linker) == {"release_errors": 1}


def test_l9_with_every_loader_hung_loads_fail_at_once(caplog: pytest.LogCaptureFixture) -> None:
    options = replace(PATIENT, load_seconds=0.02, breaker_seconds=0.001)
    with linked(Family.MHA, options=options) as rig, Gate() as gate:
        rig.store.script.add(Rule(call=Call.OPEN_READ, fault=Hang(gate=gate)))

        def load() -> bool:
            assert rig.linker.load("a", rig.transfers(KEYS, 4))
            return rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())

        while gate.arrived < 8:
            assert not load()
        assert not load()

        assert gate.arrived == 8
        assert "load failed: store=FaultStore pool=- key=-: every worker hangs" in caplog.text
        gate.open()
        rig.keep(KEYS)
        wait_for(load, "a loader that came back")


def test_b59_after_a_thousand_random_failures_nothing_is_held() -> None:
    chance = random.Random(1)  # noqa: S311 - chooses faults, not secrets
    options = replace(PATIENT, quarantine_seconds=0.0001, breaker_seconds=0.0001)
    kinds = (Report(status=ReadStatus.FAILED), Report(status=ReadStatus.MISS), AnswerNone())
    rules = [Rule(call=Call.READ, fault=fault, chance=0.05, share=0.5) for fault in kinds] + [
        Rule(call=call, fault=Raise(error=OSError("gone")), chance=0.05)
        for call in (Call.HOLD, Call.OPEN_READ, Call.READ, Call.CLOSE_READ, Call.RELEASE)
    ]
    with linked(Family.DSA, options=options) as rig:
        rig.keep(KEYS)
        rig.store.script.add(*rules)
        landed = 0
        for number in range(1000):
            length = chance.choice(rig.linker.lookup(f"r{number}", rig.asked(KEYS)) or [0])
            if not rig.linker.load(f"r{number}", rig.transfers(KEYS[:length], 4)):
                rig.linker.reset()
                continue
            if chance.random() < 0.1:
                assert rig.linker.cancel_queued_load(f"r{number}")
                continue
            index = rig.linker.start_layer_wise_loading()
            if rig.linker.finish_layer_wise_loading(index):
                landed += 1
                assert rig.pools.wrong_pages(rig.transfers(KEYS[:length], 4)) == ()

        rig.linker.reset()
        rig.store.script.clear()
        assert 100 < landed < 900
        assert rig.linker.pending == 0
        assert rig.linker.metrics.snapshot().tokens_open == 0
