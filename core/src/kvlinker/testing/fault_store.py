"""A store that goes wrong on demand, around any other store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias, cast

from kvlinker.device import DeviceAccess
from kvlinker.plans import TransferPlan
from kvlinker.spans import MemoryRegion
from kvlinker.store import (
    Hold,
    ObjectKey,
    ReadRequest,
    ReadSession,
    ReadStatus,
    Store,
    StoreCapabilities,
    StoreStats,
    WriteBatch,
    WriteStatus,
)
from kvlinker.testing.altered_access import SkippingAccess, first_rows
from kvlinker.testing.script import Answers, Call, FaultedCall, FaultScript, Landing, Rule

__all__ = ["FaultStore", "StoreCallRecord"]

_Run: TypeAlias = Callable[[FaultedCall, Callable[[], Answers]], Answers]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCallRecord:
    """One call that reached a FaultStore, whatever became of it."""

    call: Call
    pool: str
    keys: tuple[ObjectKey, ...]
    thread: str
    """Name of the calling thread."""


class FaultStore(Store):
    """A store around another, to which things happen as a script says.

    Without rules it is the wrapped store. What it answers under a rule may break every promise of the contract.
    """

    def __init__(
        self,
        store: Store,
        rules: Iterable[Rule] = (),
        *,
        seed: int = 0,
        capabilities: StoreCapabilities | None = None,
    ) -> None:
        """Wrap a store.

        Args:
            store: it does the work.
            rules: see Rule; `script.add` takes more later.
            seed: of rules with a chance.
            capabilities: what it says it can do, where that is not what the wrapped store says.
        """
        self.script = FaultScript(rules, seed=seed)
        """Add rules here, and see which happened."""
        self._store = store
        self._capabilities = capabilities or store.capabilities
        self._lock = threading.Lock()
        self._records: list[StoreCallRecord] = []
        self._landings: list[Landing] = []
        self._running = 0

    @property
    def capabilities(self) -> StoreCapabilities:
        """What it says that it can do."""
        return self._capabilities

    @property
    def records(self) -> tuple[StoreCallRecord, ...]:
        """Every call so far, in order."""
        with self._lock:
            return tuple(self._records)

    def count(self, call: Call) -> int:
        """Return how often a call was made."""
        return sum(record.call is call for record in self.records)

    @property
    def running(self) -> int:
        """Calls that have not returned, those that hang included; late landings are not among them."""
        with self._lock:
            return self._running

    @property
    def landings(self) -> tuple[Landing, ...]:
        """Calls that LandLate made, in order."""
        with self._lock:
            return tuple(self._landings)

    def _run(self, call: FaultedCall, make: Callable[[], Answers]) -> Answers:
        call.store = self._store
        record = StoreCallRecord(
            call=call.call, pool=call.pool, keys=call.keys, thread=threading.current_thread().name
        )
        with self._lock:
            self._records.append(record)
            self._running += 1
        try:
            return self.script.run(call, make)
        finally:
            with self._lock:
                self._running -= 1
                self._landings.extend(call.landings)

    @staticmethod
    def _about(kind: Call, keys: Sequence[ObjectKey]) -> FaultedCall:
        return FaultedCall(call=kind, keys=tuple(keys), count=len(keys))

    def _plainly(self, kind: Call, make: Callable[[], None]) -> None:
        def run() -> Answers:
            make()
            return []

        self._run(FaultedCall(call=kind), run)

    # ---- looking ------------------------------------------------------------------------------

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        call = self._about(Call.EXISTS, keys)
        answers = self._run(call, lambda: [*self._store.exists(keys)])
        return cast("tuple[bool, ...]", _tuple(answers))

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        """See Store."""
        made: list[Hold] = []

        def make() -> Answers:
            made.append(self._store.hold(keys, seconds=seconds))
            return [*made[0].present]

        try:
            answers = self._run(self._about(Call.HOLD, keys), make)
        except BaseException:
            # The caller never sees the hold: it would last until it expires.
            for hold in made:
                hold.release()
            raise
        present = cast("tuple[bool, ...]", _tuple(answers))
        return _FaultHold(made[0], present, lambda run: self._plainly(Call.RELEASE, run))

    def stats(self) -> StoreStats:
        """See Store."""
        answers = self._run(FaultedCall(call=Call.STATS, count=1), lambda: [self._store.stats()])
        return cast("StoreStats", answers[0] if answers else None)

    # ---- writing ------------------------------------------------------------------------------

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store."""
        keys = tuple(key for batch in batches for key in batch.keys)
        call = FaultedCall(
            call=Call.WRITE,
            pool=batches[0].plan.pool if batches else "",
            keys=keys,
            count=len(keys),
            rows=tuple(row for batch in batches for row in first_rows(batch.plan.pages)),
            memory=memory,
            may_publish=may_publish,
        )
        answers = self._run(call, lambda: self._write(batches, call, memory, may_publish))
        if answers is None:
            return cast("tuple[tuple[WriteStatus, ...], ...]", None)
        return _shaped(answers, [len(batch.keys) for batch in batches])

    def _write(
        self,
        batches: Sequence[WriteBatch],
        call: FaultedCall,
        memory: DeviceAccess,
        may_publish: Callable[[], bool],
    ) -> Answers:
        """Write what is not skipped; return one status per object, FAILED for skipped ones."""
        numbers = count()
        kept = [[i for i in range(len(b.keys)) if next(numbers) not in call.skip] for b in batches]
        statuses = self._store.write(
            [_part(batch, chosen) for batch, chosen in zip(batches, kept, strict=True)],
            call.memory or memory,
            may_publish=call.may_publish or may_publish,
        )
        answers: list[object] = []
        for batch, chosen, found in zip(batches, kept, statuses, strict=True):
            status = dict(zip(chosen, found, strict=True))
            answers += [status.get(i, WriteStatus.FAILED) for i in range(len(batch.keys))]
        return answers

    # ---- reading ------------------------------------------------------------------------------

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        made: list[ReadSession] = []

        def make() -> Answers:
            made.append(_FaultRead(self._store.open_read(request), request, self._run))
            return [made[0]]

        answers: Answers = None
        try:
            answers = self._run(self._about(Call.OPEN_READ, request.keys), make)
        finally:
            if answers is None:
                for session in made:  # nobody else will
                    session.close()
        return cast("ReadSession", answers[0] if answers else None)

    # ---- removing, memory, life time ----------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        call = self._about(Call.DELETE, keys)
        answers = self._run(call, lambda: [*self._store.delete(keys)])
        return cast("tuple[bool, ...]", _tuple(answers))

    def clear(self, namespace: bytes) -> int:
        """See Store."""
        call = FaultedCall(call=Call.CLEAR, count=1)
        answers = self._run(call, lambda: [self._store.clear(namespace)])
        return cast("int", answers[0] if answers else None)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See Store."""
        self._plainly(Call.REGISTER, lambda: self._store.register(regions))

    def unregister(self) -> None:
        """See Store."""
        self._plainly(Call.UNREGISTER, self._store.unregister)

    def close(self) -> None:
        """See Store."""
        self._plainly(Call.CLOSE, self._store.close)


class _FaultRead(ReadSession):
    def __init__(self, session: ReadSession, request: ReadRequest, run: _Run) -> None:
        self._session = session
        self._request = request
        self._run = run
        self._landings: list[Landing] = []

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession."""
        call = FaultedCall(
            call=Call.READ,
            pool=plan.pool,
            keys=self._request.keys,
            count=len(self._request.keys),
            rows=first_rows(plan.pages),
            memory=memory,
        )
        try:
            answers = self._run(call, lambda: self._read(plan, call, memory))
        finally:
            self._landings.extend(call.landings)
        return cast("tuple[ReadStatus, ...]", _tuple(answers))

    def _read(self, plan: TransferPlan, call: FaultedCall, memory: DeviceAccess) -> Answers:
        skipped = frozenset(call.rows[number] for number in call.skip)
        access = call.memory or memory
        return [*self._session.read(plan, SkippingAccess(access, skipped) if skipped else access)]

    def close(self) -> None:
        """See ReadSession; a read that lands late keeps the objects until it has landed."""

        def make() -> Answers:
            _close_after(tuple(self._landings), self._session)
            return []

        self._run(FaultedCall(call=Call.CLOSE_READ), make)


def _close_after(landings: Sequence[Landing], session: ReadSession) -> None:
    if not landings:
        session.close()
        return
    landings[0].afterwards(lambda: _close_after(landings[1:], session))


class _FaultHold(Hold):
    def __init__(
        self, hold: Hold, present: tuple[bool, ...], release: Callable[[Callable[[], None]], None]
    ) -> None:
        self._hold = hold
        self._present = present
        self._release = release

    @property
    def present(self) -> tuple[bool, ...]:
        """See Hold."""
        return self._present

    def release(self) -> None:
        """See Hold."""
        self._release(self._hold.release)


def _part(batch: WriteBatch, chosen: Sequence[int]) -> WriteBatch:
    if len(chosen) == len(batch.keys):
        return batch
    keys = tuple(batch.keys[number] for number in chosen)
    return WriteBatch(keys=keys, plan=batch.plan.select(chosen), fingerprint=batch.fingerprint)


def _tuple(answers: Answers) -> tuple[object, ...] | None:
    return None if answers is None else tuple(answers)


def _shaped(answers: list[object], counts: Sequence[int]) -> tuple[tuple[WriteStatus, ...], ...]:
    """Return flat statuses in the shape of the batches; a wrong count shows in the last of them."""
    shaped, start = [], 0
    for number, size in enumerate(counts):
        end = None if number == len(counts) - 1 else start + size
        shaped.append(cast("tuple[WriteStatus, ...]", tuple(answers[start:end])))
        start += size
    return tuple(shaped)
