"""A tier copy takes objects from one tier to another, through a buffer in host memory.

Pool memory is not read for it: an engine may have changed a page since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from kvlinker.device import HostAccess
from kvlinker.guard import checked_read
from kvlinker.plans import TransferPlan
from kvlinker.spans import MemoryRegion
from kvlinker.store import ReadRequest, ReadStatus, Store, WriteBatch, WriteStatus
from kvlinker.stores.host_pages import HostPages, ObjectRanges, by_range
from kvlinker.stores.removals import Removals
from kvlinker.stores.tier import Tier

__all__ = ["Copied", "TierCopy", "of_keys", "select_objects", "written_objects"]

Copied: TypeAlias = ReadStatus | WriteStatus | None
"""What became of an object: why it was not read, or what the target said; None where the target was down."""


class TierCopy:
    """Copies objects from a source to a target, one call at a time."""

    def __init__(
        self, source: Tier, target: Tier, removals: Removals, *, buffer_bytes: int
    ) -> None:
        """Reserve the buffer, which the system gives memory where it is first written."""
        self._source, self._target = source, target
        self._removals = removals
        self._host = HostAccess()
        self._buffer = HostPages(buffer_bytes)

    @property
    def region(self) -> MemoryRegion:
        """The buffer, for tiers that register memory."""
        return self._buffer.region

    def objects_at_once(self, ranges: ObjectRanges) -> int:
        """Return how many objects one call can copy; 0 for none."""
        longest = self._target.store.capabilities.max_object_bytes
        if longest is not None and ranges.object_bytes > longest:
            return 0
        count = self._buffer.room_for(ranges.object_bytes)
        for tier in (self._source, self._target):
            limit = tier.store.capabilities.max_ranges_per_call
            count = count if limit is None else min(count, limit // len(ranges.offset))
        return count

    def copy(self, request: ReadRequest, ranges: ObjectRanges, *, since: int) -> Sequence[Copied]:
        """Copy objects, of which so many can be copied at once.

        Args:
            request: which objects.
            ranges: what they are read by later.
            since: removals when the copy was begun; after more of them, what was copied is discarded.
        """
        plan = self._buffer.plan(ranges, len(request.keys))
        failed = (ReadStatus.FAILED,) * len(request.keys)
        statuses = self._source.ask(
            lambda store: self._read(store, request, plan), otherwise=failed
        )
        good = [i for i, status in enumerate(statuses) if status is ReadStatus.OK]
        copied: list[Copied] = list(statuses)
        if good:
            batch = WriteBatch(
                keys=tuple(request.keys[i] for i in good),
                plan=plan.select(good),
                fingerprint=request.fingerprint,
            )
            for i, answer in zip(good, self._write(batch, since), strict=True):
                copied[i] = answer
        return copied

    def _write(self, batch: WriteBatch, since: int) -> Sequence[WriteStatus | None]:
        with self._removals.copying(since) as may_publish:
            answer = self._target.write([batch], self._host, may_publish=may_publish)
        return (None,) * len(batch.keys) if answer is None else answer[0]

    def _read(
        self, store: Store, request: ReadRequest, plan: TransferPlan
    ) -> tuple[ReadStatus, ...]:
        parts = [plan] if store.capabilities.whole_reads else by_range(plan)
        with store.open_read(request) as session:
            answers = [checked_read(self._source.name, session, part, self._host) for part in parts]
        return tuple(
            next((status for status in each if status is not ReadStatus.OK), ReadStatus.OK)
            for each in zip(*answers, strict=True)
        )


def of_keys(request: ReadRequest, positions: Sequence[int]) -> ReadRequest:
    """Return a request for some of its objects."""
    return replace(request, keys=tuple(request.keys[i] for i in positions))


def select_objects(batch: WriteBatch, positions: Sequence[int]) -> WriteBatch:
    """Return some objects of a batch."""
    if len(positions) == len(batch.keys):
        return batch
    keys = tuple(batch.keys[i] for i in positions)
    return replace(batch, keys=keys, plan=batch.plan.select(positions))


def written_objects(
    batches: Sequence[WriteBatch], answer: Sequence[Sequence[WriteStatus]]
) -> Sequence[WriteBatch]:
    """Return the objects of a write that are new in the store."""
    found = []
    for batch, statuses in zip(batches, answer, strict=True):
        chosen = [i for i, status in enumerate(statuses) if status is WriteStatus.WRITTEN]
        if chosen:
            found.append(select_objects(batch, chosen))
    return found
