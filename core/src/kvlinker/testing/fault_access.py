"""A device access that goes wrong on demand and writes down every copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.plans import TransferPlan
from kvlinker.testing.altered_access import first_rows
from kvlinker.testing.script import Answers, Call, FaultedCall, FaultScript, Rule

__all__ = ["CopyRecord", "FaultAccess"]


@dataclass(slots=True, kw_only=True, eq=False)
class CopyRecord:
    """One copy that a FaultAccess was asked for."""

    call: Call
    """COPY_IN, which writes pool memory, or COPY_OUT."""
    pool: str
    rows: tuple[int, ...]
    """First pool row of each page."""
    labels: tuple[str, ...]
    """Spans that it touches."""
    began: int
    """Place in the order of all beginnings and ends of copies."""
    ended: int | None = None
    """Place of its end; None while it runs."""
    began_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    error: type[BaseException] | None = None
    """What it raised; the type alone, for an error keeps frames alive."""


class FaultAccess(DeviceAccess):
    """An access around another, to which things happen as a script says.

    Marks make promises testable: whatever a call promises to be over must not show in `writes_since(mark)`,
    the mark being taken when the call returned.
    """

    def __init__(self, access: DeviceAccess, rules: Iterable[Rule] = (), *, seed: int = 0) -> None:
        """Wrap an access; see Rule and FaultScript."""
        self.script = FaultScript(rules, seed=seed)
        """Add rules here, and see which happened."""
        self._access = access
        self._lock = threading.Lock()
        self._place = 0
        self._copies: list[CopyRecord] = []
        self._closed = False

    @property
    def copies(self) -> tuple[CopyRecord, ...]:
        """Every copy so far, in the order in which they began."""
        with self._lock:
            return tuple(self._copies)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def mark(self) -> int:
        """Return the place of this moment in the order of beginnings and ends."""
        with self._lock:
            return self._place

    def writes_since(self, mark: int) -> tuple[CopyRecord, ...]:
        """Return the copies into pool memory that ran at the mark or began after it."""
        return tuple(
            record
            for record in self.copies
            if record.call is Call.COPY_IN and (record.ended is None or record.ended > mark)
        )

    def reads_since(self, mark: int) -> tuple[CopyRecord, ...]:
        """Return the copies out of pool memory that ran at the mark or began after it."""
        return tuple(
            record
            for record in self.copies
            if record.call is Call.COPY_OUT and (record.ended is None or record.ended > mark)
        )

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        self._copy(Call.COPY_OUT, plan, lambda access: access.copy_out(plan, host))

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        self._copy(Call.COPY_IN, plan, lambda access: access.copy_in(plan, host))

    def _copy(self, kind: Call, plan: TransferPlan, run: Callable[[DeviceAccess], None]) -> None:
        rows = first_rows(plan.pages)
        call = FaultedCall(
            call=kind, pool=plan.pool, count=plan.num_pages, rows=rows, memory=self._access
        )
        record = self._begin(kind, plan, tuple(row for _, row in rows))

        def make() -> Answers:
            run(call.memory or self._access)
            return []

        try:
            self.script.run(call, make)
        except BaseException as error:
            record.error = type(error)
            raise
        finally:
            self._end(record)

    def _begin(self, kind: Call, plan: TransferPlan, rows: tuple[int, ...]) -> CopyRecord:
        with self._lock:
            self._place += 1
            record = CopyRecord(
                call=kind,
                pool=plan.pool,
                rows=rows,
                labels=plan.spans.labels,
                began=self._place,
            )
            self._copies.append(record)
            return record

    def _end(self, record: CopyRecord) -> None:
        with self._lock:
            self._place += 1
            record.ended = self._place
            record.ended_at = time.monotonic()

    def close(self) -> None:
        """See DeviceAccess."""
        self._closed = True
        self._access.close()
