"""Promotion copies objects that were read from a far tier into the near one, behind the read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvlinker.device import HostAccess
from kvlinker.lanes import Lane
from kvlinker.plans import TransferPlan
from kvlinker.spans import MemoryRegion
from kvlinker.store import (
    ObjectKey,
    ReadRequest,
    ReadStatus,
    Store,
    WriteBatch,
    WriteStatus,
)
from kvlinker.stores.host_pages import HostPages, ObjectRanges, by_range
from kvlinker.stores.removals import Removals
from kvlinker.stores.tier import EventCounts, Tier

__all__ = ["Promoter", "Promotion"]

_MAX_QUEUED = 256
"""Reads whose objects wait to be copied; of more, the objects stay where they are."""
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """Objects that one session has read from the far tier."""

    request: ReadRequest
    ranges: ObjectRanges
    since: int
    """Removals when the session was opened."""


class Promoter:
    """Copies from the far tier to the near one through one buffer in host memory, on one thread.

    Pool memory is not read for it: an engine may have changed a page as soon as it was loaded.
    """

    def __init__(
        self, near: Tier, far: Tier, removals: Removals, counts: EventCounts, *, buffer_bytes: int
    ) -> None:
        """Keep both tiers; nothing is copied through a buffer of 0 bytes, nor an object that is longer."""
        self._near, self._far = near, far
        self._removals, self._counts = removals, counts
        self._host = HostAccess()
        self._buffer = HostPages(buffer_bytes) if buffer_bytes else None
        self._lane = Lane("promotion")
        self._lock = threading.Lock()
        self._queued = 0

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """The buffer, for tiers that register memory."""
        return (self._buffer.region,) if self._buffer else ()

    def offer(self, promotion: Promotion) -> None:
        """Queue objects to be copied, or leave them where too many wait."""
        with self._lock:
            is_full = self._queued >= _MAX_QUEUED
            self._queued += not is_full
        if is_full or self._buffer is None:
            self._counts.add("promotion_dropped", len(promotion.request.keys))
            return
        buffer = self._buffer
        self._lane.submit(lambda: self._run(promotion, buffer))

    def wait(self, seconds: float) -> bool:
        """Wait until everything that was offered before is copied; False when the time is over first."""
        return self._lane.submit(lambda: None).wait(seconds)

    def close(self) -> None:
        """Copy nothing more, and wait for the copy under way."""
        self._lane.close(_CLOSE_SECONDS)

    def _run(self, promotion: Promotion, buffer: HostPages) -> None:
        with self._lock:
            self._queued -= 1
        keys = promotion.request.keys
        known = self._near.ask(lambda store: store.exists(keys), otherwise=(True,) * len(keys))
        wanted = [key for key, is_near in zip(keys, known, strict=True) if not is_near]
        count = self._objects_at_once(promotion.ranges, buffer)
        if not count:
            self._counts.add("promotion_dropped", len(wanted))
            return
        for first in range(0, len(wanted), count):
            if self._removals.count == promotion.since:
                self._copy(promotion, wanted[first : first + count], buffer)

    def _objects_at_once(self, ranges: ObjectRanges, buffer: HostPages) -> int:
        count = buffer.room_for(ranges.object_bytes)
        for tier in (self._near, self._far):
            limit = tier.store.capabilities.max_ranges_per_call
            count = count if limit is None else min(count, limit // len(ranges.offset))
        return count

    def _copy(self, promotion: Promotion, keys: Sequence[ObjectKey], buffer: HostPages) -> None:
        plan = buffer.plan(promotion.ranges, len(keys))
        asked = ReadRequest(
            keys=tuple(keys),
            object_bytes=promotion.request.object_bytes,
            fingerprint=promotion.request.fingerprint,
        )
        failed = (ReadStatus.FAILED,) * len(keys)
        statuses = self._far.ask(lambda store: self._read(store, asked, plan), otherwise=failed)
        good = [i for i, status in enumerate(statuses) if status is ReadStatus.OK]
        if not good:
            return
        batch = WriteBatch(
            keys=tuple(keys[i] for i in good),
            plan=plan.select(good),
            fingerprint=asked.fingerprint,
        )
        nothing: tuple[tuple[WriteStatus, ...], ...] = ()
        with self._removals.copying(promotion.since) as may_publish:
            written = self._near.ask(
                lambda store: store.write([batch], self._host, may_publish=may_publish),
                otherwise=nothing,
            )
        stored = sum(status is WriteStatus.WRITTEN for group in written for status in group)
        self._counts.add("promoted", stored)
        self._counts.add("promotion_dropped", len(keys) - stored)

    def _read(
        self, store: Store, request: ReadRequest, plan: TransferPlan
    ) -> tuple[ReadStatus, ...]:
        with store.open_read(request) as session:
            if store.capabilities.whole_reads:
                return session.read(plan, self._host)
            answers = [session.read(one, self._host) for one in by_range(plan)]
        return tuple(
            next((status for status in each if status is not ReadStatus.OK), ReadStatus.OK)
            for each in zip(*answers, strict=True)
        )
