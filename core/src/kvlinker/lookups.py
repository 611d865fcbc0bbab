"""Lookups: which boundaries are restorable, held until somebody loads them or nobody comes."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvlinker.boundaries import BoundaryResult, PoolNeed, needed_pages, restorable_boundaries
from kvlinker.errors import StoreTimeoutError
from kvlinker.lanes import Lane
from kvlinker.linker_parts import LinkerParts
from kvlinker.metrics import TokenOutcome
from kvlinker.pool_keys import GroupKeys
from kvlinker.pools import KV
from kvlinker.store import Hold, ObjectKey
from kvlinker.transfers import PageKey, PoolTransfer, Resolution, ResolutionStatus

__all__ = ["LookupRecord", "LookupTable"]

_NOTHING = BoundaryResult(boundaries=(), limited_by=None)


@dataclass(slots=True, kw_only=True, eq=False)
class LookupRecord:
    """One answered question of a request, with the hold behind the answer."""

    question: tuple[object, ...]
    boundaries: tuple[int, ...]
    hold: Hold | None
    expires: float
    open_tokens: int
    """Tokens promised, and not yet in a final reason."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Search:
    """One question under way in the lane; it may outlive its asker."""

    page_keys: tuple[PageKey, ...]
    needs: tuple[PoolNeed, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)
    result: BoundaryResult = _NOTHING
    too_short: int = 0
    """Pages of the longest boundary, where all of them are too short to be offered."""
    hold: Hold | None = None
    answered: bool = False
    failed: bool = False
    abandoned: bool = False
    quarantined: dict[str, set[int]] = field(default_factory=dict)
    """Pool to those of its pages that are there and in quarantine."""
    objects: dict[tuple[str, int], dict[int, ObjectKey]] = field(default_factory=dict)
    """Pool and part to page to its object key: built once for the question, then held by it."""

    def check_wanted(self) -> None:
        """Ask the store nothing more once nobody waits: an open breaker lets one call through, which is others'.

        Raises:
            StoreTimeoutError: nobody does.
        """
        if self.abandoned:
            msg = "nobody waits for this lookup any more"
            raise StoreTimeoutError(msg)

    def isolated(self, result: BoundaryResult) -> bool:
        """Whether a page in quarantine, and no absent one, ended the search."""
        pages = self.quarantined.get(result.limited_by or "", set())
        return result.lacks in pages if result.lacks is not None else bool(pages)


class LookupTable:
    """Answers lookups within a deadline and remembers the answers."""

    def __init__(self, parts: LinkerParts) -> None:
        """Make an empty table over a group and a store."""
        self._group = parts.group
        self._store = parts.store
        self._options = parts.options
        self._metrics = parts.metrics
        self._failures = parts.failures
        self._quarantine = parts.quarantine
        self._cleanup = parts.cleanup
        self._lane = Lane("lookup")
        self._lock = threading.Lock()
        self._records: OrderedDict[str, LookupRecord] = OrderedDict()

    def __len__(self) -> int:
        self.sweep()
        return len(self._records)

    def answer(
        self, rid: str, transfers: Sequence[PoolTransfer], keys: GroupKeys
    ) -> tuple[int, ...]:
        """Return every restorable boundary in pages, ascending; see Linker.lookup."""
        self.sweep()
        resolution = self._group.resolve_transfers(transfers)
        kv_keys = next((t.keys for t in transfers if t.name == KV), ())
        question = (
            keys.namespace,
            kv_keys,
            *((t.name, len(t.keys), t.hit_policy) for t in transfers),
        )
        with self._lock:
            record = self._records.get(rid)
            if record is not None and record.question == question:
                self._metrics.count("repeated_lookups")
                return record.boundaries
        old = self.take(rid)
        try:
            return self._answer_anew(rid, question, kv_keys, resolution, keys)
        finally:
            # Only now: what both answers need must not be evicted in between.
            self._let_go(old, TokenOutcome.NOT_TAKEN)

    def _answer_anew(
        self,
        rid: str,
        question: tuple[object, ...],
        kv_keys: tuple[PageKey, ...],
        resolution: Resolution,
        keys: GroupKeys,
    ) -> tuple[int, ...]:
        page = self._group.page_size
        needs = self._needs(resolution)
        self._metrics.count("lookups")
        self._metrics.look_up(len(kv_keys) * page)
        if resolution.status is not ResolutionStatus.COMPLETE:
            pool = resolution.missing[0] if resolution.missing else KV
            self._metrics.settle(TokenOutcome.MISS, len(kv_keys) * page, pool=pool)
            return ()
        search = _Search(page_keys=kv_keys, needs=needs)
        self._run(search, keys)
        result = search.result
        longest = result.boundaries[-1] if result.boundaries else 0
        self._metrics.settle(TokenOutcome.NOT_TAKEN, search.too_short * page)
        self._settle_miss(search, (len(kv_keys) - longest - search.too_short) * page)
        if not search.answered:
            # A store that could not answer may do so the next time; its breaker keeps that cheap.
            return ()
        self._remember(
            rid,
            LookupRecord(
                question=question,
                boundaries=result.boundaries,
                hold=search.hold,
                expires=time.monotonic() + self._remembered_seconds(result),
                open_tokens=longest * page,
            ),
        )
        return result.boundaries

    def _remembered_seconds(self, result: BoundaryResult) -> float:
        return self._options.hold_seconds if result.boundaries else self._options.miss_seconds

    def _needs(self, resolution: Resolution) -> tuple[PoolNeed, ...]:
        sources, multiples = self._group.sources, self._group.page_multiples
        return tuple(
            PoolNeed(
                pool=transfer.name,
                policy=transfer.hit_policy,
                window=len(transfer.keys),
                multiple=multiples.get(sources[transfer.name], 1),
            )
            for transfer in resolution
        )

    def _run(self, search: _Search, keys: GroupKeys) -> None:
        task = self._lane.submit(lambda: self._search(search, keys))
        ended = task.wait(self._options.lookup_seconds)
        with search.lock:
            # Decided under the lock: from here on a late finder releases its own hold.
            search.abandoned = not (ended or search.answered or search.failed)
        if task.was_dropped:
            self._failures.report("lookup", "every worker hangs in the store")
        elif search.abandoned:
            self._lane.abandon(task)
            self._store.breaker.trip()
            self._failures.report("lookup", f"no answer within {self._options.lookup_seconds} s")

    def _search(self, search: _Search, keys: GroupKeys) -> None:
        try:
            result, too_short = self._long_enough(self._find(search, keys))
            hold = None
            if result.boundaries and self._store.capabilities.leases:
                search.check_wanted()
                result, hold = self._held(search, keys, result)
        except BaseException as error:  # noqa: BLE001  # a store may raise anything; it is a miss
            with search.lock:
                search.failed = not search.abandoned
            if search.failed:
                self._failures.report("lookup", error)
            return
        with search.lock:
            if not search.abandoned:
                search.result, search.too_short = result, too_short
                search.hold, search.answered = hold, True
                return
        if hold is not None:
            self._cleanup.now(hold.release)

    def _find(self, search: _Search, keys: GroupKeys) -> BoundaryResult:
        def probe(pool: str, pages: Sequence[int]) -> Sequence[bool]:
            search.check_wanted()
            objects = self._objects(search, keys, pool, pages)
            flat = [key for part in objects for key in part]
            present = _all_parts(self._store.exists(flat), len(pages))
            isolated = _any_part(self._quarantine.flags(flat), len(pages))
            search.quarantined.setdefault(pool, set()).update(
                page for page, p, q in zip(pages, present, isolated, strict=True) if p and q
            )
            return [p and not q for p, q in zip(present, isolated, strict=True)]

        return restorable_boundaries(search.needs, len(search.page_keys), probe)

    def _long_enough(self, result: BoundaryResult) -> tuple[BoundaryResult, int]:
        """Drop what is not worth a load; also return the longest boundary where none is left."""
        page, least = self._group.page_size, self._options.min_hit_tokens
        kept = tuple(b for b in result.boundaries if b * page >= least)
        too_short = result.boundaries[-1] if result.boundaries and not kept else 0
        return replace(result, boundaries=kept), too_short

    def _held(
        self, search: _Search, keys: GroupKeys, result: BoundaryResult
    ) -> tuple[BoundaryResult, Hold | None]:
        """Hold what the boundaries need, and keep those boundaries that are really held."""
        wanted = [(n, needed_pages(n, result.boundaries)) for n in search.needs]
        flat: list[ObjectKey] = []
        for need, pages in wanted:
            for part in self._objects(search, keys, need.pool, pages):
                flat.extend(part)
        # A load that begins at the last moment is held until its deadline.
        seconds = self._options.hold_seconds + self._options.load_seconds
        hold, present = self._store.hold(flat, seconds=seconds)
        if all(present):
            return result, hold
        held = {key for key, is_held in zip(flat, present, strict=True) if is_held}

        def probe(pool: str, pages: Sequence[int]) -> Sequence[bool]:
            objects = self._objects(search, keys, pool, pages)
            return _all_parts([key in held for part in objects for key in part], len(pages))

        still = restorable_boundaries(search.needs, result.boundaries[-1], probe)
        kept = set(result.boundaries)
        alive = tuple(b for b in still.boundaries if b in kept)
        if not alive:
            self._cleanup.later(hold.release)
        limited = still.limited_by or result.limited_by
        return BoundaryResult(boundaries=alive, limited_by=limited), hold if alive else None

    def _objects(
        self, search: _Search, keys: GroupKeys, pool: str, pages: Sequence[int]
    ) -> list[tuple[ObjectKey, ...]]:
        """Return the object keys of a pool's pages, one tuple per part."""
        multiple = next(need.multiple for need in search.needs if need.pool == pool)
        parts = []
        for part in range(keys.parts(pool)):
            known = search.objects.setdefault((pool, part), {})
            new = [page for page in pages if page not in known]
            # A page's key chains over the prefix that ends with it: the last tree page names a larger one.
            page_keys = [search.page_keys[(page + 1) * multiple - 1] for page in new]
            known.update(zip(new, keys.of_part(pool, part, page_keys), strict=True))
            parts.append(tuple(map(known.__getitem__, pages)))
        return parts

    def _settle_miss(self, search: _Search, tokens: int) -> None:
        result = search.result
        isolated = search.isolated(result)
        if result.is_hole and not isolated:
            self._metrics.count("hole_at_page_0" if result.lacks == 0 else "hole_at_page_n")
        if isolated:
            self._metrics.settle(TokenOutcome.QUARANTINED, tokens)
        elif tokens:
            pool = result.limited_by or self._store.name
            self._metrics.settle(TokenOutcome.MISS, tokens, pool=pool)

    # ---- records ------------------------------------------------------------------------------

    def _remember(self, rid: str, record: LookupRecord) -> None:
        with self._lock:
            self._records[rid] = record
            crowded = len(self._records) > self._options.max_remembered_lookups
            oldest = next(iter(self._records)) if crowded else None
        if oldest is not None:
            self.forget(oldest, TokenOutcome.ABANDONED)

    def take(self, rid: str) -> LookupRecord | None:
        """Hand the record over to a load; its hold and open tokens go with it."""
        with self._lock:
            return self._records.pop(rid, None)

    def forget(self, rid: str, outcome: TokenOutcome) -> None:
        """Drop a record: release its hold and settle its tokens."""
        self._let_go(self.take(rid), outcome)

    def _let_go(self, record: LookupRecord | None, outcome: TokenOutcome) -> None:
        if record is not None:
            self._metrics.settle(outcome, record.open_tokens)
            if record.hold is not None:
                self._cleanup.later(record.hold.release)

    def sweep(self) -> None:
        """Drop expired records."""
        now = time.monotonic()
        with self._lock:
            expired = [rid for rid, record in self._records.items() if record.expires <= now]
        for rid in expired:
            self.forget(rid, TokenOutcome.ABANDONED)

    def clear(self) -> None:
        """Drop every record."""
        for rid in list(self._records):
            self.forget(rid, TokenOutcome.ABANDONED)

    def close(self) -> None:
        """Drop every record and end the thread. Idempotent."""
        self.clear()
        self._lane.close(0)


def _all_parts(flags: Sequence[bool], pages: int) -> list[bool]:
    """Return per page whether all of its objects are flagged; `flags` is part by part."""
    return [all(flags[page::pages]) for page in range(pages)]


def _any_part(flags: Sequence[bool], pages: int) -> list[bool]:
    """Return per page whether any of its objects is flagged; `flags` is part by part."""
    return [any(flags[page::pages]) for page in range(pages)]
