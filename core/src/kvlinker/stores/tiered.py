"""A tiered store has a near store in front of a far one: what the far one holds is stored, the near one is quick.

A write goes through to the far store, whose answer counts, and then to the near one. A read takes each
object from the near store where it is there and right, and else from the far one, behind which it is
copied into the near one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from kvlinker.device import DeviceAccess
from kvlinker.errors import ContractError, KVLinkerError, StoreClosedError
from kvlinker.integers import as_integer
from kvlinker.spans import MemoryRegion
from kvlinker.store import (
    Hold,
    Integrity,
    ObjectKey,
    ReadRequest,
    ReadSession,
    Store,
    StoreCapabilities,
    StoreStats,
    WriteBatch,
    WriteStatus,
)
from kvlinker.stores.promotion import Promoter
from kvlinker.stores.removals import Removals
from kvlinker.stores.tier import EventCounts, Tier
from kvlinker.stores.tiered_reads import TieredHold, TieredReadSession

__all__ = ["PROMOTION_BYTES", "TieredStore", "tiered"]

PROMOTION_BYTES = 64 << 20
"""Bytes of the buffer that promoted objects pass through, taken from the system where they are used."""
_PAUSE_SECONDS = 30.0
_MAX_PROMOTION_BYTES = 1 << 40


class TieredStore(Store):
    """A near store in front of a far one, each open and closed with it."""

    def __init__(
        self,
        near: Store,
        far: Store,
        *,
        names: tuple[str, str] = ("near", "far"),
        promotion_bytes: int = PROMOTION_BYTES,
        pause_seconds: float = _PAUSE_SECONDS,
    ) -> None:
        """Take over two open stores.

        Args:
            near: the quick one; what it loses, the far one has.
            far: the one that says what is stored.
            names: of both, in counters and messages.
            promotion_bytes: of the buffer that objects pass through from far to near; 0 for no promotion.
            pause_seconds: how long a store that is down is not asked.

        Raises:
            ContractError: both read in no common way, or a value is out of bounds.
        """
        what = "promotion_bytes"
        size = as_integer(promotion_bytes, what, at_least=0, at_most=_MAX_PROMOTION_BYTES)
        self._capabilities = _common(near.capabilities, far.capabilities)
        self._counts = EventCounts()
        self._near = Tier(names[0], near, self._counts, pause_seconds=pause_seconds)
        self._far = Tier(names[1], far, self._counts, pause_seconds=pause_seconds)
        self._removals = Removals()
        self._promoter = Promoter(
            self._near, self._far, self._removals, self._counts, buffer_bytes=size
        )
        self._is_open = True

    @property
    def capabilities(self) -> StoreCapabilities:
        """What both can do; what outlives the process, and who holds, is the far store's to say."""
        return self._capabilities

    def _check_open(self) -> None:
        if not self._is_open:
            msg = f"the tiers {self._near.name} and {self._far.name} were closed; open them again"
            raise StoreClosedError(msg)

    # ---- looking ------------------------------------------------------------------------------

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; the far store is asked for what the near one lacks."""
        self._check_open()
        none = (False,) * len(keys)
        found = list(self._near.ask(lambda store: store.exists(keys), otherwise=none))
        rest = [i for i, is_near in enumerate(found) if not is_near]
        if rest:
            asked = [keys[i] for i in rest]
            hints = self._far.ask(lambda store: store.exists(asked), otherwise=none[: len(rest)])
            for i, hint in zip(rest, hints, strict=True):
                found[i] = hint
        return tuple(found)

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        """See Store; each key is held in the nearest store that has it and can."""
        self._check_open()
        if not self._capabilities.leases:
            return super().hold(keys, seconds=seconds)
        holds: list[Hold] = []
        present = [False] * len(keys)
        for tier in (self._near, self._far):
            rest = [i for i, is_held in enumerate(present) if not is_held]
            if not tier.store.capabilities.leases or not rest:
                continue
            hold = _held(tier, [keys[i] for i in rest], seconds)
            if hold is not None:
                holds.append(hold)
                for i, is_held in zip(rest, hold.present, strict=True):
                    present[i] = is_held
        return TieredHold(holds, tuple(present))

    def stats(self) -> StoreStats:
        """See Store; an object that both have is one, and takes room in both.

        Counters are the stores' own, with their names in front, and `NAME_hits`, `missed`, `promoted`,
        `promotion_dropped`, `NAME_failed` and `NAME_skipped`. The number of objects is the larger one of
        the two: which of them both have is not counted.
        """
        tiers = (self._near, self._far)
        all_stats = {tier.name: tier.store.stats() for tier in tiers}
        capacities = [stats.capacity_bytes for stats in all_stats.values()]
        counters = {
            f"{name}_{event}": count
            for name, stats in all_stats.items()
            for event, count in stats.counters.items()
        }
        for event, count in self._counts.snapshot().items():
            counters[event] = counters.get(event, 0) + count
        return StoreStats(
            objects=max(stats.objects for stats in all_stats.values()),
            used_bytes=sum(stats.used_bytes for stats in all_stats.values()),
            capacity_bytes=(
                None if None in capacities else sum(size for size in capacities if size is not None)
            ),
            counters=counters,
        )

    # ---- writing ------------------------------------------------------------------------------

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store; the answer is the far store's, and what it did not take is not in the near one either."""
        self._check_open()
        since = self._removals.count
        failed = tuple((WriteStatus.FAILED,) * len(batch.keys) for batch in batches)
        statuses = self._far.ask(
            lambda store: store.write(batches, memory, may_publish=may_publish), otherwise=failed
        )
        fresh = [_written(batch, own) for batch, own in zip(batches, statuses, strict=True)]
        wanted = [batch for batch in fresh if batch is not None]
        if wanted:
            self._copy_near(wanted, memory, since)
        return statuses

    def _copy_near(self, batches: Sequence[WriteBatch], memory: DeviceAccess, since: int) -> None:
        """Write to the near store what is stored already: whatever goes wrong, it is read from the far one."""
        if self._capabilities.overwrite and not self._near.store.capabilities.overwrite:
            keys = [key for batch in batches for key in batch.keys]
            self._near.ask(lambda store: store.delete(keys), otherwise=(False,) * len(keys))
        nothing: tuple[tuple[WriteStatus, ...], ...] = ()
        with self._removals.copying(since) as may_publish:
            try:
                self._near.ask(
                    lambda store: store.write(batches, memory, may_publish=may_publish),
                    otherwise=nothing,
                )
            except KVLinkerError:  # a device that failed now, or memory that was taken back
                self._counts.add(f"{self._near.name}_failed")

    # ---- reading ------------------------------------------------------------------------------

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        self._check_open()
        return TieredReadSession(
            self._near,
            self._far,
            request,
            promoter=self._promoter,
            counts=self._counts,
            since=self._removals.count,
            check_open=self._check_open,
        )

    def wait_for_promotions(self, seconds: float) -> bool:
        """Wait until what was read before is in the near store; False when the time is over first."""
        return self._promoter.wait(seconds)

    # ---- removing -----------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; removed from both."""
        self._check_open()
        self._removals.note()
        near, far = self._near.store.delete(keys), self._far.store.delete(keys)
        return tuple(a or b for a, b in zip(near, far, strict=True))

    def clear(self, namespace: bytes) -> int:
        """See Store; the number is the larger one of the two."""
        self._check_open()
        self._removals.note()
        return max(self._near.store.clear(namespace), self._far.store.clear(namespace))

    # ---- memory and life time -----------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See Store; with the buffer of promotions, in every store that registers memory."""
        self._check_open()
        able = [tier.store for tier in self._tiers() if tier.store.capabilities.registers_memory]
        if not able:
            super().register(regions)
        wanted = (*regions, *self._promoter.regions)
        with ExitStack() as undo:
            for store in able:
                store.register(wanted)
                undo.callback(store.unregister)
            undo.pop_all()

    def unregister(self) -> None:
        """See Store."""
        for tier in self._tiers():
            tier.store.unregister()

    def close(self) -> None:
        """See Store; what waits to be promoted stays where it is."""
        self._is_open = False
        with ExitStack() as closing:
            for tier in reversed(self._tiers()):
                closing.callback(tier.store.close)
            closing.callback(self._promoter.close)

    def _tiers(self) -> tuple[Tier, Tier]:
        return self._near, self._far


def tiered(stores: Sequence[tuple[str, Store]], *, promotion_bytes: int = PROMOTION_BYTES) -> Store:
    """Return the stores as one, from near to far; each has its name in counters.

    Args:
        stores: names and open stores.
        promotion_bytes: as TieredStore takes it, between each two of them.

    Raises:
        ContractError: there are none, two have one name, or two read in no common way.
    """
    names = [name for name, _ in stores]
    if not stores or len(set(names)) < len(names):
        msg = f"tiers need at least one store and a name for each, got {names}"
        raise ContractError(msg)
    (name, store), *behind = stores
    if not behind:
        return store
    far_name = behind[0][0] if len(behind) == 1 else f"behind_{name}"
    far = tiered(behind, promotion_bytes=promotion_bytes)
    return TieredStore(store, far, names=(name, far_name), promotion_bytes=promotion_bytes)


def _held(tier: Tier, keys: Sequence[ObjectKey], seconds: float) -> Hold | None:
    return tier.ask(lambda store: store.hold(keys, seconds=seconds), otherwise=None)


def _written(batch: WriteBatch, statuses: Sequence[WriteStatus]) -> WriteBatch | None:
    """Return what of a batch is new in the far store; None for nothing."""
    chosen = [i for i, status in enumerate(statuses) if status is WriteStatus.WRITTEN]
    if not chosen or len(chosen) == len(batch.keys):
        return batch if chosen else None
    keys = tuple(batch.keys[i] for i in chosen)
    return replace(batch, keys=keys, plan=batch.plan.select(chosen))


def _common(near: StoreCapabilities, far: StoreCapabilities) -> StoreCapabilities:
    limits = [
        able.max_ranges_per_call for able in (near, far) if able.max_ranges_per_call is not None
    ]
    both_check = near.integrity is far.integrity is Integrity.CHECKSUM
    return StoreCapabilities(
        persistent=far.persistent,
        shared=far.shared,
        ranged_reads=near.ranged_reads and far.ranged_reads,
        whole_reads=near.whole_reads and far.whole_reads,
        atomic_batches=far.atomic_batches,
        overwrite=far.overwrite,
        device_memory=near.device_memory or far.device_memory,
        registers_memory=near.registers_memory or far.registers_memory,
        revocable=near.revocable and far.revocable,
        leases=far.leases,
        integrity=Integrity.CHECKSUM if both_check else Integrity.LENGTH,
        max_object_bytes=far.max_object_bytes,
        max_ranges_per_call=min(limits, default=None),
    )
