"""Store link: what one engine asks of a linker, page by page, and the pages it keeps for it meanwhile."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvlinker.description import DescribeRequest
from kvlinker.device import DeviceEvent
from kvlinker.device_access import device_access_for
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker, LinkerOptions
from kvlinker.registry import PluginRegistry
from kvlinker.selection import resolve_hybrid_device_pool_group
from kvlinker.store import Store
from kvlinker.transfers import HitPolicy, PoolTransfer
from kvlinker_transformers.engine.sequence import PagedSequence
from kvlinker_transformers.engine.spaces import IndexSpaces
from kvlinker_transformers.pools import PagedPools

__all__ = ["PendingLoad", "StoreLink"]

_POLL_SECONDS = 0.001


@dataclass(slots=True)
class PendingLoad:
    """A load under way; finish it before its pages are given to anybody else."""

    linker: Linker
    index: int
    _landed: bool | None = None

    def gate(self, layer: int) -> None:
        """Wait until a layer's part of every pool is there, or the load has failed."""
        self.linker.layer_done_counter.wait_until(layer)

    def finish(self) -> bool:
        """Wait until nothing is written any more; return whether everything is there. Idempotent."""
        if self._landed is None:
            self._landed = self.linker.finish_layer_wise_loading(self.index)
        return self._landed


class StoreLink:
    """A linker over an engine's pools, and the pages that its offers still read."""

    def __init__(
        self,
        pools: PagedPools,
        spaces: IndexSpaces,
        store: Store,
        namespace: KeyNamespace,
        *,
        registry: PluginRegistry,
        strategy: str | None = None,
        options: LinkerOptions | None = None,
    ) -> None:
        """Lay the pools out with a model plugin and link them to a store.

        Raises:
            KVLinkerError: no one plugin takes the pools, or the store does not take their memory or objects.
        """
        self._pools = pools
        self._spaces = spaces
        group = resolve_hybrid_device_pool_group(
            "transformers",
            pools,
            DescribeRequest(page_size=pools.page_size),
            registry=registry,
            strategy=strategy,
        )
        self.linker = Linker(
            group, store, namespace, device=device_access_for(group), options=options
        )
        self._requests = itertools.count()
        spaces.reclaim = lambda: self.wait_for_offers(self.linker.options.offload_seconds)
        self._offers: deque[Mapping[str, tuple[int, ...]]] = deque()
        """Pages that each offer reads, by index space, oldest offer first."""

    # ---- restoring ----------------------------------------------------------------------------

    def new_request(self) -> str:
        """Return a name that no other request of this link has."""
        return f"request-{next(self._requests)}"

    def lookup(self, rid: str, keys: Sequence[str]) -> int:
        """Return how many of a prompt's first pages can be restored.

        Args:
            rid: the request.
            keys: of the pages that may be restored, in order.
        """
        if not keys:
            return 0
        transfers = [
            PoolTransfer(name=space, keys=tuple(keys[first:]), hit_policy=policy)
            for space, first, policy in self._spans(0, len(keys))
        ]
        return max(self.linker.lookup(rid, transfers), default=0)

    def load(self, rid: str, sequence: PagedSequence, keys: Sequence[str]) -> PendingLoad | None:
        """Start to fill a sequence's first pages; None if the linker refuses.

        Args:
            rid: the request, after a lookup.
            sequence: holds the pages.
            keys: of the pages to fill, from the first one on.
        """
        linker = self.linker
        if not linker.load(rid, self._transfers(sequence, keys, 0)):
            return None
        index = linker.start_layer_wise_loading(ready=self._ready())
        linker.layer_done_counter.set_consumer(index)
        return PendingLoad(linker, index)

    # ---- storing ------------------------------------------------------------------------------

    def offer(self, sequence: PagedSequence, keys: Sequence[str], first: int) -> bool:
        """Offer a sequence's pages [first, len(keys)) for storing, and keep them until that is done.

        The sequence must end with the last page: its windows and states are those of that boundary.

        Returns:
            Whether the linker took them.
        """
        self.settle()
        if not self.linker.offload(self._transfers(sequence, keys, first), ready=self._ready()):
            return False
        pages = {
            space: sequence.tables[space].pages[start : len(keys)]
            for space, start, _ in self._spans(first, len(keys))
        }
        self._spaces.retain(pages)
        self._offers.append(pages)
        return True

    def settle(self) -> None:
        """Let go of the pages of every offer that is done."""
        for _ in range(self.linker.num_completed_offloads()):
            self.linker.pop_completed_offload()
            self._spaces.let_go(self._offers.popleft())

    def wait_for_offers(self, seconds: float) -> bool:
        """Wait until no offer is open; False if that takes longer."""
        deadline = time.monotonic() + seconds
        self.settle()
        while self._offers and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self.settle()
        return not self._offers

    # ---- life cycle ---------------------------------------------------------------------------

    def reset(self, namespace: KeyNamespace) -> None:
        """Give up everything under way, and go on in another namespace."""
        self.linker.reset(namespace=namespace)
        self._forget()

    def close(self) -> None:
        """Close the linker; the store stays open. Idempotent."""
        self.linker.close()
        self._forget()

    def _forget(self) -> None:
        while self._offers:
            self._spaces.let_go(self._offers.popleft())

    # ---- transfers ----------------------------------------------------------------------------

    def _spans(self, first: int, last: int) -> list[tuple[str, int, HitPolicy]]:
        """Return for each index space from which page on the pages [first, last) need it."""
        spans = []
        for pool in self._pools.logical_pools:
            window = self._spaces.window_pages(pool.name)
            if window is None:
                spans.append((pool.name, first, HitPolicy.ALL_PAGES))
            else:
                spans.append((pool.name, max(0, last - window), HitPolicy.TRAILING_PAGES))
        return spans

    def _transfers(
        self, sequence: PagedSequence, keys: Sequence[str], first: int
    ) -> list[PoolTransfer]:
        return [
            PoolTransfer(
                name=space,
                keys=tuple(keys[start:]),
                device_indices=sequence.tables[space].slots(start, len(keys)),
                hit_policy=policy,
            )
            for space, start, policy in self._spans(first, len(keys))
        ]

    def _ready(self) -> list[DeviceEvent]:
        """Return an event behind everything that the engine's stream has been given; none on a CPU."""
        if self._pools.device.type != "cuda":
            return []
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._pools.device))
        return [event]
