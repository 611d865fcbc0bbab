"""The state of an open store: its lanes, the values that each reaches, names and counters."""

from __future__ import annotations

import xxhash

from kvlinker.framed_looks import FramedState
from kvlinker.host_blocks import HostBlocks
from kvlinker_redis.lanes import RedisLane
from kvlinker_redis.names import Names
from kvlinker_redis.options import RedisStoreOptions
from kvlinker_redis.values import RedisValues

__all__ = ["COUNTERS", "StoreState"]

COUNTERS = (
    "written",
    "missed",
    "vanished",
    "corrupt",
    "short_answers",
    "discarded",
    "full",
    "drafts_evicted",
    "errors",
)
"""Events that a store counts from its opening on."""
_KEPT_CALLS = 3
"""As many bytes as so many calls carry are kept in one block: two objects that go alone, and what is around them."""


class StoreState:
    """What all calls of one open store share."""

    def __init__(self, options: RedisStoreOptions) -> None:
        """Make the state of a store that has asked nothing yet."""
        self.options = options
        self.names = Names(options.prefix)
        self.reads = RedisLane(options, "loads")
        """For lookups and loads."""
        self.writes = RedisLane(options, "offloads")
        blocks = HostBlocks(_KEPT_CALLS * options.call_bytes)
        self.read_values = RedisValues(self.reads, self.names, options, blocks)
        self.write_values = RedisValues(self.writes, self.names, options, blocks)
        self.framed = FramedState(
            checksum=xxhash.xxh3_64_intdigest, blocks=blocks, counters=COUNTERS
        )
