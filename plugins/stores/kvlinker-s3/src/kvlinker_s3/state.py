"""The state of an open store: its lanes, the values that each reaches, names and counters."""

from __future__ import annotations

import xxhash

from kvlinker.framed_looks import FramedState
from kvlinker.host_blocks import HostBlocks
from kvlinker_s3.lanes import Lane
from kvlinker_s3.names import Names
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
        self.read_values = S3Values(self.reads, self.names, options.call_bytes)
        self.write_values = S3Values(self.writes, self.names, options.call_bytes)
        blocks = HostBlocks(BLOCK_BYTES, kept=_KEPT_BLOCKS)
        self.framed = FramedState(
            checksum=xxhash.xxh3_64_intdigest, blocks=blocks, counters=COUNTERS
        )
        self.creates = True
        """Whether the server knows writes that do not replace; until it says otherwise."""
