"""Loads: queued requests become a batch that lands layer by layer, or fails without a late write."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from kvlinker.device import DeviceAccess, DeviceEvent, wait_for_events
from kvlinker.errors import (
    ContractError,
    EventTimeoutError,
    StoreContractError,
    TransferRevokedError,
)
from kvlinker.guard import BreakerOpenError, checked_read
from kvlinker.lanes import Lane
from kvlinker.layer_counter import LayerCounter
from kvlinker.linker_parts import LinkerParts
from kvlinker.load_batch import LoadBatch, LoadRequest, PoolLoad, PoolRequest, read_runs
from kvlinker.metrics import TokenOutcome
from kvlinker.permits import PermittedAccess
from kvlinker.plans import TransferPlan
from kvlinker.pool_keys import GroupKeys
from kvlinker.range_limits import page_groups
from kvlinker.store import ReadRequest, ReadSession, ReadStatus

__all__ = ["LoadQueue"]


class LoadQueue:
    """Queued and running loads of one linker."""

    def __init__(self, parts: LinkerParts, access: DeviceAccess) -> None:
        """Make an empty queue."""
        self._group = parts.group
        self._store = parts.store
        self._access = access
        self._options = parts.options
        self._metrics = parts.metrics
        self._failures = parts.failures
        self._quarantine = parts.quarantine
        self._cleanup = parts.cleanup
        self._lane = Lane("load")
        self._lock = threading.Lock()
        self._queued: dict[str, LoadRequest] = {}
        self._batches: dict[int, LoadBatch] = {}
        self._finished = (-1, frozenset[str]())
        self._next_index = 0
        self.layer_done_counter = LayerCounter(self._batches.get, self._expire, self._failures)

    def __len__(self) -> int:
        return len(self._queued) + len(self._batches)

    def is_queued(self, rid: str) -> bool:
        """Whether a load of the request waits for the next start."""
        return rid in self._queued

    # ---- queue --------------------------------------------------------------------------------

    def check(self, pools: Sequence[PoolRequest]) -> None:
        """Refuse pages that a queued load already names.

        Raises:
            ContractError: a page has two owners.
        """
        for pool in pools:
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
        if request.hold is not None:
            self._cleanup.later(request.hold.release)

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
            )
            self._batches[index] = batch
        try:
            batch.ready = tuple(ready)
        except BaseException as error:  # noqa: BLE001  # what is queued was promised an index
            self._refuse(batch, error)
            return index
        batch.task = self._lane.submit(lambda: self._run(batch))
        if batch.task.was_dropped:
            self._refuse(batch, "every worker hangs in the store")
        return index

    def _refuse(self, batch: LoadBatch, reason: BaseException | str) -> None:
        batch.give_up()
        batch.end()
        self._failures.report("load", reason)

    def finish(self, index: int) -> bool:
        """Wait until a batch no longer touches pool memory; True when every request landed."""
        batch = self._batches.get(index)
        if batch is None:
            return False
        if not batch.wait_end(until=batch.deadline):
            self._expire(batch)
            batch.wait_end(until=None)
        with self._lock:
            if self._batches.pop(index, None) is None:
                return False  # a reset in another thread was first
            self._finished = index, frozenset(batch.failed)
        for request in batch.requests:
            failed = request.rid in batch.failed
            self._settle(request, TokenOutcome.FAILED if failed else TokenOutcome.LANDED)
        return batch.has_landed

    def failed_rids(self, index: int) -> frozenset[str]:
        """Return which requests of a batch failed: so far, or in the end for the one finished last."""
        batch = self._batches.get(index)
        if batch is not None:
            return frozenset(batch.failed)
        finished, failed = self._finished
        return failed if finished == index else frozenset()

    def _expire(self, batch: LoadBatch) -> None:
        """Give a batch up at its deadline: what has not been copied in yet never will be."""
        revocable, loading = self._store.is_revocable, batch.loading
        dropped = self._lane.drop(batch.task)
        is_first = batch.give_up()
        if is_first or dropped:
            batch.permit.revoke()
            if dropped or revocable:
                # A store that writes device memory itself ends by its own end; `finish` waits for it.
                batch.end()
        if not is_first:
            return
        self._failures.report("load", f"batch {batch.index} passed its deadline")
        if loading:
            self._store.breaker.trip()
            self._isolate_all(loading)
        if revocable:
            self._lane.abandon(batch.task)

    # ---- the worker ---------------------------------------------------------------------------

    def _run(self, batch: LoadBatch) -> None:
        stack = ExitStack()
        try:
            self._await_ready(batch)
            self._group.verify()
            batch.permit.keep(self._group.regions)
            batch.loading = self._split(batch.pool_loads())
            self._read(batch, stack)
            self._release_absent(batch)
        except BaseException as error:  # noqa: BLE001  # a store may raise anything
            if batch.give_up():
                self._failures.report("load", error)
                if not isinstance(error, BreakerOpenError):
                    self._isolate_all(batch.loading)
        # A store that copies behind its answer is waited for here, or refused.
        batch.permit.revoke()
        batch.end()
        # No read is under way any more; closing a session must not keep the engine waiting.
        if not self._cleanup.later(stack.close):
            self._cleanup.now(stack.close)

    def _await_ready(self, batch: LoadBatch) -> None:
        permit = batch.permit
        if not wait_for_events(
            batch.ready, deadline=batch.deadline, is_cancelled=lambda: permit.is_revoked
        ):
            msg = (
                f"the engine's ready events did not come before the deadline of batch {batch.index}"
            )
            raise EventTimeoutError(msg)

    def _split(self, pools: Iterable[PoolLoad]) -> tuple[PoolLoad, ...]:
        """Cut what has more ranges than the store takes in a call."""
        able = self._store.capabilities
        limit = able.max_ranges_per_call
        if limit is None:
            return tuple(pools)
        return tuple(
            pool.select(group)
            for pool in pools
            for group in page_groups(pool.pages, _widest(pool, ranged=able.ranged_reads), limit)
        )

    def _read(self, batch: LoadBatch, stack: ExitStack) -> None:
        access = PermittedAccess(self._access, batch.permit, self._group.check_live)
        sessions = [(pool, self._open(batch, pool, stack)) for pool in batch.loading]
        if not self._store.capabilities.ranged_reads:
            for pool, parts in sessions:
                plan = pool.entry.page_plan(pool.pages)
                self._read_pool(batch, pool, parts, plan, access)
            batch.complete_layers(self._group.num_layers)
            return
        for layers in self._runs(batch.loading):
            for pool, parts in sessions:
                layers_plan = pool.entry.layers_plan(pool.pages, layers)
                if layers_plan is not None:
                    self._read_pool(batch, pool, parts, layers_plan, access)
            batch.complete_layers(layers.stop)
            if batch.failed >= batch.rids:
                return

    def _runs(self, pools: Sequence[PoolLoad]) -> Iterator[range]:
        """Yield the layers that are read together, in order; each alone where the store limits its ranges."""
        limited = self._store.capabilities.max_ranges_per_call is not None
        least = 1 if limited else self._options.min_read_bytes
        return read_runs(pools, layers=self._group.num_layers, least=least)

    def _open(self, batch: LoadBatch, pool: PoolLoad, stack: ExitStack) -> list[ReadSession]:
        sessions = []
        for size, keys in zip(pool.entry.part_bytes, pool.keys, strict=True):
            _check_wanted(batch)
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
        plan: TransferPlan,
        access: PermittedAccess,
    ) -> None:
        for part, (session, sub) in enumerate(zip(sessions, plan.by_part(), strict=True)):
            _check_wanted(batch)
            written, began = access.bytes_written, time.monotonic()
            statuses = checked_read(self._store.name, session, sub, access)
            seconds = time.monotonic() - began
            _check_wanted(batch)
            bad = _bad_pages(statuses)
            claimed = self._check_written(sub, len(bad), access.bytes_written - written)
            self._metrics.load(sub.pool, claimed, seconds)
            if bad:
                self._fail_pages(batch, pool, part, bad, statuses)

    def _check_written(self, plan: TransferPlan, bad: int, written: int) -> int:
        """Return the bytes that were read; refuse an OK for bytes that never went through the access."""
        claimed = (plan.num_pages - bad) * int(plan.range_bytes.sum())
        if written < claimed and not self._store.capabilities.device_memory:
            msg = (
                f"{self._store.name} reports {claimed} B of pool {plan.pool!r} as read and wrote "
                f"{written} B; its store plugin is at fault"
            )
            raise StoreContractError(msg)
        return claimed

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
        batch.isolated.update(part[page] for part in pool.keys for page in bad)
        batch.fail(pool.owners[page] for page in bad)

    def _release_absent(self, batch: LoadBatch) -> None:
        """Take out of quarantine what the store does not promise any more.

        What is found under such a key later was written later, maybe by another rank: this one would not know.
        """
        keys = tuple(batch.isolated)
        if not keys:
            return
        _check_wanted(batch)
        try:
            present = self._store.exists(keys)
        except BaseException as error:  # noqa: BLE001  # a store may raise anything; the keys stay where they are
            self._failures.report("lookup", error)
            return
        self._quarantine.lift(key for key, there in zip(keys, present, strict=True) if not there)

    def _isolate_all(self, pools: Iterable[PoolLoad]) -> None:
        for pool in pools:
            self._isolate(pool, range(pool.pages.num_pages))

    def _isolate(self, pool: PoolLoad, pages: Sequence[int]) -> None:
        for part in pool.keys:
            self._quarantine.add(part[page] for page in pages)

    # ---- life cycle ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Cancel what is queued, give up what runs, and return when nothing can be written any more."""
        with self._lock:
            queued, self._queued = list(self._queued.values()), {}
            batches = list(self._batches.values())
            self._batches.clear()
            self._finished = (-1, frozenset())
        for request in queued:
            self._settle(request, TokenOutcome.CANCELLED)
        # Those that have not begun first: the lane would begin them when a hung one is left behind.
        for batch in batches:
            if self._lane.drop(batch.task):
                batch.give_up()
                batch.end()
        for batch in batches:
            self._give_up(batch)
        self.layer_done_counter.set_consumer(-1)

    def _give_up(self, batch: LoadBatch) -> None:
        batch.give_up()
        batch.permit.revoke()
        if not self._store.is_revocable:
            batch.wait_end(until=None)
        elif not batch.wait_end(until=time.monotonic() + self._options.quiesce_seconds):
            batch.end()
            self._lane.abandon(batch.task)
        for request in batch.requests:
            failed = request.rid in batch.failed
            self._settle(request, TokenOutcome.FAILED if failed else TokenOutcome.ABANDONED)

    def close(self) -> None:
        """Reset, and end the thread. Idempotent."""
        self.reset()
        self._lane.close(self._options.quiesce_seconds)


def _check_wanted(batch: LoadBatch) -> None:
    """Stop between two calls of the store once the batch was given up.

    Raises:
        TransferRevokedError: it was; no failure of the store is to be seen in what it answers now.
    """
    if batch.permit.is_revoked:
        msg = f"batch {batch.index} was given up"
        raise TransferRevokedError(msg)


def _bad_pages(statuses: tuple[ReadStatus, ...]) -> list[int]:
    """Return which pages have a status other than OK."""
    if statuses.count(ReadStatus.OK) == len(statuses):
        return []
    return [page for page, status in enumerate(statuses) if status is not ReadStatus.OK]


def _widest(pool: PoolLoad, *, ranged: bool) -> int:
    """Return how many spans one read of the pool touches at most."""
    layers = [pool.entry.layer_plan(pool.pages, layer) for layer in pool.entry.layer_mapping]
    plans = layers if ranged else [pool.entry.page_plan(pool.pages)]
    return max(len(part.spans.base) for plan in plans if plan for part in plan.by_part())
