"""What was promised and could not be read: missing for a while, or until it is written anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
from linker_rig import PATIENT, errors_of, linked, tokens_of, wait_for

from kvlinker.metrics import TokenOutcome
from kvlinker.pools import KV
from kvlinker.store import ReadStatus
from kvlinker.testing import Call, Evict, Family, Gate, Hang, Raise, Report, Rule, page_keys

KEYS = page_keys(4)


def test_l5_quarantine_expires() -> None:
    with linked(options=replace(PATIENT, quarantine_seconds=0.02, hold_seconds=0.001)) as rig:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.READ, fault=Report(status=ReadStatus.FAILED)))
        assert not rig.restore("a", KEYS)
        rig.store.script.clear()

        wait_for(lambda: rig.linker.lookup("a", rig.asked(KEYS)) != [], "the expiry")

        assert rig.linker.lookup("a", rig.asked(KEYS))[-1] == 4


def test_l11_tokens_of_pages_in_quarantine_are_counted_as_such() -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS)
        bad = Report(status=ReadStatus.FAILED)
        rig.store.script.add(Rule(call=Call.READ, fault=bad, positions=frozenset({2})))
        assert not rig.restore("a", KEYS)

        assert rig.linker.lookup("a", rig.asked(KEYS)) == [1, 2]

        assert tokens_of(rig.linker)[TokenOutcome.QUARANTINED] == 2 * 4
        assert rig.linker.metrics.snapshot().misses_by_pool == {}


def test_l11_a_page_that_is_gone_before_the_one_in_quarantine_is_a_miss() -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS)
        bad = Report(status=ReadStatus.FAILED)
        rig.store.script.add(Rule(call=Call.READ, fault=bad, positions=frozenset({2})))
        assert not rig.restore("a", KEYS)
        rig.memory_store.delete(rig.object_keys(KV, KEYS[1:2]))

        assert rig.linker.lookup("a", rig.asked(KEYS)) == [1]

        assert rig.linker.metrics.snapshot().misses_by_pool == {KV: 3 * 4}


def test_l11_a_window_in_quarantine_is_counted_as_such() -> None:
    with linked(Family.V4) as rig:
        rig.keep(KEYS)
        rig.store.script.add(
            Rule(call=Call.READ, fault=Report(status=ReadStatus.FAILED), pool="swa")
        )
        assert not rig.restore("a", KEYS)

        assert rig.linker.lookup("a", rig.asked(KEYS)) == []

        assert tokens_of(rig.linker)[TokenOutcome.QUARANTINED] == 4 * 4


# ---- what the store does not promise any more -------------------------------------------------


def test_l5_e2_what_another_rank_wrote_anew_is_found_by_the_rank_that_could_not_read_it() -> None:
    with linked() as reader, linked(memory_store=reader.memory_store) as writer:
        writer.keep(KEYS)
        reader.store.script.add(Rule(call=Call.OPEN_READ, fault=Evict()))
        assert not reader.restore("a", KEYS)
        reader.store.script.clear()
        assert reader.linker.lookup("b", reader.asked(KEYS)) == []
        assert TokenOutcome.QUARANTINED not in tokens_of(reader.linker)

        writer.offload(KEYS)

        assert reader.restore("c", KEYS)
        assert reader.pools.wrong_pages(reader.transfers(KEYS, 4)) == ()


def test_l5_what_the_store_still_promises_stays_in_quarantine() -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS)
        rig.store.script.add(
            Rule(call=Call.READ, fault=Report(status=ReadStatus.MISS), positions=frozenset({1, 2}))
        )
        rig.store.script.add(Rule(call=Call.OPEN_READ, fault=Evict(), positions=frozenset({2})))
        assert not rig.restore("a", KEYS)
        rig.store.script.clear()

        assert rig.linker.depths.quarantined == 1
        assert rig.linker.lookup("b", rig.asked(KEYS)) == [1]


@pytest.mark.parametrize("status", [ReadStatus.MISS, ReadStatus.CORRUPT, ReadStatus.FAILED])
def test_l5_where_the_store_cannot_say_all_stays_in_quarantine(status: ReadStatus) -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.READ, fault=Report(status=status)))
        rig.store.script.add(Rule(call=Call.EXISTS, fault=Raise(error=OSError("gone")), first=2))

        assert not rig.restore("a", KEYS)

        assert rig.store.script.fired
        assert rig.linker.depths.quarantined == len(KEYS)
        assert errors_of(rig.linker) == {"load_errors": 1, "lookup_errors": 1}


def test_l5_a_store_that_hangs_when_it_is_asked_again_fails_the_load_at_its_deadline() -> None:
    gate = Gate()
    options = replace(PATIENT, load_seconds=0.2)
    with linked(Family.MHA, options=options) as rig:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.READ, fault=Report(status=ReadStatus.MISS)))
        rig.store.script.add(Rule(call=Call.EXISTS, fault=Hang(gate=gate), first=2))

        assert not rig.restore("a", KEYS)

        assert rig.linker.depths.quarantined == len(KEYS)
        gate.open()
