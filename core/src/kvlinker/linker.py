"""The linker moves pages of a group to and from a store, and knows neither; nothing raises out of it.

What its calls answer may steer an engine's rank without a reduction: after `lookup`, the answers of
`load`, `offload` and `cancel_queued_load` depend on their arguments and earlier calls alone. What
fails on one rank shows through `lookup`, `finish_layer_wise_loading` or a False completion.
"""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from kvlinker.cleanup import Cleanup
from kvlinker.device import DeviceAccess, DeviceEvent
from kvlinker.errors import ContractError, RegistrationError
from kvlinker.failures import FailureLog
from kvlinker.guard import Breaker, GuardedStore
from kvlinker.keys import KeyNamespace
from kvlinker.layer_counter import LayerCounter
from kvlinker.linker_options import LinkerOptions
from kvlinker.linker_parts import LinkerParts
from kvlinker.load_batch import LoadRequest, PoolRequest
from kvlinker.loads import LoadQueue
from kvlinker.lookups import LookupTable
from kvlinker.metrics import LinkerMetrics, QueueDepths, TokenOutcome
from kvlinker.offloads import OffloadQueue, PoolOffload
from kvlinker.pool_keys import GroupKeys, Quarantine
from kvlinker.pools import KV, DevicePoolGroup
from kvlinker.registration import pools_in, register_within
from kvlinker.store import Store
from kvlinker.transfers import PoolTransfer, Resolution, ResolutionStatus

__all__ = ["Linker", "LinkerOptions"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NO_BOUNDARIES: tuple[int, ...] = ()


def _shielded(
    *,
    default: _R,
) -> Callable[[Callable[Concatenate[Linker, _P], _R]], Callable[Concatenate[Linker, _P], _R]]:
    """Turn whatever a method raises into its safe answer: the engine's scheduler dies of an exception."""

    def wrap(
        method: Callable[Concatenate[Linker, _P], _R],
    ) -> Callable[Concatenate[Linker, _P], _R]:
        @functools.wraps(method)
        def call(self: Linker, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            outer = sys.exc_info()[1]
            try:
                return method(self, *args, **kwargs)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  # L1: see the module's first lines
                self.failures.report(method.__name__.strip("_"), error, outer=outer)
                return default

        return call

    return wrap


class Linker:
    """Offers what SGLang's `UnifiedCacheLinker` asks for, over any group and any store.

    Called from one engine thread, as engines do; `layer_done_counter` may be used from another.
    Store and device are the caller's: `close` leaves them open. Before a group is closed, `reset` or
    `close` its linker: a copy that has begun keeps the memory, and writes to it to its end.
    """

    def __init__(
        self,
        group: DevicePoolGroup,
        store: Store,
        namespace: KeyNamespace,
        *,
        device: DeviceAccess,
        options: LinkerOptions | None = None,
    ) -> None:
        """Link a group to a store under a namespace.

        Args:
            group: live pools of one model on one rank.
            store: an open store.
            namespace: whose values these are.
            device: access to the group's memory.
            options: deadlines and bounds.

        Raises:
            ContractError: the store cannot take the group's objects, or pages of `kv` are not those of the prefix.
            RegistrationError: the store could not register the group's memory.
        """
        self.group = group
        self.options = options or LinkerOptions()
        self.metrics = LinkerMetrics()
        breaker = Breaker(pause_seconds=self.options.breaker_seconds)
        self._store = GuardedStore(store, breaker)
        self.failures = FailureLog(self._store.name, self.metrics)
        self._check_sizes()
        self._keys = GroupKeys(group, namespace)
        if self._store.capabilities.registers_memory:
            self._register(store)
        self._raw_store = store
        self._quarantine = Quarantine(seconds=self.options.quarantine_seconds)
        self._cleanup = Cleanup(self.failures, seconds=self.options.quiesce_seconds)
        parts = LinkerParts(
            group=group,
            store=self._store,
            options=self.options,
            metrics=self.metrics,
            failures=self.failures,
            quarantine=self._quarantine,
            cleanup=self._cleanup,
        )
        self._lookups = LookupTable(parts)
        self._loads = LoadQueue(parts, device)
        self._offloads = OffloadQueue(parts, device)
        self._closed = False
        # An engine may exit without a close: its threads and holds must not outlive it.
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)

    def _register(self, store: Store) -> None:
        regions = self.group.regions
        try:
            register_within(store, regions, seconds=self.options.register_seconds)
        except RegistrationError as error:
            sizes = "; ".join(
                f"{region.size_bytes} B of {', '.join(pools_in(self.group, region))}"
                for region in regions
            )
            msg = f"{self._store.name} could not register the pools' memory ({sizes}): {error}"
            raise RegistrationError(msg) from error

    def _check_sizes(self) -> None:
        able, name = self._store.capabilities, self._store.name
        if self.group.page_multiples.get(KV, 1) != 1:
            msg = (
                f"pool {KV!r}: its pages are {self.group.page_multiples[KV]} pages of the prefix long; "
                f"make the group's page size that of {KV!r}"
            )
            raise ContractError(msg)
        for entry in self.group.entries:
            size = max(entry.part_bytes)
            if able.max_object_bytes is not None and size > able.max_object_bytes:
                msg = (
                    f"pool {entry.name!r}: an object has {size} B, and {name} takes at most "
                    f"{able.max_object_bytes} B; use a smaller page or another store"
                )
                raise ContractError(msg)
            ranges = len(entry.spans) // len(entry.part_bytes)
            if able.max_ranges_per_call is not None and ranges > able.max_ranges_per_call:
                msg = (
                    f"pool {entry.name!r}: an object has {ranges} ranges, and {name} takes at most "
                    f"{able.max_ranges_per_call} in a call; use another store"
                )
                raise ContractError(msg)

    @property
    def layer_done_counter(self) -> LayerCounter:
        """What the engine's forward waits on, layer by layer."""
        return self._loads.layer_done_counter

    @property
    def pending(self) -> int:
        """Lookups, loads and offloads that are remembered, queued or under way."""
        return len(self._lookups) + len(self._loads) + len(self._offloads)

    @property
    def depths(self) -> QueueDepths:
        """How much of each kind is open; may be asked from any thread."""
        return QueueDepths(
            lookups=len(self._lookups),
            loads=len(self._loads),
            offloads=len(self._offloads),
            quarantined=len(self._quarantine),
        )

    # ---- lookup and load ----------------------------------------------------------------------

    def lookup(self, rid: str, transfers: Sequence[PoolTransfer]) -> list[int]:
        """Return every prefix length in pages that all pools can restore, ascending.

        Key 0 of each transfer is the first page that the device does not hold. A trailing transfer's
        key list says how long its window is; the window's keys are those of the kv list before the
        boundary. A page that is several pages of the prefix long is named by the last one's key.
        Local to this rank: the engine intersects the sets of its ranks.

        Args:
            rid: the request; asking anew replaces its hold, repeating a question costs nothing.
            transfers: one per logical pool, keys alone.
        """
        return list(self._lookup(rid, transfers))

    @_shielded(default=_NO_BOUNDARIES)
    def _lookup(self, rid: str, transfers: Sequence[PoolTransfer]) -> tuple[int, ...]:
        if self._closed:
            return ()
        return self._lookups.answer(rid, tuple(transfers), self._keys)

    @_shielded(default=False)
    def load(self, rid: str, transfers: Sequence[PoolTransfer]) -> bool:
        """Queue a load into the engine's slots; the next start runs it.

        Args:
            rid: the request; a second load of it before the start is refused.
            transfers: pages to fill, with `device_indices`; pools may be missing, `kv` too.

        Returns:
            False when the transfers are not valid, whatever the store holds.
        """
        if self._closed or self._loads.is_queued(rid):
            return False
        asked = tuple(transfers)
        pools = tuple(map(self._pool_request, self._resolve(asked)))
        self._loads.check(pools)
        self._queue(rid, asked, pools)
        return True

    def _pool_request(self, transfer: PoolTransfer) -> PoolRequest:
        entry = self.group.entry_map[transfer.name]
        slots = np.array(transfer.device_indices, dtype=np.int64)
        pages = entry.prepare_locations(slots)
        return PoolRequest(entry=entry, slots=slots, pages=pages, page_keys=transfer.keys)

    def _resolve(self, transfers: tuple[PoolTransfer, ...]) -> Resolution:
        """Return what this rank has to move; nothing, where its stage has none of the pools.

        Raises:
            ContractError: the transfers name no page, or pages without slots, on any rank.
        """
        resolution = self.group.resolve_transfers(
            transfers, allow_partial=True, allow_missing_kv=True
        )
        if resolution.status is ResolutionStatus.EMPTY:
            msg = "the transfers name no page; leave the call out"
            raise ContractError(msg)
        for transfer in transfers:
            if transfer.keys and transfer.device_indices is None:
                msg = f"pool {transfer.name!r}: a transfer of {len(transfer.keys)} pages has no device_indices"
                raise ContractError(msg)
        return resolution

    def _queue(
        self, rid: str, transfers: Sequence[PoolTransfer], pools: tuple[PoolRequest, ...]
    ) -> None:
        record = self._lookups.take(rid)
        pages = max((len(t.keys) for t in transfers if t.name == KV), default=0)
        promised = record.open_tokens if record else 0
        taken = min(pages * self.group.page_size, promised)
        self.metrics.settle(TokenOutcome.NOT_TAKEN, promised - taken)
        hold = record.hold if record else None
        self._loads.queue(LoadRequest(rid=rid, pools=pools, hold=hold, tokens=taken))

    @_shielded(default=-1)
    def start_layer_wise_loading(self, *, ready: Iterable[DeviceEvent] = ()) -> int:
        """Start what is queued as one batch.

        Args:
            ready: events after which the slots may be written: a running forward may still read them.

        Returns:
            The index for `set_consumer` and `finish_layer_wise_loading`; -1 with nothing queued.
        """
        return -1 if self._closed else self._loads.start(self._keys, ready)

    @_shielded(default=False)
    def finish_layer_wise_loading(self, index: int) -> bool:
        """Wait until a batch no longer touches pool memory; True when every layer of every request landed."""
        return self._loads.finish(index)

    @_shielded(default=frozenset[str]())
    def failed_requests(self, index: int) -> frozenset[str]:
        """Return which requests of a batch failed, for engines that can tell them apart.

        So far for one that is under way, in the end for the one that was finished last.
        """
        return self._loads.failed_rids(index)

    @_shielded(default=False)
    def cancel_queued_load(self, rid: str) -> bool:
        """Take back a load that has not started; False once it has, and then it finishes."""
        return self._loads.cancel(rid)

    # ---- offload ------------------------------------------------------------------------------

    @_shielded(default=False)
    def offload(
        self,
        transfers: Sequence[PoolTransfer],
        *,
        ready: Iterable[DeviceEvent] = (),
        session_id: str | None = None,
    ) -> bool:
        """Offer pages for storing; the engine keeps them until the completion is there.

        Args:
            transfers: pages to store, with `device_indices`; pools may be missing, `kv` too.
            ready: events after which the pages are written.
            session_id: the engine's session, for stores that attribute objects; not used for keys.

        Returns:
            Whether it was accepted; each accepted offer completes exactly once, in order.
        """
        del session_id
        if self._closed:
            return False
        pools = []
        for transfer in self._resolve(tuple(transfers)):
            entry = self.group.entry_map[transfer.name]
            pages = entry.prepare_locations(transfer.device_indices)
            pools.append(PoolOffload(entry=entry, pages=pages, page_keys=transfer.keys))
        self._offloads.offer(pools, self._keys, ready)
        return True

    @_shielded(default=0)
    def num_completed_offloads(self) -> int:
        """Return how many offers, oldest first, have completed and not been taken."""
        return self._offloads.num_completed()

    @_shielded(default=False)
    def pop_completed_offload(self) -> bool:
        """Take the oldest completion: True if every object of the offer is stored."""
        return self._offloads.pop_completed()

    # ---- life cycle ---------------------------------------------------------------------------

    @_shielded(default=None)
    def reset(self, *, namespace: KeyNamespace | None = None) -> None:
        """Give up everything under way and forget every request; no stored object is deleted.

        Returns when pool memory can no longer be touched, at the latest after `quiesce_seconds` a
        task, or when a store that cannot be revoked is done. Completions not yet taken are dropped.

        Args:
            namespace: the new one, where the engine's weights changed. One that no key can be made
                of begins an epoch of unknown weights: nothing stored before is found.
        """
        # Last in, first out; each step is taken whatever became of the ones before it.
        with ExitStack() as steps:
            if namespace is not None:
                steps.callback(self._change_keys, namespace)
            steps.callback(self._lookups.clear)
            steps.callback(self._offloads.reset)
            steps.callback(self._loads.reset)

    def _change_keys(self, namespace: KeyNamespace) -> None:
        try:
            self._keys = GroupKeys(self.group, namespace)
        except BaseException:
            # The weights changed all the same: pages of the old ones would be wrong text.
            epoch = f"unknown {secrets.token_hex(16)}"
            unknown = replace(self._keys.namespace, weights_version=epoch)
            self._keys = GroupKeys(self.group, unknown)
            raise

    @_shielded(default=None)
    def close(self) -> None:
        """Reset, end the threads and forget registered memory; from here on everything is a miss. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        with ExitStack() as steps:
            steps.callback(self._let_go)
            steps.callback(self._lookups.close)
            steps.callback(self._offloads.close)
            steps.callback(self._loads.close)

    def _let_go(self) -> None:
        if self._store.capabilities.registers_memory:
            self._cleanup.later(self._raw_store.unregister, what="close")
        if not self._cleanup.close(self.options.quiesce_seconds):
            self.failures.report("close", "the store did not let go of everything in time")


def _close_at_exit(reference: weakref.ref[Linker], process: int) -> None:
    linker = reference()
    # A forked child has none of the threads, and the holds are its parent's.
    if linker is not None and os.getpid() == process:
        linker.close()
