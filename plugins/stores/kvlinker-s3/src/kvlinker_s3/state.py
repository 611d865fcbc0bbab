"""The state of an open store: its lanes, the values that each reaches, names and counters."""

from __future__ import annotations

import xxhash

from kvlinker.framed_looks import FramedState
from kvlinker.host_blocks import HostBlocks
from kvlinker_s3.directory_values import DirectoryValues
from kvlinker_s3.lanes import Lane
from kvlinker_s3.names import Names
from kvlinker_s3.object_values import ObjectValues
from kvlinker_s3.options import S3StoreOptions
from kvlinker_s3.values import S3Values

__all__ = ["BLOCK_BYTES", "COUNTERS", "StoreState"]

COUNTERS = (
    "written",
    "missed",
    "vanished",
    "corrupt",
    "short_answers",
    "discarded",
    "full",
    "no_room",
    "errors",
)
"""Events that a store counts from its opening on."""
BLOCK_BYTES = 16 << 20
"""Frames of one block of a write."""
_KEPT_BLOCKS = 4
"""So many stay for the next write."""


class StoreState:
    """What all calls of one open store share."""

    def __init__(self, options: S3StoreOptions) -> None:
        """Make the state of a store that has asked nothing yet.

        Raises:
            ContractError: see `open_client`.
            StoreError: see `open_client`.
        """
        self.options = options
        self.names = Names(options.prefix)
        self.reads = Lane(options, "loads")
        """For lookups and loads."""
        self.writes = Lane(options, "offloads")
        self.read_values = self._values(self.reads)
        self.write_values = self._values(self.writes)
        blocks = HostBlocks(BLOCK_BYTES, kept=_KEPT_BLOCKS)
        self.framed = FramedState(
            checksum=xxhash.xxh3_64_intdigest, blocks=blocks, counters=COUNTERS
        )
        self.creates = True
        """Whether the server knows writes that do not replace; until it says otherwise."""

    def _values(self, lane: Lane) -> ObjectValues:
        """Return the objects as one lane reaches them."""
        options = self.options
        if options.scheme != "file":
            return S3Values(lane, self.names, call_bytes=options.call_bytes)
        return DirectoryValues(
            lane,
            self.names,
            url=options.url,
            call_bytes=options.call_bytes,
            concurrency=options.concurrency,
        )
