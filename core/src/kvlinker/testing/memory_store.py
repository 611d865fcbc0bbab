"""A complete store in the memory of one process: everything the contract asks of a store, in few lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypedDict, Unpack

import numpy as np

from kvlinker.device import DeviceAccess
from kvlinker.errors import (
    ContractError,
    RegistrationError,
    StoreClosedError,
    UnsupportedOperationError,
)
from kvlinker.plans import TransferPlan
from kvlinker.spans import MemoryRegion
from kvlinker.store import (
    Hold,
    Integrity,
    ObjectKey,
    ReadRequest,
    ReadSession,
    Store,
    StoreCapabilities,
    StoreStats,
    WriteBatch,
    WriteStatus,
)
from kvlinker.testing.memory_sessions import MemoryHold, MemoryReadSession, staging_slots
from kvlinker.testing.objects import Lease, ObjectTable, StoredObject

__all__ = ["CapabilityChoices", "MemoryStore"]

_Statuses = list[list[WriteStatus]]


class CapabilityChoices(TypedDict, total=False):
    """Capabilities that a MemoryStore can be made with or without; it keeps to each of them."""

    ranged_reads: bool
    """A read may take a part of an object; True by default."""
    whole_reads: bool
    """A read may take a whole object; True by default."""
    atomic_batches: bool
    """The batches of one write become visible together or not at all; True by default."""
    overwrite: bool
    """A write of an existing key replaces the object; False by default."""
    leases: bool
    """`hold` works; True by default."""
    registers_memory: bool
    """Only ranges within registered regions are moved; False by default."""
    integrity: Integrity
    """CHECKSUM, the default, notices changed bytes; LENGTH only changed sizes."""
    max_object_bytes: int | None
    """Longer objects fail; None by default."""
    max_ranges_per_call: int | None
    """A plan with more ranges is refused; None by default."""


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """An object that was copied out of pool memory and is not visible yet."""

    key: ObjectKey
    stored: StoredObject
    batch: int
    position: int


class MemoryStore(Store):
    """Objects in the memory of one process, least recently used ones evicted first.

    Every capability can be switched, so that whatever adapts to stores can be tested against each kind.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        **choices: Unpack[CapabilityChoices],
    ) -> None:
        """Make an empty store.

        Args:
            capacity_bytes: payload bytes that are never exceeded; None for no limit.
            clock: seconds, for the expiry of leases.
            choices: see CapabilityChoices.
        """
        usual = StoreCapabilities(
            persistent=False, shared=False, ranged_reads=True, atomic_batches=True, leases=True
        )
        self._capabilities = replace(usual, **choices)
        self._clock = clock
        self._table = ObjectTable(capacity_bytes=capacity_bytes, clock=clock)
        self._regions: tuple[MemoryRegion, ...] | None = None
        self._closed = False

    @property
    def capabilities(self) -> StoreCapabilities:
        """What this store can do, as chosen at construction."""
        return self._capabilities

    # ---- looking ------------------------------------------------------------------------------

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        with self._table.lock:
            self._check_open()
            return tuple(self._table.get(key) is not None for key in keys)

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        """See Store."""
        if not self._capabilities.leases:
            return super().hold(keys, seconds=seconds)
        lease = Lease(self._clock() + seconds)
        with self._table.lock:
            self._check_open()
            found = [self._table.use(key) for key in keys]
            for stored in found:
                if stored is not None:
                    stored.leases.append(lease)
        return MemoryHold(lease, tuple(stored is not None for stored in found))

    def stats(self) -> StoreStats:
        """See Store."""
        with self._table.lock:
            return StoreStats(
                objects=len(self._table),
                used_bytes=self._table.used_bytes,
                capacity_bytes=self._table.capacity_bytes,
                counters=dict(self._table.counters),
            )

    def keys(self) -> tuple[ObjectKey, ...]:
        """Return the keys of all objects, least recently used first."""
        return self._table.keys()

    def payload(self, key: ObjectKey) -> bytes:
        """Return an object's bytes as they are stored.

        Raises:
            KeyError: there is no such object.
        """
        stored = self._table.get(key)
        if stored is None:
            raise KeyError(key)
        return stored.payload

    def kept(self) -> int:
        """Return how many objects a lease or an open session keeps from eviction now."""
        return self._table.kept()

    # ---- writing ------------------------------------------------------------------------------

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store."""
        self._check_open()
        for batch in batches:
            self._check_plan(batch.plan)
        statuses = [[WriteStatus.EXISTS] * len(batch.keys) for batch in batches]
        copied = [self._copy_out(i, batch, memory, statuses) for i, batch in enumerate(batches)]
        if self._capabilities.atomic_batches:
            copied = [list(chain.from_iterable(copied))]
        allowed = may_publish()
        asked = {key for batch in batches for key in batch.keys}
        for candidates in copied:
            with self._table.lock:
                self._check_open()
                self._publish(candidates, statuses, asked if allowed else None)
        return tuple(map(tuple, statuses))

    def _copy_out(
        self, number: int, batch: WriteBatch, memory: DeviceAccess, statuses: _Statuses
    ) -> list[_Candidate]:
        size, limit = batch.plan.object_bytes, self._capabilities.max_object_bytes
        if limit is not None and size > limit:
            statuses[number] = [WriteStatus.FAILED] * len(batch.keys)
            return []
        with self._table.lock:
            chosen = [i for i, key in enumerate(batch.keys) if not self._stays(key, size, batch)]
        if not chosen:
            return []
        staging, host = staging_slots(len(chosen), size)
        memory.copy_out(batch.plan.select(chosen), host)
        return [
            _Candidate(batch.keys[i], StoredObject.of(row.tobytes(), batch.fingerprint), number, i)
            for i, row in zip(chosen, staging, strict=True)
        ]

    def _stays(self, key: ObjectKey, size: int, batch: WriteBatch) -> bool:
        """Whether the stored object is kept; one of another length or layout is as good as none."""
        stored = self._table.get(key)
        if stored is None or self._capabilities.overwrite:
            return False
        return stored.fits(size, batch.fingerprint)

    def _publish(
        self,
        candidates: Sequence[_Candidate],
        statuses: _Statuses,
        asked: set[ObjectKey] | None,
    ) -> None:
        """Publish what fits, together where batches are atomic; without permission, discard all."""
        atomic = self._capabilities.atomic_batches
        for group in [candidates] if atomic else [[candidate] for candidate in candidates]:
            fresh = {c.key: c.stored for c in reversed(group)}  # of two under one key, the first
            if asked is None:
                status = WriteStatus.DISCARDED
            elif self._table.make_room(fresh, protected=asked):
                status = WriteStatus.WRITTEN
            else:
                status = WriteStatus.FULL
            for candidate in group:
                statuses[candidate.batch][candidate.position] = self._insert(candidate, status)

    def _insert(self, candidate: _Candidate, status: WriteStatus) -> WriteStatus:
        """Put the object into the table, unless another writer was first."""
        if status is not WriteStatus.WRITTEN:
            return status
        old, new = self._table.get(candidate.key), candidate.stored
        if (
            old is not None
            and not self._capabilities.overwrite
            and old.fits(len(new.payload), new.fingerprint)
        ):
            return WriteStatus.EXISTS
        self._table.put(candidate.key, new)
        return status

    # ---- reading ------------------------------------------------------------------------------

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        with self._table.lock:
            self._check_open()
            found = tuple(self._pin(key, request) for key in request.keys)
        return MemoryReadSession(
            table=self._table,
            request=request,
            found=found,
            check_plan=self._check_read,
            by_checksum=self._capabilities.integrity is Integrity.CHECKSUM,
        )

    def _pin(self, key: ObjectKey, request: ReadRequest) -> StoredObject | None:
        stored = self._table.use(key)
        if stored is None or not stored.fits(request.object_bytes, request.fingerprint):
            self._table.counters["missed"] += 1
            return None
        stored.readers += 1
        return stored

    def _check_read(self, plan: TransferPlan) -> None:
        self._check_open()
        self._check_plan(plan)
        able = self._capabilities
        whole = int(plan.range_bytes.sum()) == plan.object_bytes
        # A range may be a whole object: a layer of a pool with one layer is.
        if not (able.ranged_reads or (whole and able.whole_reads)):
            msg = f"pool {plan.pool!r}: this store reads whole objects alone; see its capabilities"
            raise UnsupportedOperationError(msg)

    # ---- removing -----------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; held objects go too, for a hold is only against eviction."""
        with self._table.lock:
            self._check_open()
            return tuple(self._table.drop(key) for key in keys)

    def clear(self, namespace: bytes) -> int:
        """See Store."""
        with self._table.lock:
            return sum(self.delete([key for key in self.keys() if key.startswith(namespace)]))

    def tamper(self, key: ObjectKey, payload: bytes) -> None:
        """Replace an object's bytes behind the back of its checksum, as a bad disk would.

        Raises:
            KeyError: there is no such object.
        """
        self._table.replace_payload(key, payload)

    # ---- memory and life time -----------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See Store."""
        with self._table.lock:
            self._check_open()
            if self._regions is not None:
                msg = f"{len(self._regions)} regions are registered already; unregister them first"
                raise RegistrationError(msg)
            self._regions = tuple(regions)

    def unregister(self) -> None:
        """See Store."""
        self._regions = None

    def close(self) -> None:
        """See Store."""
        with self._table.lock:
            self._closed = True
            self._regions = None
            for key in self.keys():
                self._table.drop(key)

    def _check_open(self) -> None:
        if self._closed:
            msg = "this memory store was closed; make a new one"
            raise StoreClosedError(msg)

    def _check_plan(self, plan: TransferPlan) -> None:
        limit = self._capabilities.max_ranges_per_call
        ranges = len(plan.pages.row) * len(plan.spans.base)
        if limit is not None and ranges > limit:
            msg = f"pool {plan.pool!r}: {ranges} ranges in one call, this store takes {limit}"
            raise ContractError(msg)
        if self._capabilities.registers_memory and ranges:
            _check_registered(plan, self._regions or ())


def _check_registered(plan: TransferPlan, regions: Sequence[MemoryRegion]) -> None:
    ranges = plan.expand()
    inside = np.zeros(len(ranges.address), dtype=bool)
    for region in regions:
        starts_in = ranges.address >= region.base_ptr
        inside |= starts_in & (ranges.address + ranges.size <= region.end_ptr)
    if not inside.all():
        address = int(ranges.address[~inside][0])
        msg = f"pool {plan.pool!r}: address {address:#x} lies in no registered region"
        raise RegistrationError(msg)
