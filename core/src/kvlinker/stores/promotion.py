"""Promotion copies objects of a far tier into the near one, behind the reads that found them far."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvlinker.event_counts import EventCounts
from kvlinker.lanes import Lane
from kvlinker.spans import MemoryRegion
from kvlinker.store import ReadRequest, WriteStatus
from kvlinker.stores.host_pages import ObjectRanges
from kvlinker.stores.removals import Removals
from kvlinker.stores.tier import Tier
from kvlinker.stores.tier_copy import TierCopy, of_keys

__all__ = ["Promoter", "Promotion"]

_MAX_QUEUED = 256
"""Calls whose objects wait to be copied; of more, the objects stay where they are."""
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """Objects that are to be copied from the far tier."""

    request: ReadRequest
    ranges: ObjectRanges
    since: int
    """Removals when they were found there."""


class Promoter:
    """Copies from the far tier to the near one, on one thread."""

    def __init__(
        self, near: Tier, far: Tier, removals: Removals, counts: EventCounts, *, buffer_bytes: int
    ) -> None:
        """Keep both tiers; nothing is copied through a buffer of 0 bytes, nor an object that is longer."""
        self._near = near
        self._removals, self._counts = removals, counts
        self._copy = (
            TierCopy(far, near, removals, buffer_bytes=buffer_bytes) if buffer_bytes else None
        )
        self._lane = Lane("promotion")
        self._lock = threading.Lock()
        self._queued = 0

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """The buffer, for tiers that register memory."""
        return (self._copy.region,) if self._copy else ()

    def offer(self, promotion: Promotion) -> bool:
        """Queue objects to be copied; False where they stay, because too many wait or they are too long."""
        copy, count = self._copy, len(promotion.request.keys)
        if copy is None or not copy.objects_at_once(promotion.ranges) or not self._take():
            self._counts.add("promotion_dropped", count)
            return False
        if self._lane.submit(lambda: self._run(promotion, copy)).was_dropped:
            self._let_go()
            return False
        return True

    def _take(self) -> bool:
        with self._lock:
            is_free = self._queued < _MAX_QUEUED
            self._queued += is_free
        return is_free

    def _let_go(self) -> None:
        with self._lock:
            self._queued -= 1

    def wait(self, seconds: float) -> bool:
        """Wait until everything that was offered before is copied; False when the time is over first."""
        return self._lane.submit(lambda: None).wait(seconds)

    def close(self) -> None:
        """Copy nothing more, and wait for the copy under way."""
        self._lane.close(_CLOSE_SECONDS)

    def _run(self, promotion: Promotion, copy: TierCopy) -> None:
        self._let_go()
        request, ranges = promotion.request, promotion.ranges
        near = self._near.exists(request.keys)
        wanted = [i for i, is_near in enumerate(near) if not is_near]
        step = copy.objects_at_once(ranges)
        stored = 0
        for first in range(0, 0 if self._near.is_down else len(wanted), step):
            if self._removals.count != promotion.since:
                break
            asked = of_keys(request, wanted[first : first + step])
            copied = copy.copy(asked, ranges, since=promotion.since)
            stored += sum(status is WriteStatus.WRITTEN for status in copied)
        self._counts.add("promoted", stored)
        self._counts.add("promotion_dropped", len(wanted) - stored)
