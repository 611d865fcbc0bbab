"""Offloads: pages are read after their events, stored so that no reader is misled, and answered in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvlinker.device import DeviceAccess, DeviceEvent, wait_for_events
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import EventTimeoutError, StoreContractError, TransferRevokedError
from kvlinker.lanes import Lane, LaneTask
from kvlinker.linker_parts import LinkerParts
from kvlinker.permits import PermittedAccess, TransferPermit
from kvlinker.plans import PreparedPages, TransferPlan
from kvlinker.pool_keys import GroupKeys
from kvlinker.pools import KV
from kvlinker.range_limits import page_groups
from kvlinker.store import ObjectKey, WriteBatch, WriteStatus
from kvlinker.transfers import PageKey

__all__ = ["OffloadQueue", "PoolOffload"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolOffload:
    """Pages of one entry to store."""

    entry: DevicePoolEntry
    pages: PreparedPages
    page_keys: tuple[PageKey, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class _Offload:
    """One accepted offer, until its completion is taken."""

    pools: tuple[PoolOffload, ...]
    keys: GroupKeys
    deadline: float
    ready: tuple[DeviceEvent, ...] = ()
    permit: TransferPermit = field(default_factory=TransferPermit)
    lock: threading.Lock = field(default_factory=threading.Lock)
    outcome: bool | None = None
    was_given_up: bool = False
    is_put_off: bool = False
    """It completes False for nothing but what the store was told to keep out for now."""
    is_writing: bool = False
    """The engine's events came, and the store is being asked."""
    task: LaneTask = field(default_factory=LaneTask.unsubmitted)

    def settle(self, *, stored: bool) -> None:
        """Set the outcome, unless it was set before, and let go of the engine's objects."""
        with self.lock:
            if self.outcome is None:
                self.outcome = stored and not self.was_given_up
                self.pools, self.ready = (), ()

    def give_up(self) -> bool:
        """Note that it will complete False; False where it has completed or somebody gave it up before."""
        with self.lock:
            if self.outcome is not None or self.was_given_up:
                return False
            self.was_given_up = True
            return True


class OffloadQueue:
    """Accepted offloads of one linker, completed in the order in which they were offered."""

    def __init__(self, parts: LinkerParts, access: DeviceAccess) -> None:
        """Make an empty queue."""
        self._group = parts.group
        self._store = parts.store
        self._access = access
        self._options = parts.options
        self._metrics = parts.metrics
        self._failures = parts.failures
        self._quarantine = parts.quarantine
        self._lane = Lane("offload")
        self._offloads: deque[_Offload] = deque()

    def __len__(self) -> int:
        return len(self._offloads)

    def offer(
        self, pools: Sequence[PoolOffload], keys: GroupKeys, ready: Iterable[DeviceEvent]
    ) -> None:
        """Accept an offer: it will complete exactly once, True only if every object is stored."""
        offload = _Offload(
            pools=_publish_order(pools),
            keys=keys,
            deadline=time.monotonic() + self._options.offload_seconds,
        )
        unsettled = sum(item.outcome is None for item in self._offloads)
        self._offloads.append(offload)
        try:
            offload.ready = tuple(ready)
        except BaseException as error:  # noqa: BLE001  # L1: every rank answers the same
            self._failures.report("offload", error)
            offload.settle(stored=False)
            return
        if unsettled >= self._options.max_queued_offloads:
            self._metrics.count("offloads_dropped")
            offload.settle(stored=False)
            return
        offload.task = self._lane.submit(lambda: self._run(offload))
        if offload.task.was_dropped:
            offload.settle(stored=False)
            self._failures.report("offload", "every worker hangs in the store")

    # ---- completions --------------------------------------------------------------------------

    def num_completed(self) -> int:
        """Return how many offers at the head of the queue have an outcome; ends overdue ones first."""
        self._expire_overdue()
        for count, offload in enumerate(self._offloads):
            if offload.outcome is None:
                return count
        return len(self._offloads)

    def pop_completed(self) -> bool:
        """Take the oldest completion; False also when there is none."""
        if not self._offloads or self._offloads[0].outcome is None:
            return False
        offload = self._offloads.popleft()
        stored = offload.outcome is True
        otherwise = "offloads_put_off" if offload.is_put_off else "offloads_failed"
        self._metrics.count("offloads_stored" if stored else otherwise)
        return stored

    def _expire_overdue(self) -> None:
        now = time.monotonic()
        for offload in list(self._offloads):
            if offload.outcome is None and offload.deadline <= now:
                self._give_up(offload, f"not stored within {self._options.offload_seconds} s")

    def _give_up(self, offload: _Offload, reason: str) -> None:
        revocable = self._store.is_revocable
        dropped = self._lane.drop(offload.task)
        is_first = offload.give_up()
        if is_first or dropped:
            offload.permit.revoke()
            if dropped or revocable:
                # A store that reads device memory itself is waited for: until then the engine keeps the pages.
                offload.settle(stored=False)
        if not is_first:
            return
        self._failures.report("offload", reason)
        if offload.is_writing:
            self._store.breaker.trip()
        if revocable:
            self._lane.abandon(offload.task)

    # ---- the worker ---------------------------------------------------------------------------

    def _run(self, offload: _Offload) -> None:
        stored = False
        try:
            pools = offload.pools
            _await_ready(offload)
            offload.is_writing = True
            self._group.verify()
            offload.permit.keep(self._group.regions)
            stored = self._store_pools(offload, pools)
        except BaseException as error:  # noqa: BLE001  # a store may raise anything
            if offload.give_up():
                self._failures.report("offload", error)
        # A store that copies behind its answer is waited for here, or refused.
        offload.permit.revoke()
        offload.settle(stored=stored)

    def _store_pools(self, offload: _Offload, pools: tuple[PoolOffload, ...]) -> bool:
        batches: list[WriteBatch] = []
        for pool in pools:
            if pool.entry.is_writer:
                _check_wanted(offload)
                batches += self._batches(offload.keys, pool)
        if not batches:
            return True
        _check_wanted(offload)
        access = PermittedAccess(self._access, offload.permit, self._group.check_live)
        began = time.monotonic()
        answers = self._store.write(batches, access, may_publish=offload.permit.try_publish)
        seconds = time.monotonic() - began
        _check_wanted(offload)
        self._check_read(batches, answers, access.bytes_read)
        self._check_asked(answers, offload.permit)
        rate = seconds / sum(batch.plan.total_bytes for batch in batches)
        noted = [
            self._note(batch, answer, batch.plan.total_bytes * rate)
            for batch, answer in zip(batches, answers, strict=True)
        ]
        kept_out = sum(answer.count(WriteStatus.NOT_ADMITTED) for answer in answers)
        self._metrics.count("objects_not_admitted", kept_out)
        offload.is_put_off = kept_out > 0 and all(noted)
        return all(noted) and not kept_out

    def _check_read(
        self,
        batches: list[WriteBatch],
        answers: tuple[tuple[WriteStatus, ...], ...],
        read: int,
    ) -> None:
        """Refuse a WRITTEN for bytes that were never read from pool memory."""
        claimed = sum(
            batch.plan.object_bytes * answer.count(WriteStatus.WRITTEN)
            for batch, answer in zip(batches, answers, strict=True)
        )
        if read < claimed and not self._store.capabilities.device_memory:
            msg = (
                f"{self._store.name} reports {claimed} B as written and read {read} B of pool "
                f"memory; its store plugin is at fault"
            )
            raise StoreContractError(msg)

    def _check_asked(
        self, answers: tuple[tuple[WriteStatus, ...], ...], permit: TransferPermit
    ) -> None:
        """Refuse a WRITTEN for objects that became visible without the permission to publish."""
        if not permit.is_publishing and any(WriteStatus.WRITTEN in answer for answer in answers):
            msg = f"{self._store.name} published without asking; its store plugin is at fault"
            raise StoreContractError(msg)

    def _batches(self, keys: GroupKeys, pool: PoolOffload) -> list[WriteBatch]:
        """Return what the store does not hold yet, one batch per part or more where ranges are limited."""
        batches = []
        plan = pool.entry.page_plan(pool.pages)
        for part, sub in enumerate(plan.by_part()):
            objects = keys.of_part(pool.entry.name, part, pool.page_keys)
            missing = self._missing(objects)
            self._metrics.count("objects_skipped", len(objects) - len(missing))
            if missing:
                chosen = sub if len(missing) == len(objects) else sub.select(missing)
                batches += self._limited(tuple(objects[page] for page in missing), chosen)
        return batches

    def _limited(self, objects: tuple[ObjectKey, ...], plan: TransferPlan) -> list[WriteBatch]:
        limit = self._store.capabilities.max_ranges_per_call
        groups = page_groups(plan.pages, len(plan.spans.base), limit)
        return [
            WriteBatch(
                keys=tuple(objects[page] for page in group),
                plan=plan if len(groups) == 1 else plan.select(group),
                fingerprint=self._group.fingerprint,
            )
            for group in groups
        ]

    def _missing(self, objects: tuple[ObjectKey, ...]) -> list[int]:
        isolated = self._quarantine.flags(objects)
        if any(isolated):
            # The store says that it holds them, and could not give them: write them anew.
            self._store.delete([key for key, flag in zip(objects, isolated, strict=True) if flag])
        present = self._store.exists(objects)
        return [
            page
            for page, (there, bad) in enumerate(zip(present, isolated, strict=True))
            if bad or not there
        ]

    def _note(self, batch: WriteBatch, statuses: tuple[WriteStatus, ...], seconds: float) -> bool:
        """Count what was written and report what went wrong; whether nothing did."""
        written = [
            key for key, s in zip(batch.keys, statuses, strict=True) if s is WriteStatus.WRITTEN
        ]
        self._quarantine.lift(written)
        self._metrics.count("offload_objects", len(written))
        self._metrics.offload(batch.plan.pool, len(written) * batch.plan.object_bytes, seconds)
        fine = (WriteStatus.WRITTEN, WriteStatus.EXISTS, WriteStatus.NOT_ADMITTED)
        bad = [i for i, status in enumerate(statuses) if status not in fine]
        if bad:
            self._failures.report(
                "offload",
                f"{len(bad)} of {len(statuses)} pages were not stored: {statuses[bad[0]].value}",
                pool=batch.plan.pool,
                key=batch.keys[bad[0]],
            )
        return not bad

    # ---- life cycle ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Give up every offer and drop the completions; nothing overtaken is published."""
        offloads, self._offloads = list(self._offloads), deque()
        # Those that have not begun first: the lane would begin them when a hung one is left behind.
        for offload in offloads:
            if self._lane.drop(offload.task):
                offload.settle(stored=False)
        for offload in offloads:
            if offload.outcome is None:
                self._quiesce(offload)
        self._metrics.count("offloads_reset", len(offloads))

    def _quiesce(self, offload: _Offload) -> None:
        offload.give_up()
        offload.permit.revoke()
        if not self._store.is_revocable:
            offload.task.wait(None)
        elif not offload.task.wait(self._options.quiesce_seconds):
            self._lane.abandon(offload.task)
        offload.settle(stored=False)

    def close(self) -> None:
        """Reset, and end the thread. Idempotent."""
        self.reset()
        self._lane.close(self._options.quiesce_seconds)


def _await_ready(offload: _Offload) -> None:
    permit = offload.permit
    if not wait_for_events(
        offload.ready, deadline=offload.deadline, is_cancelled=lambda: permit.is_revoked
    ):
        msg = "the engine's ready events did not come before the deadline"
        raise EventTimeoutError(msg)


def _check_wanted(offload: _Offload) -> None:
    """Stop between two calls of the store once the offer was given up.

    Raises:
        TransferRevokedError: it was; no failure of the store is to be seen in what it answers now.
    """
    if offload.permit.is_revoked:
        msg = "the offload was given up"
        raise TransferRevokedError(msg)


def _publish_order(pools: Sequence[PoolOffload]) -> tuple[PoolOffload, ...]:
    """Return the pools in the order in which they become visible: `kv` itself last."""
    return tuple(
        sorted(pools, key=lambda pool: (pool.entry.indices_from_pool == KV, pool.entry.name == KV))
    )
