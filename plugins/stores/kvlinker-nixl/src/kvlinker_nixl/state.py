"""The state of an open store whose objects lie in slots: its depot, its two lines, and counters."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import xxhash

from kvlinker.event_counts import EventCounts
from kvlinker_nixl.depots import Depot
from kvlinker_nixl.moving import Line

__all__ = ["SlotState", "checksum"]

_EVENTS = ("corrupt", "discarded", "errors", "foreign", "full", "missed", "vanished")
_BLOCK = 4096
_WINDOW_BYTES = 8 << 20
"""Two of them are in the processor's last cache, and calls cost little beside them."""
_log = logging.getLogger(__name__)


def checksum(data: memoryview) -> int:
    """Return the XXH3 checksum of 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


class SlotState:
    """What all calls of one open store share."""

    def __init__(
        self,
        depot: Depot,
        *,
        reads: Line,
        writes: Line,
        alignment: int,
        is_staged: bool,
        has_checksums: bool,
    ) -> None:
        """Take over a depot and lines.

        Args:
            depot: says where objects are.
            reads: for loads.
            writes: for offloads.
            alignment: transfers of staged bytes begin and end at multiples of it, in the space and in memory.
            is_staged: bytes go through blocks of host memory; otherwise straight to and from pool memory.
            has_checksums: of payloads; without, headers alone are checked.
        """
        self.depot = depot
        self.reads = reads
        self.writes = writes
        self.alignment = alignment
        self.is_staged = is_staged
        self.has_checksums = has_checksums
        self._counts = EventCounts(_EVENTS)

    def read_bytes(self, total: int) -> int:
        """Return how many bytes a load moves before it compares them, of so many in all."""
        return self.reads.bytes_at_once(total, is_cached=self.alignment < _BLOCK)

    @property
    def window_bytes(self) -> int:
        """How many bytes of several layers to read at once, where one after the other is asked for."""
        return min(_WINDOW_BYTES, self.reads.limits.call_bytes)

    def write_bytes(self, total: int) -> int:
        """Return how many bytes an offload puts together before it moves them, of so many in all."""
        return self.writes.bytes_at_once(total, is_cached=self.alignment < _BLOCK)

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        self._counts.add(name, number)

    @property
    def counters(self) -> Mapping[str, int]:
        """A copy of all counters."""
        return self._counts.snapshot()

    def close(self) -> bool:
        """Wait for what runs, for a while, and let go of everything; False where a transfer is still under way.

        Then what it may touch is let go of when the process ends. Idempotent.
        """
        is_quiet = all([self.reads.close(), self.writes.close()])
        if is_quiet:
            self.depot.close()
        else:
            _log.warning("%s: a transfer did not end; its memory and file stay open", self.reads)
        return is_quiet
