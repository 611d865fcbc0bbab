"""The state of an open store: its lanes, names and counters, and how long headers were lately."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping

import xxhash

from kvlinker_s3.blocks import Blocks
from kvlinker_s3.lanes import Lane
from kvlinker_s3.names import Names
from kvlinker_s3.options import S3StoreOptions

__all__ = ["StoreState", "checksum", "parts_of"]

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
        self.blocks = Blocks(options.call_bytes)
        """For what loads have in host memory."""
        self.creates = True
        """Whether the server knows writes that do not replace; until it says otherwise."""
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
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
