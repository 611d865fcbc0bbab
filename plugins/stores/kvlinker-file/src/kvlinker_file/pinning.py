"""Segments in memory that a device copies itself, up to a number of bytes.

Files of a tmpfs alone: the system lets nobody pin pages of a disk's file for long.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable

from kvlinker.device import DeviceAccess
from kvlinker_file.segments import Segment

__all__ = ["PIN_COUNTERS", "SegmentPins"]

PIN_COUNTERS = ("files_pinned", "files_not_pinned")
"""Segments that were pinned, and segments that could not be; a wrapper counts objects as `pinned`."""


class SegmentPins:
    """What one opener has pinned, for every access that it was called with."""

    def __init__(
        self, segments: Callable[[], Iterable[Segment]], count: Callable[[str], None]
    ) -> None:
        """Pin nothing yet.

        Args:
            segments: returns all that there are.
            count: takes one of PIN_COUNTERS.
        """
        self.limit_bytes = 0
        """Bytes of files that are pinned at once."""
        self._segments = segments
        self._count = count
        self._lock = threading.Lock()
        self._counted: weakref.WeakSet[Segment] = weakref.WeakSet()

    def are_wanted(self, memory: DeviceAccess) -> bool:
        """Return whether pinned segments spare this access a copy."""
        return self.limit_bytes > 0 and memory.pins_host

    def pin(self, segments: Iterable[Segment], memory: DeviceAccess) -> None:
        """Pin mapped segments of which the caller has slots; what cannot be pinned is as it was.

        Raises:
            OSError: the file of one is gone.
        """
        with self._lock:
            for segment in segments:
                was_pinned = segment.is_pinned
                if not was_pinned and self._used() + segment.file_bytes > self.limit_bytes:
                    continue
                is_refused = not segment.pin(memory)
                if not was_pinned and segment not in self._counted:
                    self._counted.add(segment)
                    self._count(PIN_COUNTERS[is_refused])

    def _used(self) -> int:
        return sum(segment.file_bytes for segment in self._segments() if segment.is_pinned)
