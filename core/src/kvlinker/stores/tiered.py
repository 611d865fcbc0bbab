"""A tiered store has a near store in front of a far one: what the far one holds is stored, the near one is quick.

A write goes through to the far store, whose answer counts, and then to the near one; or to the near one
alone, and behind it to the far one. A read takes each object from the near store where it is there and right,
and else from the far one, behind which it is copied into the near one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from kvlinker.device import DeviceAccess
from kvlinker.errors import ContractError, KVLinkerError, StoreClosedError
from kvlinker.event_counts import EventCounts
from kvlinker.integers import as_integer
from kvlinker.spans import MemoryRegion
from kvlinker.store import (
    Hold,
    ObjectKey,
    ReadRequest,
    ReadSession,
    Store,
    StoreCapabilities,
    StoreStats,
    WriteBatch,
    WriteStatus,
)
from kvlinker.stores.host_pages import ObjectRanges
from kvlinker.stores.promotion import Promoter, Promotion
from kvlinker.stores.removals import Removals
from kvlinker.stores.tier import Tier, common_capabilities
from kvlinker.stores.tier_copy import of_keys, written_objects
from kvlinker.stores.tiered_reads import TieredHold, TieredReadSession
from kvlinker.stores.write_back import WriteBack, WriteBackLimits

__all__ = ["PROMOTION_BYTES", "TieredStore", "tiered"]

_T = TypeVar("_T")

PROMOTION_BYTES = 64 << 20
"""Bytes of the buffer that promoted objects pass through, taken from the system where they are used."""
_PAUSE_SECONDS = 30.0
_EVENTS = ("missed", "promoted", "promotion_dropped")
_EVENTS_BEHIND = ("written_back", "written_through", "write_back_dropped")
_EVENTS_OF_TIER = ("hits", "failed", "skipped")
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
        write_back: WriteBackLimits | None = None,
        pause_seconds: float = _PAUSE_SECONDS,
    ) -> None:
        """Take over two open stores.

        Args:
            near: the quick one; what it loses, the far one has.
            far: the one that says what is stored.
            names: of both, in counters and messages.
            promotion_bytes: of the buffer that objects pass through from far to near; 0 for no promotion.
            write_back: how much may be near before it is far; None to write through.
            pause_seconds: how long a store that is down is not asked.

        Raises:
            ContractError: both read in no common way, a value is out of bounds, or the near one cannot keep
                what is not far yet.
        """
        what = "promotion_bytes"
        size = as_integer(promotion_bytes, what, at_least=0, at_most=_MAX_PROMOTION_BYTES)
        self._capabilities = common_capabilities(
            near.capabilities, far.capabilities, is_written_back=write_back is not None
        )
        of_tiers = [f"{name}_{event}" for name in names for event in _EVENTS_OF_TIER]
        self._counts = EventCounts([*_EVENTS, *(_EVENTS_BEHIND if write_back else ()), *of_tiers])
        self._near = Tier(names[0], near, self._counts, pause_seconds=pause_seconds)
        self._far = Tier(names[1], far, self._counts, pause_seconds=pause_seconds)
        self._removals = Removals()
        self._promoter = Promoter(
            self._near, self._far, self._removals, self._counts, buffer_bytes=size
        )
        self._write_back = self._behind(write_back) if write_back else None
        self._is_open = True

    def _behind(self, limits: WriteBackLimits) -> WriteBack:
        able = self._near.store.capabilities
        if not able.leases or able.overwrite:
            why = (
                "replaces objects"
                if able.leases
                else "has no leases, and may evict what is not far yet"
            )
            msg = (
                f"tier {self._near.name} {why}: nothing can be written back from it; write through"
            )
            raise ContractError(msg)
        return WriteBack(
            self._near,
            self._far,
            self._removals,
            self._counts,
            limits=limits,
            through=self._write_through,
        )

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
        found = list(self._near.exists(keys))
        rest = [i for i, is_near in enumerate(found) if not is_near]
        if rest:
            hints = self._far.exists([keys[i] for i in rest])
            for i, hint in zip(rest, hints, strict=True):
                found[i] = hint
        return tuple(found)

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        """See Store; each key is held in the nearest store that has it and can."""
        self._check_open()
        if not self._capabilities.leases:
            return super().hold(keys, seconds=seconds)
        present = [False] * len(keys)
        with ExitStack() as undo:
            for tier in self._tiers():
                rest = [i for i, is_held in enumerate(present) if not is_held]
                able = tier.store.capabilities.leases and rest
                hold = tier.hold([keys[i] for i in rest], seconds=seconds) if able else None
                if hold is not None:
                    undo.callback(hold.release)
                    for i, is_held in zip(rest, hold.present, strict=True):
                        present[i] = is_held
            return TieredHold(undo.pop_all(), tuple(present))

    def stats(self) -> StoreStats:
        """See Store; an object that both have is one, and takes room in both.

        Counters are the stores' own, with their names in front, and `NAME_hits`, `missed`, `promoted`,
        `promotion_dropped`, `NAME_failed` and `NAME_skipped`. The number of objects is the larger one of
        the two: which of them both have is not counted. A store that is down has none of these figures.
        """
        unknown = StoreStats(objects=0, used_bytes=0, capacity_bytes=None)
        all_stats = {tier.name: tier.stats() or unknown for tier in self._tiers()}
        sizes = [stats.capacity_bytes for stats in all_stats.values()]
        return StoreStats(
            objects=max(stats.objects for stats in all_stats.values()),
            used_bytes=sum(stats.used_bytes for stats in all_stats.values()),
            capacity_bytes=None
            if None in sizes
            else sum(size for size in sizes if size is not None),
            counters=self._counters(all_stats),
        )

    def namespace_bytes(self, namespace: bytes) -> int | None:
        """See Store; what the far store has, and what is to be copied there.

        Raises:
            StoreError: the far store is down: that is not to say that it cannot tell.
        """
        far = self._far.demand(lambda store: store.namespace_bytes(namespace))
        if far is None or self._write_back is None:
            return far
        return far + self._write_back.pending_bytes(namespace)

    def _counters(self, all_stats: Mapping[str, StoreStats]) -> Mapping[str, int]:
        own = dict(self._counts.snapshot())
        if self._write_back is not None:
            own["write_back_pending"] = self._write_back.pending
        counters = {}
        for name, stats in all_stats.items():
            for event, count in stats.counters.items():
                is_taken = event in _EVENTS_OF_TIER
                counters[f"{name}_own_{event}" if is_taken else f"{name}_{event}"] = count
        return {**counters, **own}

    # ---- writing ------------------------------------------------------------------------------

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store.

        Written through, the answer is the far store's, and what it did not take is not in the near one either.
        """
        self._check_open()
        if self._write_back is not None:
            return self._write_back.write(batches, memory, may_publish)
        return self._write_through(batches, memory, may_publish)

    def _write_through(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        if self._capabilities.overwrite:
            with self._removals.removing() as replacing:
                statuses = self._write_far(batches, memory, may_publish)
                self._drop_near(written_objects(batches, statuses))
            since = replacing.since
        else:
            since = self._removals.count
            statuses = self._write_far(batches, memory, may_publish)
        # Of two that replace one object at once, nobody knows whose is far: then none is near.
        if since is not None:
            self._copy_near(written_objects(batches, statuses), memory, since)
        return statuses

    def _write_far(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        statuses = self._far.write(batches, memory, may_publish=may_publish)
        if statuses is None:
            return tuple((WriteStatus.FAILED,) * len(batch.keys) for batch in batches)
        return statuses

    def _drop_near(self, batches: Sequence[WriteBatch]) -> None:
        keys = [key for batch in batches for key in batch.keys]
        if keys:
            self._near.ask(lambda store: store.delete(keys), otherwise=(False,) * len(keys))

    def _copy_near(self, batches: Sequence[WriteBatch], memory: DeviceAccess, since: int) -> None:
        """Write to the near store what is stored already: whatever goes wrong, it is read from the far one."""
        if not batches:
            return
        with self._removals.copying(since) as may_publish:
            try:
                self._near.write(batches, memory, may_publish=may_publish)
            except KVLinkerError:  # a device that failed now, or memory that was taken back
                self._counts.add(f"{self._near.name}_failed")

    def flush(self, seconds: float) -> bool:
        """Wait until the far store has what was written back; False when the time is over first."""
        self._check_open()
        return self._write_back is None or self._write_back.flush(seconds)

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

    def prefetch(self, request: ReadRequest, *, range_bytes: Sequence[int] = ()) -> int:
        """See Store; what is not near is copied there from far, as what is read from far is."""
        self._check_open()
        sizes = range_bytes or (request.object_bytes,)
        if sum(sizes) != request.object_bytes or min(sizes) < 1:
            msg = f"ranges of {sum(sizes)} B do not make objects of {request.object_bytes} B"
            raise ContractError(msg)
        since = self._removals.count
        far = [i for i, is_near in enumerate(self._near.exists(request.keys)) if not is_near]
        if not far:
            return 0
        wanted = of_keys(request, far)
        ranges = ObjectRanges.of_sizes("prefetch", sizes)
        is_taken = self._promoter.offer(Promotion(request=wanted, ranges=ranges, since=since))
        return len(far) if is_taken else 0

    def wait_for_promotions(self, seconds: float) -> bool:
        """Wait until what was read or prefetched before is near; False when the time is over first."""
        return self._promoter.wait(seconds)

    # ---- removing -----------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; removed from both, also where one of them raises."""
        self._check_open()
        wanted = set(keys)
        with self._removing(wanted.__contains__):
            far, near = self._from_both(lambda tier: tier.delete(keys))
        return tuple(a or b for a, b in zip(far, near, strict=True))

    def clear(self, namespace: bytes) -> int:
        """See Store; the number is the larger one of the two."""
        self._check_open()
        with self._removing(lambda key: key.startswith(namespace)):
            return max(self._from_both(lambda tier: tier.demand(lambda s: s.clear(namespace))))

    @contextmanager
    def _removing(self, is_removed: Callable[[ObjectKey], bool]) -> Iterator[None]:
        with self._removals.removing():
            if self._write_back is not None:
                self._write_back.forget(is_removed)
            yield

    def _from_both(self, remove: Callable[[Tier], _T]) -> tuple[_T, _T]:
        """Remove from both tiers, and then raise what one of them raised."""
        try:
            far = remove(self._far)
        except KVLinkerError:
            remove(self._near)
            raise
        return far, remove(self._near)

    # ---- memory and life time -----------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See Store; with the buffer of promotions, in every store that registers memory."""
        self._check_open()
        able = [tier.store for tier in self._tiers() if tier.store.capabilities.registers_memory]
        if not able:
            super().register(regions)
        behind = (self._write_back.region,) if self._write_back else ()
        wanted = (*regions, *self._promoter.regions, *behind)
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
        """See Store; what waits to be promoted stays where it is, and what was written back is copied for 10 s."""
        self._is_open = False
        with ExitStack() as closing:
            for tier in reversed(self._tiers()):
                closing.callback(tier.store.close)
            closing.callback(self._promoter.close)
            if self._write_back is not None:
                closing.callback(self._write_back.close)

    def _tiers(self) -> tuple[Tier, Tier]:
        return self._near, self._far


def tiered(
    stores: Sequence[tuple[str, Store]],
    *,
    promotion_bytes: int = PROMOTION_BYTES,
    write_back: WriteBackLimits | None = None,
) -> Store:
    """Return the stores as one, from near to far; each has its name in counters.

    Args:
        stores: names and open stores.
        promotion_bytes: as TieredStore takes it, between each two of them.
        write_back: as TieredStore takes it, for the first one; those behind it are written through.

    Raises:
        ContractError: there are none, two have one name, or two of them do not go together.
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
    return TieredStore(
        store,
        far,
        names=(name, far_name),
        promotion_bytes=promotion_bytes,
        write_back=write_back,
    )
