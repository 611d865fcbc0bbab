"""A tier is one of several stores: what it cannot do, another one may, so its errors are counted and answered for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvlinker.device import DeviceAccess
from kvlinker.errors import KVLinkerError, StoreContractError, StoreError, StoreTimeoutError
from kvlinker.event_counts import EventCounts
from kvlinker.guard import (
    Breaker,
    BreakerOpenError,
    checked_flags,
    checked_hold,
    checked_read,
    checked_write,
)
from kvlinker.plans import TransferPlan
from kvlinker.store import (
    Hold,
    Integrity,
    ObjectKey,
    ReadSession,
    ReadStatus,
    Store,
    StoreCapabilities,
    StoreStats,
    WriteBatch,
    WriteStatus,
)

__all__ = ["Tier", "common_capabilities"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Tier:
    """A store behind a breaker of its own: while it is down, the others are asked without it."""

    def __init__(
        self, name: str, store: Store, counts: EventCounts, *, pause_seconds: float
    ) -> None:
        """Keep a store.

        Args:
            name: in counters and messages.
            store: open.
            counts: where failures are counted, as `NAME_failed` and `NAME_skipped`.
            pause_seconds: how long the store is not asked once it is down.
        """
        self.name = name
        self.store = store
        self._counts = counts
        self._breaker = Breaker(pause_seconds=pause_seconds)
        self._is_failing = False

    @property
    def is_down(self) -> bool:
        """Whether the store is not asked now."""
        return self._breaker.is_open

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Return the store's hints; none is there where it is down."""
        return self.ask(
            lambda store: checked_flags(self.name, "exists", store.exists(keys), len(keys)),
            otherwise=(False,) * len(keys),
        )

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...] | None:
        """Return what became of some objects; None where the store is down or raises a StoreError."""
        return self.ask(
            lambda store: checked_write(
                self.name, store.write(batches, memory, may_publish=may_publish), batches
            ),
            otherwise=None,
        )

    def read(
        self, session: ReadSession, plan: TransferPlan, memory: DeviceAccess
    ) -> tuple[ReadStatus, ...]:
        """Return what a session of the store answers; all have failed where the store is down."""
        return self.ask(
            lambda _: checked_read(self.name, session, plan, memory),
            otherwise=(ReadStatus.FAILED,) * plan.num_pages,
        )

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold | None:
        """Return a hold; None where the store is down."""

        def ask(store: Store) -> Hold:
            hold = store.hold(keys, seconds=seconds)
            checked_hold(self.name, hold, len(keys))
            return hold

        return self.ask(ask, otherwise=None)

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Remove objects.

        Raises:
            StoreError: the store cannot, or was not asked: it is down.
        """
        return self.demand(
            lambda store: checked_flags(self.name, "delete", store.delete(keys), len(keys))
        )

    def stats(self) -> StoreStats | None:
        """Return the store's figures; None where it is down or cannot tell.

        An answer says nothing of whether its objects can be reached, and so does not end a pause.
        """
        if self.is_down:
            return None
        try:
            return self.store.stats()
        except StoreError as error:
            self._note(error)
            return None

    def ask(self, call: Callable[[Store], _T], *, otherwise: _T) -> _T:
        """Return what the store answers, or `otherwise` where it is down, raises a StoreError or breaks its contract.

        Anything else that it raises is the caller's: memory that was taken back, or a plugin at fault.
        """
        try:
            return self.demand(call)
        except (StoreError, StoreContractError):
            return otherwise

    def demand(self, call: Callable[[Store], _T]) -> _T:
        """Return what the store answers.

        Raises:
            StoreError: the store's own, or it is down and was not asked.
            StoreContractError: it answered something else than was asked.
        """
        breaker = self._breaker
        if not breaker.allow():
            self._counts.add(f"{self.name}_skipped")
            msg = f"tier {self.name} did not answer lately and is not asked again yet"
            raise BreakerOpenError(msg)
        timeouts = breaker.timeouts
        try:
            answer = call(self.store)
        except (StoreError, StoreContractError) as error:
            self._note(error)
            raise
        breaker.succeed(timeouts=timeouts)
        self._is_failing = False
        return answer

    def _note(self, error: KVLinkerError) -> None:
        if isinstance(error, StoreTimeoutError):
            self._breaker.trip()
        else:
            self._breaker.fail()
        self._counts.add(f"{self.name}_failed")
        if not self._is_failing:  # once, until it answers again
            logger.warning("kvlinker: tier %s: %s: %s", self.name, type(error).__name__, error)
        self._is_failing = True


def common_capabilities(
    near: StoreCapabilities, far: StoreCapabilities, *, is_written_back: bool
) -> StoreCapabilities:
    """Return what two stores can do as tiers.

    What is written back is near alone for a while: it outlives the process, and others see it, where near does so.

    Raises:
        ContractError: they read in no common way.
    """
    limits = [
        able.max_ranges_per_call for able in (near, far) if able.max_ranges_per_call is not None
    ]
    both_check = near.integrity is far.integrity is Integrity.CHECKSUM
    through = not is_written_back
    return StoreCapabilities(
        persistent=far.persistent and (through or near.persistent),
        shared=far.shared and (through or near.shared),
        ranged_reads=near.ranged_reads and far.ranged_reads,
        whole_reads=near.whole_reads and far.whole_reads,
        atomic_batches=far.atomic_batches and (through or near.atomic_batches),
        overwrite=far.overwrite and through,
        device_memory=near.device_memory or far.device_memory,
        registers_memory=near.registers_memory or far.registers_memory,
        revocable=near.revocable and far.revocable,
        leases=far.leases,
        integrity=Integrity.CHECKSUM if both_check else Integrity.LENGTH,
        max_object_bytes=far.max_object_bytes,
        max_ranges_per_call=min(limits, default=None),
    )
