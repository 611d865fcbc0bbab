"""The state of an open store: its client, names, memory, counters, and what is removed but still leased."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import xxhash

from kvlinker.event_counts import EventCounts
from kvlinker_mooncake.calls import Calls
from kvlinker_mooncake.client import DRAIN_SECONDS, Client, Found
from kvlinker_mooncake.memory import Blocks, PoolMemory
from kvlinker_mooncake.names import Names
from kvlinker_mooncake.options import MooncakeStoreOptions
from kvlinker_mooncake.removing import Removals

__all__ = ["StoreState", "checksum"]

_EVENTS = (
    "contended",
    "corrupt",
    "discarded",
    "errors",
    "full",
    "missed",
    "no_room",
    "read_whole",
    "vanished",
    "written",
)


def checksum(data: memoryview) -> int:
    """Return the XXH3 checksum of 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


class StoreState:
    """What all calls of one open store share."""

    def __init__(self, options: MooncakeStoreOptions, client: Client) -> None:
        """Take a client that has joined."""
        self.options = options
        self.client = client
        self.names = Names(options.prefix)
        self.pools = PoolMemory(client)
        self.blocks = Blocks(client, options.call_bytes)
        self.removals = Removals(client, options)
        self.metrics = Calls(f"{options.label} metrics", pause_seconds=options.pause_seconds)
        """Of the metrics server, which may be away while the master is there."""
        self.ranged = False
        """Whether reads go layer by layer."""
        self._counts = EventCounts(_EVENTS)

    def look(self, names: Sequence[str]) -> list[Found | None]:
        """Return what is known of each object that can be read; None for the others, and for what is hidden.

        Raises:
            StoreError: the master cannot be asked.
        """
        shown = self._shown(names)
        if len(shown) == len(names):
            return self.client.look(names)
        found = dict(zip(shown, self.client.look(shown), strict=True))
        return [found.get(name) for name in names]

    def exist(self, names: Sequence[str]) -> tuple[bool, ...]:
        """Return whether each object can be read; see `look`.

        Raises:
            StoreError: the master cannot be asked.
        """
        shown = self._shown(names)
        if len(shown) == len(names):
            return tuple(self.client.exist(names))
        found = dict(zip(shown, self.client.exist(shown), strict=True))
        return tuple(found.get(name, False) for name in names)

    def _shown(self, names: Sequence[str]) -> Sequence[str]:
        """Return what may be asked for: a question takes a lease, and what is hidden waits for the last one's end."""
        if not self.removals.hidden:
            return names
        hidden = self.removals.are_hidden(names)
        return [name for name, is_hidden in zip(names, hidden, strict=True) if not is_hidden]

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        self._counts.add(name, number)

    @property
    def counters(self) -> Mapping[str, int]:
        """A copy of all counters."""
        return self._counts.snapshot()

    def close(self, *, at_exit: bool = False) -> None:
        """Let go of all memory, and leave the cluster, see `Client.close`. Idempotent.

        What touches the pools is waited for, whatever it takes; a process that ends waits for a while.
        """
        if self.client.calls.is_foreign:
            return
        if self.client.calls.end_moves(DRAIN_SECONDS if at_exit else None):
            self.pools.unregister()
        self.blocks.close()
        self.metrics.close()
        self.client.close(at_exit=at_exit)
