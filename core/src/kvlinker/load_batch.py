"""A load batch is what one start puts under way: requests, their pages, and how far the layers are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.device import DeviceEvent
from kvlinker.entries import DevicePoolEntry
from kvlinker.lanes import LaneTask
from kvlinker.permits import TransferPermit
from kvlinker.plans import PreparedPages
from kvlinker.pool_keys import GroupKeys
from kvlinker.store import Hold, ObjectKey
from kvlinker.transfers import PageKey

__all__ = ["LoadBatch", "LoadRequest", "PoolLoad", "PoolRequest", "read_runs"]

_LATER_READS = 2
"""How many times the bytes of a load's first read later ones move."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolRequest:
    """One request's pages in one entry."""

    entry: DevicePoolEntry
    slots: IndexArray
    """The pool's own slots, copied."""
    pages: PreparedPages
    """What they make."""
    page_keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadRequest:
    """One queued load."""

    rid: str
    pools: tuple[PoolRequest, ...]
    hold: Hold | None
    tokens: int
    """Tokens of its lookup that this load takes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolLoad:
    """All requests' pages of a batch in one entry, as one plan."""

    entry: DevicePoolEntry
    pages: PreparedPages
    keys: tuple[tuple[ObjectKey, ...], ...]
    """Object keys, one tuple per part."""
    owners: tuple[str, ...]
    """The request that each page belongs to."""

    def layer_bytes(self, layer: int) -> int:
        """Return what a layer's ranges of all pages have."""
        return self.entry.layer_bytes.get(layer, 0) * self.pages.num_pages

    def select(self, pages: Sequence[int]) -> PoolLoad:
        """Return the load of some of its pages."""
        return PoolLoad(
            entry=self.entry,
            pages=self.pages.select(pages),
            keys=tuple(tuple(part[page] for page in pages) for part in self.keys),
            owners=tuple(self.owners[page] for page in pages),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class LoadBatch:
    """Loads under way together; what the worker and the engine both change is guarded by one lock.

    Who waits for the end is not woken for each layer: it would take the core that a copy has a use for.
    """

    index: int
    requests: tuple[LoadRequest, ...]
    keys: GroupKeys
    """Of the namespace under which the batch began."""
    mapped_layers: frozenset[int]
    """Layers in which any of its pools has bytes."""
    deadline: float
    ready: tuple[DeviceEvent, ...] = ()
    permit: TransferPermit = field(default_factory=TransferPermit)
    advanced: threading.Condition = field(init=False)
    """Notified when a layer landed or a request failed, and at the end."""
    over: threading.Condition = field(init=False)
    """Notified at the end alone; of the same lock."""
    loading: tuple[PoolLoad, ...] = ()
    """What the store is asked for, from when the engine's events came until the end."""
    was_given_up: bool = False
    layers_done: int = 0
    ended: bool = False
    """Nothing of the batch will touch pool memory again."""
    failed: set[str] = field(default_factory=set)
    isolated: set[ObjectKey] = field(default_factory=set)
    """What could not be read although the store answered; the worker's alone."""
    task: LaneTask = field(default_factory=LaneTask.unsubmitted)

    def __post_init__(self) -> None:
        """Make both conditions of one lock."""
        lock = threading.RLock()
        self.advanced, self.over = threading.Condition(lock), threading.Condition(lock)

    @property
    def rids(self) -> frozenset[str]:
        """Requests of the batch."""
        return frozenset(request.rid for request in self.requests)

    @property
    def has_landed(self) -> bool:
        """Whether it ended and every request got every byte."""
        return self.ended and not self.failed

    def complete_layers(self, count: int) -> None:
        """Note that layers 0..count-1 are complete in every pool."""
        with self.advanced:
            self.layers_done = max(self.layers_done, count)
            self.advanced.notify_all()

    def fail(self, rids: Iterable[str] | None = None) -> bool:
        """Mark requests, or all of them, as failed; return whether none is left."""
        with self.advanced:
            if not self.ended:
                self.failed.update(self.rids if rids is None else rids)
            self.advanced.notify_all()
            return self.failed >= self.rids

    def give_up(self) -> bool:
        """Fail every request; False where the batch ended or somebody gave it up before."""
        with self.advanced:
            if self.ended or self.was_given_up:
                return False
            self.was_given_up = True
            self.fail()
            return True

    def end(self) -> None:
        """Note that pool memory will not be touched again; let go of what only the worker needs."""
        with self.advanced:
            self.ended = True
            self.loading, self.ready = (), ()
            self.advanced.notify_all()
            self.over.notify_all()

    def wait_layer(self, layer: int) -> bool:
        """Wait until a layer is complete or the batch failed as a whole; False at the deadline."""
        with self.advanced:
            return self.advanced.wait_for(
                lambda: self.ended or self.layers_done > layer or self.failed >= self.rids,
                timeout=max(0.0, self.deadline - time.monotonic()),
            )

    def wait_end(self, *, until: float | None) -> bool:
        """Wait for the end; False when `until` (of `time.monotonic`) passes first."""
        with self.over:
            timeout = None if until is None else max(0.0, until - time.monotonic())
            return self.over.wait_for(lambda: self.ended, timeout=timeout)

    def pool_loads(self) -> tuple[PoolLoad, ...]:
        """Merge the requests' pages: one plan per entry.

        Raises:
            ContractError: two requests of the batch name one page.
        """
        by_entry: dict[str, list[tuple[str, PoolRequest]]] = {}
        for request in self.requests:
            for pool in request.pools:
                by_entry.setdefault(pool.entry.name, []).append((request.rid, pool))
        return tuple(self._merge(items) for items in by_entry.values())

    def _merge(self, items: Sequence[tuple[str, PoolRequest]]) -> PoolLoad:
        first = items[0][1]
        entry, page_keys, pages = first.entry, first.page_keys, first.pages
        if len(items) > 1:
            page_keys = tuple(key for _, pool in items for key in pool.page_keys)
            pages = entry.prepare_locations(np.concatenate([pool.slots for _, pool in items]))
        return PoolLoad(
            entry=entry,
            pages=pages,
            keys=tuple(
                self.keys.of_part(entry.name, part, page_keys)
                for part in range(self.keys.parts(entry.name))
            ),
            owners=tuple(rid for rid, pool in items for _ in pool.page_keys),
        )


def read_runs(pools: Sequence[PoolLoad], *, layers: int, least: int) -> Iterator[range]:
    """Yield the layers that are read together, in order.

    The first ones are waited for, and what comes behind them has time: later reads move twice as much. The last
    layers are read with those before, if they are too few for a read of their own.

    Args:
        pools: that are read.
        layers: how many there are.
        least: bytes of the first read; 1 for each layer alone.
    """
    if least == 1:
        yield from (range(layer, layer + 1) for layer in range(layers))
        return
    sizes = [sum(pool.layer_bytes(layer) for pool in pools) for layer in range(layers)]
    first, gathered, left, later = 0, 0, sum(sizes), _LATER_READS * least
    for end, size in enumerate(sizes, 1):
        gathered, left = gathered + size, left - size
        if end == layers or (gathered >= least and left >= later):
            yield range(first, end)
            first, gathered, least = end, 0, later
