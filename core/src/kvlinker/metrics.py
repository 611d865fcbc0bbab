"""Metrics: plain counters that close; exporters read snapshots of them."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

__all__ = [
    "FAILING_CALLS",
    "LinkerMetrics",
    "MetricsSnapshot",
    "PoolTraffic",
    "QueueDepths",
    "TokenOutcome",
]

FAILING_CALLS = (
    "cancel_queued_load",
    "close",
    "failed_requests",
    "finish_layer_wise_loading",
    "load",
    "lookup",
    "num_completed_offloads",
    "offload",
    "pop_completed_offload",
    "release",
    "reset",
    "start_layer_wise_loading",
    "wait",
)
"""Every call that a failure may be counted for, so that exporters can show each from the start."""


class TokenOutcome(Enum):
    """The one reason in which a token that was looked up ends."""

    LANDED = "landed"
    FAILED = "failed"
    MISS = "miss"
    QUARANTINED = "quarantined"
    CANCELLED = "cancelled"
    NOT_TAKEN = "not_taken"
    """Restorable, and the engine loaded less or asked anew."""
    ABANDONED = "abandoned"
    """Restorable, and nobody came for it: expired, reset or closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTraffic:
    """What was moved for one pool, and how long the store took."""

    load_bytes: int = 0
    load_seconds: float = 0.0
    offload_bytes: int = 0
    offload_seconds: float = 0.0
    """Of writes that store several pools at once, the pool's share by bytes."""

    def loaded(self, size: int, seconds: float) -> PoolTraffic:
        """Return this and a load of so many bytes; made for each read, and so without `replace`."""
        return PoolTraffic(
            load_bytes=self.load_bytes + size,
            load_seconds=self.load_seconds + seconds,
            offload_bytes=self.offload_bytes,
            offload_seconds=self.offload_seconds,
        )

    def offloaded(self, size: int, seconds: float) -> PoolTraffic:
        """Return this and an offload of so many bytes."""
        return PoolTraffic(
            load_bytes=self.load_bytes,
            load_seconds=self.load_seconds,
            offload_bytes=self.offload_bytes + size,
            offload_seconds=self.offload_seconds + seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """All counters at one moment."""

    tokens_looked_up: int
    tokens: Mapping[TokenOutcome, int]
    tokens_open: int
    """Looked up, and not yet in a final reason."""
    misses_by_pool: Mapping[str, int]
    """Tokens in reason MISS, by the pool that ended the search, or by the store where it gave no answer."""
    events: Mapping[str, int]
    """Calls, objects, bytes and errors by name, such as `lookups` or `offload_bytes`."""
    pools: Mapping[str, PoolTraffic]
    """By the name of the pool."""

    @property
    def closes(self) -> bool:
        """Whether no token is counted in two reasons: every one looked up is in one, or still open."""
        settled = sum(self.tokens.values())
        return self.tokens_open >= 0 and self.tokens_looked_up == self.tokens_open + settled


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepths:
    """What a linker has open at one moment."""

    lookups: int
    """Answers that are remembered, with what they hold."""
    loads: int
    """Queued requests and batches under way."""
    offloads: int
    """Offers that were accepted and whose completion was not taken."""
    quarantined: int
    """Objects that could not be read and count as missing."""


class LinkerMetrics:
    """Thread-safe counters of one linker."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self._looked_up = 0
        self._open = 0
        self._tokens: Counter[TokenOutcome] = Counter()
        self._misses: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._pools: defaultdict[str, PoolTraffic] = defaultdict(PoolTraffic)

    def look_up(self, tokens: int) -> None:
        """Open tokens."""
        with self._lock:
            self._looked_up += tokens
            self._open += tokens

    def settle(self, outcome: TokenOutcome, tokens: int, *, pool: str | None = None) -> None:
        """End open tokens in a reason; a miss names its pool."""
        with self._lock:
            self._tokens[outcome] += tokens
            self._open -= tokens
            if pool is not None:
                self._misses[pool] += tokens

    def count(self, event: str, amount: int = 1) -> None:
        """Count an event."""
        with self._lock:
            self._events[event] += amount

    def load(self, pool: str, size: int, seconds: float) -> None:
        """Count bytes that were read into a pool."""
        with self._lock:
            self._events["load_bytes"] += size
            self._pools[pool] = self._pools[pool].loaded(size, seconds)

    def offload(self, pool: str, size: int, seconds: float) -> None:
        """Count bytes that were stored of a pool."""
        with self._lock:
            self._events["offload_bytes"] += size
            self._pools[pool] = self._pools[pool].offloaded(size, seconds)

    def snapshot(self) -> MetricsSnapshot:
        """Return a consistent copy."""
        with self._lock:
            return MetricsSnapshot(
                tokens_looked_up=self._looked_up,
                tokens=MappingProxyType({o: self._tokens[o] for o in TokenOutcome}),
                tokens_open=self._open,
                misses_by_pool=MappingProxyType(dict(self._misses)),
                events=MappingProxyType(dict(self._events)),
                pools=MappingProxyType(dict(self._pools)),
            )
