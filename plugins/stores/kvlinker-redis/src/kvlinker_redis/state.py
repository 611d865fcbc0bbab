"""The state of an open store: its lanes, names and counters, and how long headers were lately."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import xxhash

from kvlinker_redis.blocks import Blocks
from kvlinker_redis.lanes import RedisLane
from kvlinker_redis.names import Names
from kvlinker_redis.options import RedisStoreOptions
from kvlinker_redis.values import Command, Reply

__all__ = ["COUNTERS", "MAX_COMMANDS", "StoreState", "checksum", "parts_of", "run_in_parts"]

COUNTERS = (
    "written",
    "missed",
    "vanished",
    "corrupt",
    "discarded",
    "full",
    "drafts_evicted",
    "errors",
)
"""Events that a store counts from its opening on."""

MAX_COMMANDS = 1024
"""Commands of one pipeline: enough that round trips do not count, and few enough to be answered soon."""
_LAYOUTS = 256
_USUAL_HEADER_BYTES = 4096
"""More than the header of an object with 128 ranges."""


def checksum(data: memoryview) -> int:
    """Return the XXH3 checksum of 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


def parts_of(count: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` that cover `count` items in order."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def run_in_parts(
    lane: RedisLane, commands: Sequence[Command], *, size: int = MAX_COMMANDS
) -> list[Reply]:
    """Return one reply for each of any number of commands, so many of them in one call."""
    replies: list[Reply] = []
    for part in parts_of(len(commands), size):
        replies += lane.run(commands[part])
    return replies


class StoreState:
    """What all calls of one open store share."""

    def __init__(self, options: RedisStoreOptions) -> None:
        """Make the state of a store that has asked nothing yet."""
        self.options = options
        self.names = Names(options.prefix)
        self.reads = RedisLane(options, "loads")
        """For lookups and loads."""
        self.writes = RedisLane(options, "offloads")
        self.blocks = Blocks(2 * options.call_bytes)
        self._lock = threading.Lock()
        # From the start, so that a rate shows the first event of a kind too.
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._header_bytes: OrderedDict[tuple[bytes, int], int] = OrderedDict()

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        if number:
            with self._lock:
                self._counters[name] += number

    @property
    def counters(self) -> Mapping[str, int]:
        """A copy of all counters."""
        with self._lock:
            return dict(self._counters)

    def header_bytes(self, fingerprint: bytes, object_bytes: int) -> int:
        """Return how long the headers of a layout are, as far as was seen: a guess for the first one."""
        with self._lock:
            return self._header_bytes.get((fingerprint, object_bytes), _USUAL_HEADER_BYTES)

    def note_header_bytes(self, fingerprint: bytes, object_bytes: int, size: int) -> None:
        """Note how long the headers of a layout are."""
        with self._lock:
            self._header_bytes[fingerprint, object_bytes] = size
            self._header_bytes.move_to_end((fingerprint, object_bytes))
            if len(self._header_bytes) > _LAYOUTS:
                self._header_bytes.popitem(last=False)

    def close(self) -> None:
        """Close both lanes. Idempotent."""
        self.reads.close()
        self.writes.close()
