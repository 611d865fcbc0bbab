"""Write-back answers a write when the near tier has the objects, and copies them to the far one behind it.

Until the far tier has an object, the near one holds it. What does not fit the queue is written through.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvlinker.device import DeviceAccess
from kvlinker.event_counts import EventCounts
from kvlinker.lanes import Lane
from kvlinker.spans import MemoryRegion
from kvlinker.store import ObjectKey, ReadStatus, WriteBatch, WriteStatus
from kvlinker.stores.host_pages import ObjectRanges, RangesSeen
from kvlinker.stores.pending import (
    LEASE_SECONDS,
    Lease,
    PendingObject,
    PendingObjects,
    request_of,
)
from kvlinker.stores.removals import Removals
from kvlinker.stores.tier import Tier
from kvlinker.stores.tier_copy import Copied, TierCopy, select_objects

__all__ = ["WriteBack", "WriteBackLimits"]

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 64 << 20
_MAX_TRIES = 5
"""Refusals of one object by a far tier that answers, after which it stays near alone."""
_CLOSE_SECONDS = 10.0
_HANGING_SECONDS = 5.0
_REMOVAL_SECONDS = 0.01
"""How long a copy waits that a removal has refused."""
_GONE = (ReadStatus.MISS, ReadStatus.CORRUPT)
_REFUSED = (ReadStatus.FAILED, WriteStatus.FULL, WriteStatus.FAILED, WriteStatus.NOT_ADMITTED)

Statuses: TypeAlias = tuple[tuple[WriteStatus, ...], ...]
WriteThrough: TypeAlias = Callable[
    [Sequence[WriteBatch], DeviceAccess, Callable[[], bool]], Statuses
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBackLimits:
    """How much may be near and not far yet."""

    max_bytes: int = 256 << 20
    max_objects: int = 1 << 16
    pause_seconds: float = 1.0
    """How long a far tier that takes nothing is left alone."""


class WriteBack:
    """Writes to the near tier, and copies to the far one in the order of the writes, on one thread."""

    def __init__(
        self,
        near: Tier,
        far: Tier,
        removals: Removals,
        counts: EventCounts,
        *,
        limits: WriteBackLimits,
        through: WriteThrough,
    ) -> None:
        """Keep both tiers; `through` writes what cannot wait to both."""
        self._near, self._far = near, far
        self._removals, self._counts = removals, counts
        self._limits, self._through = limits, through
        size = min(_BUFFER_BYTES, limits.max_bytes)
        self._copy = TierCopy(near, far, removals, buffer_bytes=size)
        self._pending = PendingObjects(max_bytes=limits.max_bytes, max_objects=limits.max_objects)
        self._lane = Lane("write-back")
        self._is_working = self._is_ending = self._is_stuck = False

    @property
    def region(self) -> MemoryRegion:
        """The buffer, for tiers that register memory."""
        return self._copy.region

    @property
    def pending(self) -> int:
        """Objects that the far tier does not have yet."""
        return len(self._pending)

    def pending_bytes(self, namespace: bytes) -> int:
        """Return the bytes of a namespace's objects that the far tier does not have yet."""
        return self._pending.bytes_of(namespace)

    # ---- writing ------------------------------------------------------------------------------

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        may_publish: Callable[[], bool],
    ) -> Statuses:
        """Write near, where all can be copied later, and through what the near tier does not take or hold."""
        ranges = self._ranges_that_wait(batches)
        if ranges is None or not self._pending.reserve(batches):
            self._counts.add("written_through", sum(len(batch.keys) for batch in batches))
            return self._through(batches, memory, may_publish)
        try:
            return self._write_near(batches, ranges, memory, _asked_once(may_publish))
        finally:
            self._pending.give_back(batches)

    def _ranges_that_wait(self, batches: Sequence[WriteBatch]) -> Sequence[ObjectRanges] | None:
        """Return what objects are read by; None where some cannot be copied later."""
        found = []
        for batch in batches:
            seen = RangesSeen(batch.plan.object_bytes)
            seen.add(batch.plan)
            ranges = seen.tiling()
            if ranges is None or not self._copy.objects_at_once(ranges):
                return None
            found.append(ranges)
        return found

    def _write_near(
        self,
        batches: Sequence[WriteBatch],
        ranges: Sequence[ObjectRanges],
        memory: DeviceAccess,
        may_publish: Callable[[], bool],
    ) -> Statuses:
        answer = self._near.write(batches, memory, may_publish=may_publish)
        if answer is None:
            answer = tuple((WriteStatus.FAILED,) * len(batch.keys) for batch in batches)
        kept = self._keep(batches, ranges, answer)
        left = [
            [i for i, status in enumerate(statuses) if _is_left(batch.keys[i], status, kept)]
            for batch, statuses in zip(batches, answer, strict=True)
        ]
        return self._write_rest(batches, answer, left, memory, may_publish)

    def _write_rest(
        self,
        batches: Sequence[WriteBatch],
        answer: Statuses,
        left: Sequence[Sequence[int]],
        memory: DeviceAccess,
        may_publish: Callable[[], bool],
    ) -> Statuses:
        """Write through what the near tier has not, or would not hold."""
        rest = [select_objects(batch, at) for batch, at in zip(batches, left, strict=True) if at]
        if not rest:
            return answer
        self._counts.add("written_through", sum(len(batch.keys) for batch in rest))
        given = iter(self._through(rest, memory, may_publish))
        merged = [list(statuses) for statuses in answer]
        for statuses, positions in zip(merged, left, strict=True):
            if positions:
                for i, status in zip(positions, next(given), strict=True):
                    statuses[i] = status
        return tuple(map(tuple, merged))

    def _keep(
        self, batches: Sequence[WriteBatch], ranges: Sequence[ObjectRanges], answer: Statuses
    ) -> set[ObjectKey]:
        """Hold what was written near and queue it; return the keys of what is held."""
        written = [
            (batch, batch.keys[i], own)
            for batch, own, statuses in zip(batches, ranges, answer, strict=True)
            for i, status in enumerate(statuses)
            if status is WriteStatus.WRITTEN
        ]
        keys = [key for _, key, _ in written]
        hold = self._near.hold(keys, seconds=LEASE_SECONDS) if keys else None
        if hold is None:
            return set()
        held = [item for item, is_held in zip(written, hold.present, strict=True) if is_held]
        if not held or not self._work():
            hold.release()
            return set()
        lease = Lease(hold, len(held))
        self._pending.add(
            [
                PendingObject(key=key, fingerprint=batch.fingerprint, ranges=own, lease=lease)
                for batch, key, own in held
            ]
        )
        self._work()  # it may have ended before there was something to do
        return {key for _, key, _ in held}

    # ---- copying ------------------------------------------------------------------------------

    def _work(self) -> bool:
        """See to it that the thread runs; False where there is none, as in a forked child."""
        with self._pending.changed:
            if self._is_working:
                return True
            self._is_working = True
        if self._lane.submit(self._run).was_dropped:
            self._is_working = False
            return False
        return True

    def _run(self) -> None:
        try:
            while self._has_more():
                self._renew()
                self._copy_oldest()
        except BaseException:
            self._is_working = False
            raise

    def _has_more(self) -> bool:
        """Whether there is something to copy; in the same step in which a writer sees that nobody copies."""
        with self._pending.changed:
            self._is_working = bool(len(self._pending)) and not self._is_ending
            return self._is_working

    def _copy_oldest(self) -> None:
        if self._near.is_down or self._far.is_down:
            self._wait_until_up()
            return
        items = self._pending.oldest(self._copy.objects_at_once)
        if not items:
            return
        since = self._removals.count
        try:
            copied = self._copy.copy(request_of(items), items[0].ranges, since=since)
        except Exception as error:  # noqa: BLE001  # a plugin at fault: the others are copied all the same
            logger.warning("kvlinker: tier %s: %s: %s", self._far.name, type(error).__name__, error)
            copied = (WriteStatus.FAILED,) * len(items)
        self._settle(items, copied)

    def _settle(self, items: Sequence[PendingObject], copied: Sequence[Copied]) -> None:
        outcome = [*zip(items, copied, strict=True)]
        stored = [
            item for item, what in outcome if isinstance(what, WriteStatus) and what.is_stored
        ]
        gone = [item for item, what in outcome if what in _GONE]
        refused = [item for item, what in outcome if what in _REFUSED]
        for item in refused:
            item.tries += 1
        gone += [item for item in refused if item.tries >= _MAX_TRIES]
        self._counts.add("written_back", self._pending.settle(stored))
        self._counts.add("write_back_dropped", self._pending.settle(gone))
        self._pending.put_off(refused)
        if stored or gone:
            self._is_stuck = False
        elif WriteStatus.DISCARDED in copied:
            self._pause(_REMOVAL_SECONDS)
        else:
            self._wait_until_up()

    def _wait_until_up(self) -> None:
        self._is_stuck = True
        self._pause(self._limits.pause_seconds)

    def _pause(self, seconds: float) -> None:
        with self._pending.changed:
            self._pending.changed.notify_all()  # whoever waits for the end may see that it need not
            if not self._is_ending:
                self._pending.changed.wait(seconds)

    def _renew(self) -> None:
        """Hold anew what would soon be held no more."""
        for lease, items in self._pending.due():
            hold = self._near.hold([item.key for item in items], seconds=LEASE_SECONDS)
            if hold is not None:
                lease.renew(hold)
                lost = [
                    item for item, is_held in zip(items, hold.present, strict=True) if not is_held
                ]
                self._counts.add("write_back_dropped", self._pending.settle(lost))

    # ---- removing, end ------------------------------------------------------------------------

    def forget(self, is_removed: Callable[[ObjectKey], bool]) -> None:
        """Copy no object any more that is removed."""
        self._pending.forget(is_removed)

    def flush(self, seconds: float) -> bool:
        """Wait until the far tier has everything; False when the time is over first."""
        return self._pending.wait_for_none(seconds, lambda: False)

    def close(self) -> None:
        """Copy what is pending for a bounded time, less where the far tier takes nothing, and say what is left."""
        self._pending.wait_for_none(_CLOSE_SECONDS, lambda: self._is_stuck or not self._is_working)
        with self._pending.changed:
            self._is_ending = True
            self._pending.changed.notify_all()
        self._lane.close(_HANGING_SECONDS)
        left = len(self._pending)
        if left:
            self._counts.add("write_back_dropped", left)
            self._pending.forget(lambda _: True)
            logger.warning(
                "kvlinker: %d objects were written to tier %s and not to %s before the store was closed",
                left,
                self._near.name,
                self._far.name,
            )


def _asked_once(may_publish: Callable[[], bool]) -> Callable[[], bool]:
    """Return a permission that is asked once, whoever asks; the answer stays."""
    answers: list[bool] = []

    def ask() -> bool:
        if not answers:
            answers.append(may_publish())
        return answers[0]

    return ask


def _is_left(key: ObjectKey, status: WriteStatus, kept: set[ObjectKey]) -> bool:
    """Whether the near tier does not keep an object that may be stored."""
    if status is WriteStatus.WRITTEN:
        return key not in kept
    return status not in (WriteStatus.EXISTS, WriteStatus.DISCARDED)
