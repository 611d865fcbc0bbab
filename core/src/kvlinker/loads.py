"""Loads: queued requests become a batch that lands layer by layer, or fails without a late write."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import numpy as np

from kvlinker.device import DeviceAccess, DeviceEvent, wait_for_events
from kvlinker.errors import ContractError, EventTimeoutError, StoreContractError
from kvlinker.failures import FailureLog
from kvlinker.guard import GuardedStore, checked_read
from kvlinker.lanes import Lane
from kvlinker.linker_options import LinkerOptions
from kvlinker.load_batch import LoadBatch, LoadRequest, PoolLoad, PoolRequest
from kvlinker.metrics import LinkerMetrics, TokenOutcome
from kvlinker.permits import PermittedAccess
from kvlinker.plans import TransferPlan
from kvlinker.pool_keys import GroupKeys, Quarantine
from kvlinker.pools import DevicePoolGroup
from kvlinker.store import Hold, ReadRequest, ReadSession, ReadStatus

__all__ = ["LayerCounter", "LoadQueue"]


class LayerCounter:
    """What an engine's forward waits on, layer by layer; it never raises and never waits for ever."""

    def __init__(
        self, find: Callable[[int], LoadBatch | None], expire: Callable[[LoadBatch], None]
    ) -> None:
        """Wait on the batches that `find` knows; `expire` is called at a batch's deadline."""
        self._find = find
        self._expire = expire
        self._consumer = -1

    def set_consumer(self, index: int) -> None:
        """Wait on the batch that `start_layer_wise_loading` returned; -1 for none."""
        self._consumer = index

    def wait_until(self, layer: int) -> None:
        """Return when every pool's part of the layer has landed, or the batch failed or is unknown."""
        batch = self._find(self._consumer)
        if batch is None or layer not in batch.mapped_layers:
            return
        if not batch.wait_layer(layer):
            self._expire(batch)


class LoadQueue:
    """Queued and running loads of one linker."""

    def __init__(
        self,
        group: DevicePoolGroup,
        store: GuardedStore,
        access: DeviceAccess,
        *,
        options: LinkerOptions,
        metrics: LinkerMetrics,
        failures: FailureLog,
        quarantine: Quarantine,
        release: Callable[[Hold | None], None],
    ) -> None:
        """Make an empty queue; `release` lets go of a lookup's hold."""
        self._group = group
        self._store = store
        self._access = access
        self._options = options
        self._metrics = metrics
        self._failures = failures
        self._quarantine = quarantine
        self._release = release
        self._lane = Lane("load")
        self._lock = threading.Lock()
        self._queued: dict[str, LoadRequest] = {}
        self._batches: dict[int, LoadBatch] = {}
        self._next_index = 0
        self.layer_done_counter = LayerCounter(self._batches.get, self._expire)

    def __len__(self) -> int:
        return len(self._queued) + len(self._batches)

    def is_queued(self, rid: str) -> bool:
        """Whether a load of the request waits for the next start."""
        return rid in self._queued

    # ---- queue --------------------------------------------------------------------------------

    def check(self, pools: Sequence[PoolRequest]) -> None:
        """Refuse pages that a queued load already names.

        Raises:
            ContractError: an index is no slot of its pool, or a page has two owners.
        """
        for pool in pools:
            pool.entry.prepare_locations(pool.slots)
            for request in self._queued.values():
                for other in request.pools:
                    same = other.entry is pool.entry
                    if same and np.isin(pool.slots, other.slots).any():
                        msg = (
                            f"pool {pool.entry.name!r}: a queued load of request {request.rid!r} "
                            f"names the same pages; give each request pages of its own"
                        )
                        raise ContractError(msg)

    def queue(self, request: LoadRequest) -> None:
        """Queue a checked load for the next start."""
        with self._lock:
            self._queued[request.rid] = request

    def cancel(self, rid: str) -> bool:
        """Take a queued load back; False once it started."""
        with self._lock:
            request = self._queued.pop(rid, None)
        if request is None:
            return False
        self._settle(request, TokenOutcome.CANCELLED)
        return True

    def _settle(self, request: LoadRequest, outcome: TokenOutcome) -> None:
        self._metrics.settle(outcome, request.tokens)
        self._release(request.hold)

    # ---- batches ------------------------------------------------------------------------------

    def start(self, keys: GroupKeys, ready: Iterable[DeviceEvent]) -> int:
        """Start what is queued as one batch; return its index, or -1 with nothing queued."""
        with self._lock:
            if not self._queued:
                return -1
            requests, self._queued = tuple(self._queued.values()), {}
            index, self._next_index = self._next_index, self._next_index + 1
            batch = LoadBatch(
                index=index,
                requests=requests,
                keys=keys,
                mapped_layers=frozenset(
                    layer for r in requests for p in r.pools for layer in p.entry.layer_mapping
                ),
                deadline=time.monotonic() + self._options.load_seconds,
                ready=tuple(ready),
            )
            self._batches[index] = batch
        batch.task = self._lane.submit(lambda: self._run(batch))
        if batch.task.has_ended and not batch.ended:
            # The lane has no thread to give: too many of its tasks hang in the store.
            batch.fail()
            batch.end()
            self._failures.report("load", "every worker hangs in the store")
        return index

    def finish(self, index: int) -> bool:
        """Wait until a batch no longer touches pool memory; True when every request landed."""
        batch = self._batches.get(index)
        if batch is None:
            return False
        if not batch.wait_end(until=batch.deadline):
            self._expire(batch)
            batch.wait_end(until=None)
        with self._lock:
            self._batches.pop(index, None)
        for request in batch.requests:
            failed = request.rid in batch.failed
            self._settle(request, TokenOutcome.FAILED if failed else TokenOutcome.LANDED)
        return batch.has_landed

    def failed_rids(self, index: int) -> frozenset[str]:
        """Return which requests of a running or ended, not yet finished batch have failed so far."""
        batch = self._batches.get(index)
        return frozenset(batch.failed) if batch else frozenset()

    def _expire(self, batch: LoadBatch) -> None:
        """Give a batch up at its deadline: what has not been copied in yet never will be."""
        if not self._store.capabilities.revocable:
            batch.fail()
            return
        batch.permit.revoke()
        with batch.changed:
            if batch.ended:
                return
            batch.fail()
            batch.end()
        if batch.is_reading:
            self._store.breaker.trip()
        self._failures.report("load", f"batch {batch.index} passed its deadline")
        if batch.task is not None:
            self._lane.abandon(batch.task)
        for pool in self._merged(batch):
            self._isolate(pool, range(pool.pages.num_pages))

    def _merged(self, batch: LoadBatch) -> tuple[PoolLoad, ...]:
        try:
            return batch.pool_loads()
        except Exception as error:  # noqa: BLE001  # stale pools: there is nothing left to isolate
            self._failures.report("load", error)
            return ()

    # ---- the worker ---------------------------------------------------------------------------

    def _run(self, batch: LoadBatch) -> None:
        pools: tuple[PoolLoad, ...] = ()
        stack = ExitStack()
        try:
            self._await_ready(batch)
            batch.is_reading = True
            self._group.verify()
            pools = batch.pool_loads()
            self._read(batch, pools, stack)
        except BaseException as error:  # noqa: BLE001  # a store may raise anything
            if not batch.permit.is_revoked:
                self._failures.report("load", error)
            for pool in pools:
                self._isolate(pool, range(pool.pages.num_pages))
            batch.fail()
        # No read is under way any more; closing a session must not keep the engine waiting.
        batch.end()
        self._close(stack)

    def _await_ready(self, batch: LoadBatch) -> None:
        permit = batch.permit
        if not wait_for_events(
            batch.ready, deadline=batch.deadline, is_cancelled=lambda: permit.is_revoked
        ):
            msg = (
                f"the engine's ready events did not come before the deadline of batch {batch.index}"
            )
            raise EventTimeoutError(msg)

    def _close(self, stack: ExitStack) -> None:
        try:
            stack.close()
        except BaseException as error:  # noqa: BLE001  # the store frees its sessions by itself
            self._failures.report("load", error)

    def _read(self, batch: LoadBatch, pools: tuple[PoolLoad, ...], stack: ExitStack) -> None:
        access = PermittedAccess(self._access, batch.permit, self._group.check_live)
        sessions = [(pool, self._open(pool, stack)) for pool in pools]
        if self._store.capabilities.ranged_reads:
            for layer in range(self._group.num_layers):
                for pool, parts in sessions:
                    self._read_pool(
                        batch, pool, parts, pool.entry.layer_plan(pool.pages, layer), access
                    )
                batch.complete_layers(layer + 1)
                if batch.failed >= batch.rids:
                    return
            return
        for pool, parts in sessions:
            self._read_pool(batch, pool, parts, pool.entry.page_plan(pool.pages), access)
        batch.complete_layers(self._group.num_layers)

    def _open(self, pool: PoolLoad, stack: ExitStack) -> list[ReadSession]:
        sessions = []
        for size, keys in zip(pool.entry.part_bytes, pool.keys, strict=True):
            request = ReadRequest(keys=keys, object_bytes=size, fingerprint=self._group.fingerprint)
            session = self._store.open_read(request)
            stack.callback(session.close)
            sessions.append(session)
        return sessions

    def _read_pool(
        self,
        batch: LoadBatch,
        pool: PoolLoad,
        sessions: list[ReadSession],
        plan: TransferPlan | None,
        access: PermittedAccess,
    ) -> None:
        if plan is None:
            return
        for part, (session, sub) in enumerate(zip(sessions, plan.by_part(), strict=True)):
            if not len(sub.spans.base):
                continue
            written = access.bytes_written
            statuses = checked_read(self._store.name, session, sub, access)
            bad = [page for page, status in enumerate(statuses) if status is not ReadStatus.OK]
            self._check_written(sub, len(bad), access.bytes_written - written)
            if bad:
                self._fail_pages(batch, pool, part, bad, statuses)

    def _check_written(self, plan: TransferPlan, bad: int, written: int) -> None:
        """Count the bytes, and refuse an OK for bytes that never went through the access."""
        claimed = (plan.num_pages - bad) * int(plan.range_bytes.sum())
        if written < claimed and not self._store.capabilities.device_memory:
            msg = (
                f"{self._store.name} reports {claimed} B of pool {plan.pool!r} as read and wrote "
                f"{written} B; its store plugin is at fault"
            )
            raise StoreContractError(msg)
        self._metrics.count("load_bytes", claimed)

    def _fail_pages(
        self,
        batch: LoadBatch,
        pool: PoolLoad,
        part: int,
        bad: list[int],
        statuses: tuple[ReadStatus, ...],
    ) -> None:
        first = bad[0]
        if not {pool.owners[page] for page in bad} <= batch.failed:
            self._failures.report(
                "load",
                f"{len(bad)} of {len(statuses)} pages were promised and are {statuses[first].value}",
                pool=pool.entry.name,
                key=pool.keys[part][first],
            )
        self._isolate(pool, bad)
        batch.fail(pool.owners[page] for page in bad)

    def _isolate(self, pool: PoolLoad, pages: Iterable[int]) -> None:
        chosen = list(pages)
        for part in pool.keys:
            self._quarantine.add(part[page] for page in chosen)

    # ---- life cycle ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Cancel what is queued, give up what runs, and return when nothing can be written any more."""
        with self._lock:
            queued, self._queued = list(self._queued.values()), {}
            batches = list(self._batches.values())
            self._batches.clear()
        for request in queued:
            self._settle(request, TokenOutcome.CANCELLED)
        for batch in batches:
            self._give_up(batch)
        self.layer_done_counter.set_consumer(-1)

    def _give_up(self, batch: LoadBatch) -> None:
        if self._store.capabilities.revocable:
            batch.permit.revoke()
            batch.fail()
            if not batch.wait_end(until=time.monotonic() + self._options.quiesce_seconds):
                batch.end()
                if batch.task is not None:
                    self._lane.abandon(batch.task)
        else:
            batch.wait_end(until=None)
        for request in batch.requests:
            failed = request.rid in batch.failed
            self._settle(request, TokenOutcome.FAILED if failed else TokenOutcome.ABANDONED)

    def close(self) -> None:
        """Reset, and end the thread. Idempotent."""
        self.reset()
        self._lane.close(self._options.quiesce_seconds)
