"""A lookup answers with every restorable boundary, holds it, remembers it, and never takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from linker_rig import (
    FAMILIES,
    NAMESPACE,
    PATIENT,
    Rig,
    errors_of,
    linked,
    prompts,
    threads_named,
    tokens_of,
    wait_for,
)

from kvlinker.errors import StoreError
from kvlinker.metrics import TokenOutcome
from kvlinker.pools import KV
from kvlinker.testing import (
    AnswerNone,
    Answers,
    Call,
    Evict,
    Family,
    Fault,
    FaultedCall,
    Gate,
    Hang,
    Lie,
    Miscount,
    Raise,
    Rule,
    page_keys,
)
from kvlinker.transfers import HitPolicy, PoolTransfer

KEYS = page_keys(6)
IMPATIENT = replace(PATIENT, lookup_seconds=0.2, breaker_seconds=1000)


@contextmanager
def given_up_in(
    call: Call,
    *,
    family: Family = Family.DSA,
    then: Iterable[Rule] = (),
    times: int | None = None,
    breaker_seconds: float = 1000,
) -> Iterator[tuple[Rig, Gate]]:
    """Give a linker that has given a lookup up while the store hung in a call, which goes on once the gate opens.

    Where the lookup did not come to the call in its time, another one has more.
    """
    for seconds in (IMPATIENT.lookup_seconds, 2.0, 20.0):
        options = replace(IMPATIENT, lookup_seconds=seconds, breaker_seconds=breaker_seconds)
        with linked(family, options=options) as rig, Gate(limit_seconds=60) as gate:
            rig.keep(KEYS)
            rig.store.script.add(Rule(call=call, fault=Hang(gate=gate), times=times), *then)
            assert rig.linker.lookup("a", rig.asked(KEYS)) == []
            if gate.arrived:
                yield rig, gate
                return
    pytest.fail(f"the lookup never came to {call}")


@pytest.mark.parametrize("family", FAMILIES)
def test_l2_a_stored_prefix_is_restorable_at_its_end(family: Family) -> None:
    with linked(family) as rig:
        rig.keep(KEYS)

        found = rig.linker.lookup("a", rig.asked(KEYS))

        assert found[-1] == 6


@pytest.mark.parametrize("family", [Family.MHA, Family.MHA_UNPACKED, Family.DSA, Family.SCATTERED])
def test_l2_pools_of_all_pages_are_restorable_at_every_length(family: Family) -> None:
    with linked(family) as rig:
        rig.keep(KEYS[:4])

        assert rig.linker.lookup("a", rig.asked(KEYS)) == [1, 2, 3, 4]


def test_l2_windows_make_the_set_sparse() -> None:
    with linked(Family.V4) as rig:
        rig.keep(KEYS, lengths=[3])

        assert rig.linker.lookup("a", rig.asked(KEYS)) == [3, 6]


def test_l2_a_state_is_restorable_only_where_one_was_stored() -> None:
    with linked(Family.MAMBA) as rig:
        rig.keep(KEYS, lengths=[2, 5])

        assert rig.linker.lookup("a", rig.asked(KEYS)) == [2, 5, 6]


def test_l2_a_window_is_as_long_as_its_key_list_whatever_keys_that_holds() -> None:
    with linked(Family.V4) as rig:
        rig.keep(KEYS)
        kv, swa = sorted(rig.asked(KEYS), key=lambda transfer: transfer.name != KV)
        other_window = replace(swa, keys=page_keys(2, chain="other"))
        longer_window = replace(swa, keys=page_keys(3, chain="other"))

        assert rig.linker.lookup("a", [kv, other_window]) == [6]
        assert rig.linker.lookup("b", [kv, longer_window]) == []


def test_l2_a_policy_of_kv_is_overridden_and_other_pools_keep_theirs() -> None:
    with linked(Family.MAMBA) as rig:
        rig.keep(KEYS)
        kv, mamba = rig.asked(KEYS)
        trailing_kv = replace(kv, hit_policy=HitPolicy.TRAILING_PAGES)
        every_state = PoolTransfer(name="mamba", keys=KEYS, hit_policy=HitPolicy.ALL_PAGES)

        assert rig.linker.lookup("a", [trailing_kv, mamba]) == [6]
        assert rig.linker.lookup("b", [kv, every_state]) == []


def test_l2_key_0_is_the_first_page_that_the_device_lacks() -> None:
    with linked() as rig:
        rig.keep(KEYS[:5])

        assert rig.linker.lookup("a", rig.asked(KEYS[2:])) == [1, 2, 3]


def test_b28_external_pages_are_a_prefix_of_the_list() -> None:
    with linked() as rig:
        rig.keep(KEYS[:2])

        boundaries = rig.linker.lookup("a", rig.asked(KEYS[:3]))

        assert boundaries == [1, 2]
        assert rig.restore("b", KEYS[: boundaries[-1]])
        assert rig.pools.wrong_pages(rig.transfers(KEYS[:2], 4)) == ()


def test_b25_a_page_that_is_gone_ends_the_prefix_and_nothing_behind_it_is_held() -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS[:3])
        rig.memory_store.delete(rig.object_keys(KV, [KEYS[1]]))

        boundaries = rig.linker.lookup("a", rig.asked(KEYS[:3]))

        assert boundaries == [1]
        assert rig.memory_store.kept() == 1


def test_b24_a_prefix_without_its_head_is_counted_and_its_head_is_taken_again() -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS[:4])
        rig.memory_store.delete(rig.object_keys(KV, KEYS[:2]))

        assert rig.linker.lookup("a", rig.asked(KEYS[:4])) == []
        rig.offload(KEYS[:4])

        events = rig.linker.metrics.snapshot().events
        assert events["hole_at_page_0"] == 1
        assert events["offload_objects"] == 2
        assert rig.linker.lookup("b", rig.asked(KEYS[:4])) == [1, 2, 3, 4]


def test_b24_a_hole_further_on_is_counted_as_another() -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS[:4])
        rig.memory_store.delete(rig.object_keys(KV, KEYS[1:2]))

        rig.linker.lookup("a", rig.asked(KEYS[:4]))

        events = rig.linker.metrics.snapshot().events
        assert "hole_at_page_0" not in events
        assert events["hole_at_page_n"] == 1


def test_b30_nothing_hit_is_an_empty_list() -> None:
    with linked() as rig:
        assert rig.linker.lookup("a", rig.asked(KEYS)) == []
        assert rig.linker.lookup("b", rig.asked(())) == []
        assert rig.linker.lookup("c", ()) == []


def test_l2_a_repeated_question_is_answered_from_memory() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        first = rig.linker.lookup("a", rig.asked(KEYS))
        calls = len(rig.store.records)

        assert rig.linker.lookup("a", rig.asked(KEYS)) == first
        assert len(rig.store.records) == calls
        counted = rig.linker.metrics.snapshot()
        assert counted.events["repeated_lookups"] == 1
        assert counted.tokens_looked_up == len(KEYS) * 4


def test_l2_a_repeated_miss_is_answered_from_memory() -> None:
    with linked(options=replace(PATIENT, miss_seconds=60)) as rig:
        rig.linker.lookup("a", rig.asked(KEYS))
        rig.keep(KEYS)

        assert rig.linker.lookup("a", rig.asked(KEYS)) == []
        assert rig.linker.metrics.snapshot().events["repeated_lookups"] == 1


def test_l2_a_waiting_request_finds_what_others_stored_meanwhile() -> None:
    with linked(options=replace(PATIENT, miss_seconds=0.001)) as rig:
        rig.linker.lookup("a", rig.asked(KEYS))
        rig.keep(KEYS)

        wait_for(lambda: bool(rig.linker.lookup("a", rig.asked(KEYS))), "a fresh answer")

        assert rig.linker.lookup("a", rig.asked(KEYS))[-1] == 6
        assert rig.linker.metrics.snapshot().closes


def test_l2_another_question_of_the_same_request_is_asked_anew() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))

        assert rig.linker.lookup("a", rig.asked(KEYS[:3])) == [1, 2, 3]
        assert tokens_of(rig.linker) == {TokenOutcome.NOT_TAKEN: 6 * 4}


def test_l2_a_question_is_another_one_where_the_namespace_changed() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))

        rig.linker.reset(namespace=replace(NAMESPACE, weights_version="2"))

        assert rig.linker.lookup("a", rig.asked(KEYS)) == []


def test_l2_a_late_store_is_a_miss() -> None:
    with linked(options=IMPATIENT) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.EXISTS, fault=Hang(gate=gate)))

        assert rig.linker.lookup("a", rig.asked(KEYS)) == []
        assert errors_of(rig.linker) == {"lookup_errors": 1}
        assert tokens_of(rig.linker) == {TokenOutcome.MISS: 6 * 4}


def test_l3_an_answer_that_comes_too_late_lets_go_of_its_hold() -> None:
    with given_up_in(Call.HOLD) as (rig, gate):
        gate.open()

        wait_for(lambda: rig.store.count(Call.RELEASE) == 1, "the release of the late hold")
        rig.assert_at_rest()


@pytest.mark.parametrize("family", [Family.DSA, Family.MHA], ids=["another pool", "a hold"])
def test_l2_a_lookup_that_nobody_waits_for_asks_no_more(family: Family) -> None:
    with given_up_in(Call.EXISTS, family=family) as (rig, gate):
        asked = rig.store.count(Call.EXISTS)
        gate.open()
        wait_for(lambda: not threads_named("kvlinker-lookup"), "the end of the late lookup")

        assert rig.store.count(Call.EXISTS) == asked
        assert rig.store.count(Call.HOLD) == 0


def test_l1_a_lookup_that_fails_late_is_reported_once() -> None:
    gone = Rule(call=Call.EXISTS, fault=Raise(error=OSError("gone")))
    with given_up_in(Call.EXISTS, then=[gone]) as (rig, gate):
        gate.open()
        wait_for(lambda: not threads_named("kvlinker-lookup"), "the end of the late lookup")

        assert errors_of(rig.linker) == {"lookup_errors": 1}


def test_l9_with_every_worker_hung_lookups_are_misses_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = replace(PATIENT, lookup_seconds=0.005, breaker_seconds=0.0001)
    with linked(options=options) as rig, Gate() as gate:
        rig.store.script.add(Rule(call=Call.EXISTS, fault=Hang(gate=gate)))
        while gate.arrived < 8:
            assert rig.linker.lookup("a", rig.asked(KEYS)) == []

        assert rig.linker.lookup("a", rig.asked(KEYS)) == []

        assert gate.arrived == 8
        assert "lookup failed: store=FaultStore pool=- key=-: every worker hangs" in caplog.text
        assert rig.linker.metrics.snapshot().tokens_open == 0


def test_t6_a_dead_store_costs_one_timeout_and_not_one_per_call() -> None:
    with given_up_in(Call.EXISTS) as (rig, gate):
        asked = rig.store.count(Call.EXISTS)

        answers = [rig.linker.lookup(f"b{i}", rig.asked(KEYS)) for i in range(20)]

        assert answers == [[]] * 20
        assert rig.store.count(Call.EXISTS) == asked
        assert gate.arrived == 1
        assert errors_of(rig.linker) == {"lookup_errors": 1}
        assert rig.linker.metrics.snapshot().events["lookup_refused"] == 20


def test_t6_a_store_that_is_up_again_is_found_out_by_one_try() -> None:
    with given_up_in(Call.EXISTS, times=1, breaker_seconds=0.02) as (rig, gate):
        gate.open()

        wait_for(lambda: rig.linker.lookup("a", rig.asked(KEYS)) != [], "an answer")

        assert rig.linker.lookup("a", rig.asked(KEYS))[-1] == 6


def test_l2_a_store_that_raises_is_a_miss_and_is_asked_again() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        rule = Rule(call=Call.EXISTS, fault=Raise(error=StoreError("down")), times=1)
        rig.store.script.add(rule)

        assert rig.linker.lookup("a", rig.asked(KEYS)) == []
        assert rig.linker.lookup("a", rig.asked(KEYS))[-1] == 6


@pytest.mark.parametrize("call", [Call.EXISTS, Call.HOLD])
@pytest.mark.parametrize(
    "fault", [AnswerNone(), Miscount(change=1), Miscount(change=-1)], ids=["none", "more", "less"]
)
def test_t4_b81_an_answer_of_the_wrong_count_is_a_miss(
    call: Call, fault: AnswerNone | Miscount
) -> None:
    with linked() as rig:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=call, fault=fault))

        assert rig.linker.lookup("a", rig.asked(KEYS)) == []
        assert errors_of(rig.linker) == {"lookup_errors": 1}
        assert rig.memory_store.kept() == 0


def test_l3_what_an_answer_needs_is_held() -> None:
    with linked(Family.V4) as rig:
        rig.keep(KEYS, lengths=[3])

        rig.linker.lookup("a", rig.asked(KEYS))

        windows = 2 + 2  # of two boundaries that share no page, in two entries fed from swa
        assert rig.memory_store.kept() == 2 * len(KEYS) + 2 * windows


def test_l3_a_pool_that_no_boundary_needs_is_not_held() -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS)

        rig.linker.lookup("a", rig.asked((*KEYS[:2], *page_keys(3, chain="other"))))

        assert rig.memory_store.kept() == 2


def test_l3_held_objects_survive_eviction_until_they_are_loaded() -> None:
    size = 6 * (16 + 24) * 4 * 4
    with linked(Family.MHA, capacity_bytes=size) as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))

        other = page_keys(4, chain="other")
        rig.pools.fill(rig.transfers(other))
        assert rig.linker.offload(rig.transfers(other))
        assert not rig.completion()

        assert rig.restore("a", KEYS)
        rig.assert_at_rest()


def test_l3_a_new_question_replaces_the_hold() -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))

        rig.linker.lookup("a", rig.asked(KEYS[:2]))

        wait_for(lambda: rig.memory_store.kept() == 2, "the release of the old hold")
        calls = [record.call for record in rig.store.records]
        assert calls.index(Call.RELEASE) > [i for i, c in enumerate(calls) if c is Call.HOLD][1]


def test_l3_a_boundary_that_nobody_loads_expires() -> None:
    with linked(options=replace(PATIENT, hold_seconds=0.02)) as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))

        wait_for(lambda: rig.linker.pending == 0, "the expiry")

        assert tokens_of(rig.linker) == {TokenOutcome.ABANDONED: 6 * 4}
        rig.assert_at_rest()


def test_l3_boundaries_that_could_not_be_held_are_not_promised() -> None:
    with linked(Family.V4) as rig:
        rig.keep(KEYS, lengths=[3])
        gone = rig.object_keys("swa", KEYS[4:5])
        rig.store.script.add(Rule(call=Call.HOLD, fault=Evict(), keys=frozenset(gone)))

        assert rig.linker.lookup("a", rig.asked(KEYS)) == [3]
        assert rig.linker.metrics.snapshot().misses_by_pool == {"swa": 3 * 4}


def test_l3_a_hold_of_nothing_is_released() -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.HOLD, fault=Lie(exists=False)))

        assert rig.linker.lookup("a", rig.asked(KEYS)) == []
        wait_for(lambda: rig.store.count(Call.RELEASE) == 1, "the release")
        assert rig.memory_store.kept() == 0


def test_l3_without_leases_a_vanished_object_fails_the_load() -> None:
    with linked(Family.MHA, leases=False) as rig:
        rig.keep(KEYS)
        assert rig.linker.lookup("a", rig.asked(KEYS))[-1] == 6
        assert rig.store.count(Call.HOLD) == 0

        rig.memory_store.delete(rig.object_keys(KV, KEYS[5:]))
        assert rig.linker.load("a", rig.transfers(KEYS, 4))
        index = rig.linker.start_layer_wise_loading()

        assert not rig.linker.finish_layer_wise_loading(index)
        assert rig.linker.lookup("a", rig.asked(KEYS))[-1] == 5


def test_l9_remembered_lookups_are_bounded_and_the_oldest_goes() -> None:
    with linked(Family.MHA, options=replace(PATIENT, max_remembered_lookups=3)) as rig:
        chains = prompts(5, 1)
        for keys in chains:
            rig.keep(keys)
        for rid, keys in enumerate(chains):
            rig.linker.lookup(f"r{rid}", rig.asked(keys))

        assert rig.linker.pending == 3
        wait_for(lambda: rig.memory_store.kept() == 3, "the release of the oldest holds")
        assert tokens_of(rig.linker) == {TokenOutcome.ABANDONED: 2 * 4}


def test_l3_a_hold_that_fails_or_hangs_at_its_release_stops_no_other_lookup() -> None:
    with linked(Family.MHA, options=replace(PATIENT, quiesce_seconds=0.02)) as rig:
        rig.keep(KEYS)
        with Gate() as gate:
            rig.store.script.add(
                Rule(call=Call.RELEASE, fault=Raise(error=OSError("gone")), times=1),
                Rule(call=Call.RELEASE, fault=Hang(gate=gate), first=2, times=1),
            )
            for length in range(6, 0, -1):
                assert rig.linker.lookup("a", rig.asked(KEYS[:length]))[-1] == length
            gate.wait_for_arrivals()
            wait_for(lambda: rig.store.count(Call.RELEASE) >= 2, "the releases")
        assert errors_of(rig.linker) == {"release_errors": 1}


def test_b88_a_store_of_whole_objects_serves_what_it_says_it_has() -> None:
    with linked(Family.V4, ranged_reads=False) as rig:
        rig.keep(KEYS)

        assert rig.linker.lookup("a", rig.asked(KEYS)) == [6]
        assert rig.restore("a", KEYS)
        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()


@pytest.mark.parametrize("answer", [True, 1, 1.0, "yes", None, b"\x01"])
def test_x05_only_a_true_true_counts_and_only_integers_leave(answer: object) -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.EXISTS, fault=Saying(answer)))

        boundaries = rig.linker.lookup("a", rig.asked(KEYS))

        assert boundaries == ([1, 2, 3, 4, 5, 6] if answer is True else [])
        assert [type(boundary) for boundary in boundaries] == [int] * len(boundaries)


@dataclass(frozen=True, slots=True)
class Saying(Fault):
    """Answers with one value for every key."""

    value: object

    @property
    def calls(self) -> frozenset[Call]:
        return frozenset({Call.EXISTS})

    def around(
        self, call: FaultedCall, affected: frozenset[int], proceed: Callable[[], Answers]
    ) -> Answers:
        del affected
        proceed()
        return [self.value] * call.count


@pytest.mark.parametrize("family", FAMILIES)
def test_l2_boundaries_of_too_few_tokens_are_not_offered(family: Family) -> None:
    with linked(family) as plain:
        page_size = plain.linker.group.page_size
    with linked(family, options=replace(PATIENT, min_hit_tokens=5 * page_size)) as rig:
        rig.keep(KEYS, lengths=(4, 5))

        assert rig.linker.lookup("a", rig.asked(KEYS)) == [5, 6]


def test_l11_what_is_too_short_is_held_by_nobody_and_counted_as_not_taken() -> None:
    with linked(Family.MHA, options=replace(PATIENT, min_hit_tokens=10_000)) as rig:
        rig.keep(KEYS[:4])

        found = rig.linker.lookup("a", rig.asked(KEYS))

        page_size = rig.linker.group.page_size
        assert found == []
        assert rig.memory_store.kept() == 0
        assert tokens_of(rig.linker) == {
            TokenOutcome.NOT_TAKEN: 4 * page_size,
            TokenOutcome.MISS: 2 * page_size,
        }


def test_depths_say_what_is_open() -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))
        rig.linker.lookup("b", rig.asked(KEYS))
        rig.linker.load("b", rig.transfers(KEYS))

        depths = rig.linker.depths

        assert (depths.lookups, depths.loads, depths.offloads) == (1, 1, 0)
        assert depths.quarantined == 0


def test_what_was_moved_is_counted_for_each_pool() -> None:
    with linked(Family.DSA) as rig:
        rig.keep(KEYS)
        rig.linker.load("a", rig.transfers(KEYS))
        rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())
        rig.linker.offload(rig.transfers(page_keys(2, chain="other")))
        wait_for(lambda: rig.linker.num_completed_offloads() == 1, "the completion")

        pools = rig.linker.metrics.snapshot().pools

        for entry in rig.linker.group.entries:
            assert pools[entry.name].load_bytes == 6 * entry.page_bytes
            assert pools[entry.name].offload_bytes == 2 * entry.page_bytes
            assert pools[entry.name].load_seconds > 0
            assert pools[entry.name].offload_seconds > 0
