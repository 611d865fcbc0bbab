"""Faults happen when a script says so, do what they say, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import (
    ContractError,
    StoreClosedError,
    StoreTimeoutError,
    TransferRevokedError,
)
from kvlinker.plans import TransferPlan
from kvlinker.store import (
    Integrity,
    ReadRequest,
    ReadSession,
    ReadStatus,
    StoreCapabilities,
    WriteBatch,
    WriteStatus,
)
from kvlinker.testing import (
    AnswerNone,
    Call,
    CopyHalf,
    Evict,
    FaultStore,
    FlipBytes,
    Gate,
    Hang,
    LandLate,
    Lie,
    MemoryStore,
    Miscount,
    Moment,
    Raise,
    Report,
    Rule,
    Slow,
    Tamper,
    TamperKind,
    fake_group,
    page_keys,
)

KEYS = page_keys(8)
PAGE = 640
OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
WRITTEN, FAILED = WriteStatus.WRITTEN, WriteStatus.FAILED


class Bench:
    """A fault store around a memory store, and pools whose first four pages are stored."""

    def __init__(self, *rules: Rule, store: MemoryStore | None = None, seed: int = 0) -> None:
        self.inner = store or MemoryStore()
        self.store = FaultStore(self.inner, seed=seed)
        self.pools = fake_group(pages=32)
        self.entry = self.pools.group.entries[0]
        self.access: DeviceAccess = self.pools.access()
        self.pools.fill(self.pools.page_transfers(KEYS, {"kv": range(8)}))
        self.write(KEYS[:4], 0)
        self.store.script.add(*rules)

    def plan(self, first: int, count: int) -> TransferPlan:
        slots = self.pools.slots("kv", range(first, first + count))
        return self.entry.page_plan(self.entry.prepare_locations(slots))

    def batch(self, keys: Sequence[bytes], first: int) -> WriteBatch:
        plan = self.plan(first, len(keys))
        return WriteBatch(keys=tuple(keys), plan=plan, fingerprint=b"f")

    def write(
        self,
        keys: Sequence[bytes],
        first: int,
        may_publish: Callable[[], bool] = lambda: True,
        access: DeviceAccess | None = None,
    ) -> tuple[WriteStatus, ...]:
        batches = [self.batch(keys, first)]
        return self.store.write(batches, access or self.access, may_publish=may_publish)[0]

    def open(self, keys: Sequence[bytes]) -> ReadSession:
        request = ReadRequest(keys=tuple(keys), object_bytes=PAGE, fingerprint=b"f")
        return self.store.open_read(request)

    def read(
        self, keys: Sequence[bytes] = KEYS[:4], access: DeviceAccess | None = None
    ) -> tuple[ReadStatus, ...]:
        with self.open(keys) as session:
            return session.read(self.plan(16, len(keys)), access or self.access)

    def wrong(self, keys: Sequence[bytes] = KEYS[:4]) -> set[int]:
        """Pages from 16 on that do not hold the keys' bytes."""
        pages = range(16, 16 + len(keys))
        transfers = self.pools.page_transfers(keys, {"kv": pages})
        return {fault.page for fault in self.pools.wrong_pages(transfers)}

    def untouched(self) -> bool:
        """Whether pages 16 to 19 hold what fresh memory does."""
        fresh = b"\xa5" * 16
        span = self.entry.spans[0]
        return all(self.pools.memory.read(span, row) == fresh for row in range(64, 80))


def test_without_rules_a_fault_store_is_the_store() -> None:
    bench = Bench()

    assert bench.store.exists(KEYS[2:6]) == (True, True, False, False)
    assert bench.write(KEYS[4:6], 4) == (WRITTEN, WRITTEN)
    assert bench.read() == (OK,) * 4
    assert bench.wrong() == set()
    assert bench.store.delete(KEYS[:1]) == (True,)
    assert bench.store.stats() == bench.inner.stats()
    assert bench.store.capabilities == bench.inner.capabilities
    assert bench.store.clear(KEYS[1][:4]) == 1
    bench.store.register(bench.pools.group.regions)
    bench.store.unregister()
    bench.store.close()
    with pytest.raises(StoreClosedError):
        bench.store.exists(KEYS)
    assert bench.store.script.fired == ()


def test_records_say_which_calls_came_with_which_keys_from_which_thread() -> None:
    bench = Bench()

    bench.read(KEYS[1:3])

    kinds = [record.call for record in bench.store.records]
    assert kinds == [Call.WRITE, Call.OPEN_READ, Call.READ, Call.CLOSE_READ]
    read = bench.store.records[2]
    assert (read.pool, read.keys) == ("kv", KEYS[1:3])
    assert read.thread == threading.current_thread().name
    assert bench.store.count(Call.READ) == 1


def test_capabilities_can_be_claimed() -> None:
    claimed = StoreCapabilities(
        persistent=True, shared=True, ranged_reads=True, integrity=Integrity.LENGTH
    )

    assert FaultStore(MemoryStore(), capabilities=claimed).capabilities is claimed


ALL_CALLS: dict[Call, Callable[[Bench], object]] = {
    Call.EXISTS: lambda bench: bench.store.exists(KEYS[:1]),
    Call.HOLD: lambda bench: bench.store.hold(KEYS[:1], seconds=1),
    Call.RELEASE: lambda bench: bench.store.hold(KEYS[:1], seconds=1).release(),
    Call.WRITE: lambda bench: bench.write(KEYS[4:5], 4),
    Call.OPEN_READ: lambda bench: bench.open(KEYS[:1]),
    Call.READ: lambda bench: bench.read(),
    Call.CLOSE_READ: lambda bench: bench.open(KEYS[:1]).close(),
    Call.DELETE: lambda bench: bench.store.delete(KEYS[:1]),
    Call.CLEAR: lambda bench: bench.store.clear(b""),
    Call.STATS: lambda bench: bench.store.stats(),
    Call.REGISTER: lambda bench: bench.store.register(()),
    Call.UNREGISTER: lambda bench: bench.store.unregister(),
    Call.CLOSE: lambda bench: bench.store.close(),
}


@pytest.mark.parametrize("call", ALL_CALLS)
@pytest.mark.parametrize("error", [OSError("disk"), SystemExit(3), ValueError("odd")])
def test_every_call_can_raise_anything(call: Call, error: BaseException) -> None:
    bench = Bench(Rule(call=call, fault=Raise(error=error), times=1))

    with pytest.raises(type(error), match=str(error)) as raised:
        ALL_CALLS[call](bench)
    again = ALL_CALLS[call](bench)

    assert raised.value is not error
    assert error.__traceback__ is None
    assert bench.store.script.times_fired(Raise) == 1
    assert again is not NotImplemented


def test_an_error_after_the_work_leaves_the_work_done() -> None:
    bench = Bench(
        Rule(call=Call.WRITE, fault=Raise(error=OSError("late"), moment=Moment.AFTER)),
        Rule(call=Call.HOLD, fault=Raise(error=OSError("late"), moment=Moment.AFTER)),
        Rule(call=Call.OPEN_READ, fault=Raise(error=OSError("late"), moment=Moment.AFTER)),
    )

    with pytest.raises(OSError, match="late"):
        bench.write(KEYS[4:5], 4)
    with pytest.raises(OSError, match="late"):
        bench.store.hold(KEYS[:2], seconds=60)
    with pytest.raises(OSError, match="late"):
        bench.open(KEYS[:2])

    assert bench.inner.exists(KEYS[4:5]) == (True,)
    assert bench.inner.kept() == 0


def test_an_error_before_publishing_leaves_nothing_visible() -> None:
    bench = Bench(
        Rule(call=Call.WRITE, fault=Raise(error=OSError("full"), moment=Moment.BEFORE_PUBLISH))
    )
    asked: list[bool] = []

    with pytest.raises(OSError, match="full"):
        bench.write(KEYS[4:5], 4, may_publish=lambda: not asked.append(True))  # type: ignore[func-returns-value] # None is the answer

    assert asked == []
    assert bench.inner.exists(KEYS[4:5]) == (False,)


@pytest.mark.parametrize(
    ("moment", "stored"),
    [(Moment.BEFORE, False), (Moment.BEFORE_PUBLISH, False), (Moment.AFTER, True)],
)
def test_a_write_hangs_at_its_moment_until_the_gate_opens(moment: Moment, *, stored: bool) -> None:
    gate = Gate()
    bench = Bench(Rule(call=Call.WRITE, fault=Hang(gate=gate, moment=moment)))

    with ThreadPoolExecutor(1) as pool, gate:
        write = pool.submit(bench.write, KEYS[4:5], 4)
        gate.wait_for_arrivals()
        during = (bench.store.running, bench.inner.exists(KEYS[4:5]))
        gate.open()

    assert during == (1, (stored,))
    assert bench.store.running == 0
    assert write.result() == (WRITTEN,)


def test_a_slow_call_takes_its_time_and_is_right() -> None:
    bench = Bench(Rule(call=Call.EXISTS, fault=Slow(seconds=0.001)))

    assert bench.store.exists(KEYS[:1]) == (True,)
    assert bench.store.script.times_fired(Slow) == 1


def test_b58_none_instead_of_an_answer() -> None:
    kinds = (
        Call.EXISTS,
        Call.HOLD,
        Call.WRITE,
        Call.OPEN_READ,
        Call.DELETE,
        Call.CLEAR,
        Call.STATS,
    )
    bench = Bench(*(Rule(call=call, fault=AnswerNone()) for call in kinds))

    answers: list[object] = [
        bench.store.exists(KEYS),
        bench.store.hold(KEYS, seconds=1).present,
        bench.store.write([bench.batch(KEYS[4:5], 4)], bench.access, may_publish=lambda: True),
        bench.open(KEYS[:1]),
        bench.store.delete(KEYS[:1]),
        bench.store.stats(),
        bench.store.clear(b""),
    ]

    assert answers == [None] * 7
    assert bench.inner.stats().objects == 0
    assert bench.inner.kept() == 0


def test_a_read_answers_none_and_has_filled_the_pages() -> None:
    bench = Bench(Rule(call=Call.READ, fault=AnswerNone()))

    answer: object = bench.read()

    assert answer is None
    assert bench.wrong() == set()


@pytest.mark.parametrize(("change", "count"), [(-1, 3), (1, 5), (3, 7), (-4, 0)])
def test_t4_wrong_counts(change: int, count: int) -> None:
    bench = Bench(
        *(
            Rule(call=call, fault=Miscount(change=change))
            for call in (Call.EXISTS, Call.READ, Call.HOLD)
        )
    )

    assert len(bench.store.exists(KEYS[:4])) == count
    assert len(bench.read()) == count
    assert len(bench.store.hold(KEYS[:4], seconds=1).present) == count


def test_t4_a_write_with_a_wrong_count_is_wrong_in_its_last_batch() -> None:
    bench = Bench(Rule(call=Call.WRITE, fault=Miscount(change=1)))
    batches = [bench.batch(KEYS[4:6], 4), bench.batch(KEYS[6:7], 6)]

    answer = bench.store.write(batches, bench.access, may_publish=lambda: True)

    assert answer == ((WRITTEN, WRITTEN), (WRITTEN, WRITTEN))


def test_existence_is_lied_about_in_both_directions() -> None:
    bench = Bench(
        Rule(call=Call.EXISTS, fault=Lie(exists=True), keys=frozenset(KEYS[6:7])),
        Rule(call=Call.EXISTS, fault=Lie(exists=False), positions=frozenset({0}), first=2),
        Rule(call=Call.HOLD, fault=Lie(exists=True)),
    )

    assert bench.store.exists(KEYS[:2]) == (True, True)
    assert bench.store.exists((KEYS[0], KEYS[6], KEYS[7])) == (False, True, False)
    assert bench.store.hold(KEYS[6:7], seconds=1).present == (True,)


def test_b50_a_read_that_fails_in_part_fills_the_other_pages_alone() -> None:
    bench = Bench(
        Rule(call=Call.READ, fault=Report(status=ReadStatus.FAILED), positions=frozenset({1, 3}))
    )

    statuses = bench.read()

    assert statuses == (OK, ReadStatus.FAILED, OK, ReadStatus.FAILED)
    assert bench.wrong() == {17, 19}


def test_a_read_that_claims_success_without_filling() -> None:
    bench = Bench(Rule(call=Call.READ, fault=Report(status=OK), keys=frozenset(KEYS[:1])))

    assert bench.read() == (OK,) * 4
    assert bench.wrong() == {16}


def test_a_read_that_fills_and_reports_a_failure() -> None:
    bench = Bench(Rule(call=Call.READ, fault=Report(status=MISS, done=True)))

    assert bench.read() == (MISS,) * 4
    assert bench.wrong() == set()


def test_l8_a_write_that_fails_in_part_stores_the_rest() -> None:
    bench = Bench(
        Rule(call=Call.WRITE, fault=Report(status=WriteStatus.FULL), positions=frozenset({1}))
    )

    statuses = bench.write(KEYS[4:7], 4)

    assert statuses == (WRITTEN, WriteStatus.FULL, WRITTEN)
    assert bench.inner.exists(KEYS[4:7]) == (True, False, True)
    assert bench.read([KEYS[4], KEYS[6]]) == (OK, OK)
    assert bench.wrong([KEYS[4], KEYS[6]]) == set()


def test_a_write_that_claims_success_without_storing() -> None:
    bench = Bench(Rule(call=Call.WRITE, fault=Report(status=WRITTEN)))

    assert bench.write(KEYS[4:6], 4) == (WRITTEN, WRITTEN)
    assert bench.inner.exists(KEYS[4:6]) == (False, False)


def test_bytes_flipped_on_the_way_in_pass_the_checksum_and_the_stored_object_stays_right() -> None:
    bench = Bench(Rule(call=Call.READ, fault=FlipBytes(), positions=frozenset({2}), times=1))

    flipped = bench.read()
    wrong = bench.wrong()
    again = bench.read()

    assert (flipped, again) == ((OK,) * 4, (OK,) * 4)
    assert (wrong, bench.wrong()) == ({18}, set())


def test_bytes_flipped_on_the_way_out_are_stored_and_pool_memory_stays_right() -> None:
    bench = Bench(Rule(call=Call.WRITE, fault=FlipBytes(), positions=frozenset({0})))
    before = bench.pools.memory.snapshot()

    statuses = bench.write(KEYS[4:6], 4)
    after = bench.pools.memory.snapshot()

    assert statuses == (WRITTEN, WRITTEN)
    assert after == before
    assert bench.read(KEYS[4:6]) == (OK, OK)
    assert bench.wrong(KEYS[4:6]) == {16}


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (TamperKind.FLIP, CORRUPT),
        (TamperKind.SHORTEN, MISS),
        (TamperKind.LENGTHEN, MISS),
        (TamperKind.EMPTY, MISS),
    ],
)
def test_what_a_bad_disk_does_is_seen_by_the_checksum(kind: TamperKind, status: ReadStatus) -> None:
    bench = Bench(Rule(call=Call.OPEN_READ, fault=Tamper(kind=kind), positions=frozenset({3})))

    statuses = bench.read((*KEYS[:3], KEYS[3]))

    assert statuses == (OK, OK, OK, status)
    assert bench.wrong() == {19}


def test_tampering_with_an_absent_object_does_nothing() -> None:
    bench = Bench(Rule(call=Call.EXISTS, fault=Tamper()))

    assert bench.store.exists(KEYS[6:7]) == (False,)
    assert bench.read() == (OK,) * 4


def test_tampering_needs_a_store_that_can_be_tampered_with() -> None:
    outer = FaultStore(FaultStore(MemoryStore()), [Rule(call=Call.EXISTS, fault=Tamper())])

    with pytest.raises(ContractError, match="FaultStore cannot be tampered with"):
        outer.exists(KEYS[:1])


def test_b50_objects_are_evicted_between_lookup_and_load() -> None:
    bench = Bench(Rule(call=Call.OPEN_READ, fault=Evict(), positions=frozenset({0, 2})))
    bench.store.hold(KEYS[:4], seconds=60)

    promised = bench.store.exists(KEYS[:4])
    statuses = bench.read()

    assert promised == (True,) * 4
    assert statuses == (MISS, OK, MISS, OK)
    assert bench.inner.keys() == (KEYS[1], KEYS[3])


def test_l5_a_read_lands_after_its_caller_was_told_that_it_failed() -> None:
    gate = Gate()
    bench = Bench(Rule(call=Call.READ, fault=LandLate(gate=gate)))

    with pytest.raises(StoreTimeoutError, match="no answer in time"):
        bench.read()
    untouched = bench.untouched()
    kept = bench.inner.kept()
    gate.open()
    (landing,) = bench.store.landings
    landing.join()

    assert untouched
    assert kept == 4
    assert landing.answers == [OK] * 4
    assert bench.wrong() == set()
    assert bench.inner.kept() == 0


class Revoked(DeviceAccess):
    """An access whose permission was taken back."""

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        raise TransferRevokedError(plan.pool, len(host.slots))

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        raise TransferRevokedError(plan.pool, len(host.slots))


def test_l5_what_a_late_landing_is_refused_with_is_kept() -> None:
    gate = Gate()
    gate.open()
    bench = Bench(Rule(call=Call.READ, fault=LandLate(gate=gate, error=OSError("gone"))))

    with pytest.raises(OSError, match="gone"):
        bench.read(access=Revoked())
    (landing,) = bench.store.landings
    landing.join()

    assert isinstance(landing.error, TransferRevokedError)
    assert bench.untouched()


def test_l7_a_late_write_asks_for_permission_when_it_lands() -> None:
    gate = Gate()
    bench = Bench(Rule(call=Call.WRITE, fault=LandLate(gate=gate)))
    allowed = [True]

    with pytest.raises(StoreTimeoutError):
        bench.write(KEYS[4:5], 4, may_publish=lambda: allowed[0])
    allowed[0] = False
    gate.open()
    (landing,) = bench.store.landings
    landing.join()

    assert landing.answers == [WriteStatus.DISCARDED]
    assert bench.inner.exists(KEYS[4:5]) == (False,)


def test_a_landing_whose_gate_stays_closed_is_reported() -> None:
    gate = Gate()
    bench = Bench(Rule(call=Call.READ, fault=LandLate(gate=gate)))
    with pytest.raises(StoreTimeoutError):
        bench.read()
    (landing,) = bench.store.landings

    with pytest.raises(TimeoutError, match="was its gate opened"):
        landing.join(seconds=0.01)

    gate.open()
    landing.join()


def test_half_of_a_read_lands_and_the_rest_raises() -> None:
    bench = Bench(Rule(call=Call.READ, fault=CopyHalf(error=OSError("cable"))))

    with pytest.raises(OSError, match="cable"):
        bench.read()

    assert bench.wrong() == {18, 19}
    assert bench.inner.kept() == 0


def test_chances_of_one_rule_do_not_depend_on_other_calls() -> None:
    rule = Rule(call=Call.READ, fault=Report(status=MISS), share=0.5)
    quiet, busy = Bench(rule, seed=4), Bench(rule, seed=4)

    alone = [quiet.read() for _ in range(5)]
    among = []
    for _ in range(5):
        busy.store.exists(KEYS)
        among.append(busy.read())

    assert alone == among
    assert {MISS, OK} == {status for statuses in alone for status in statuses}


def test_a_rule_of_a_pool_leaves_other_pools_alone() -> None:
    bench = Bench(Rule(call=Call.READ, fault=Raise(error=OSError("boom")), pool="indexer"))

    assert bench.read() == (OK,) * 4
    assert bench.store.script.fired == ()
