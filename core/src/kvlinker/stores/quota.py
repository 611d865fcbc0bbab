"""A store with quotas takes so many bytes of each namespace, and what would be more is answered as by a full store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kvlinker.device import DeviceAccess
from kvlinker.errors import ContractError
from kvlinker.event_counts import EventCounts
from kvlinker.integers import as_integer
from kvlinker.keys import NAMESPACE_BYTES, checked_namespace
from kvlinker.store import ObjectKey, Store, StoreStats, WriteBatch, WriteStatus
from kvlinker.stores.chosen_writes import write_chosen
from kvlinker.stores.usage import MAX_LOAD, Usage, usage_of
from kvlinker.stores.wrapped import WrappedStore, counting

__all__ = ["QuotaStore"]

_EVENTS = ("over_quota",)
_REFRESH_SECONDS = 1.0
_SLOW_SECONDS = 0.1
"""Of a look at what a store holds: one that asks for a few thousand objects over a network takes longer."""


@dataclass(slots=True, kw_only=True)
class _Share:
    """What a namespace may have, and has."""

    limit: int
    usage: Usage
    looks_at: float = 0.0
    """When the store may be looked at again, by the clock of `time.monotonic`."""

    def recount(self) -> bool:
        """Look again what the store holds, unless that took long and was lately; return whether it did."""
        began = time.monotonic()
        if began < self.looks_at:
            return False
        self.usage.recount()
        ended = time.monotonic()
        took = ended - began
        self.looks_at = ended + (MAX_LOAD * took if took > _SLOW_SECONDS else 0)
        return True


class QuotaStore(WrappedStore):
    """A store in which no namespace has more bytes of payload than it may."""

    def __init__(
        self,
        store: Store,
        *,
        max_bytes: int | None = None,
        namespaces: Mapping[bytes, int] | None = None,
        refresh_seconds: float = _REFRESH_SECONDS,
    ) -> None:
        """Take over an open store.

        Args:
            store: where it tells what a namespace has, all of that counts, and else what this process has written.
            max_bytes: of each namespace that is not named; None for any number.
            namespaces: bytes of those that are.
            refresh_seconds: after which a store that tells is asked again, for what other processes have written.

        Raises:
            ContractError: nothing is limited, a number is negative, or a name is none of a namespace.
        """
        super().__init__(store)
        if max_bytes is None and not namespaces:
            msg = "a quota needs a number of bytes for each namespace, or for some that it names"
            raise ContractError(msg)
        what = "quota"
        self._default = None if max_bytes is None else as_integer(max_bytes, what, at_least=0)
        self._limits = {
            checked_namespace(name): as_integer(limit, f"quota of {name.hex()}", at_least=0)
            for name, limit in (namespaces or {}).items()
        }
        self._refresh_seconds = refresh_seconds
        self._lock = threading.Lock()
        self._shares: dict[bytes, _Share | None] = {}
        self._counts = EventCounts(_EVENTS)

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store; FULL, without a byte being copied, for what would be over a quota."""
        sizes = {key: batch.plan.object_bytes for batch in batches for key in batch.keys}
        fits: dict[ObjectKey, bool] = {}
        statuses: dict[ObjectKey, WriteStatus] = {}
        try:
            self._refresh({key[:NAMESPACE_BYTES] for key in sizes})
            self._reserve(sizes, fits)
            there = self._there([key for key in sizes if not fits[key]])
            answers = write_chosen(
                lambda chosen: self._inner_write(chosen, memory, may_publish),
                batches,
                [fits[key] for batch in batches for key in batch.keys],
                otherwise=WriteStatus.FULL,
            )
            statuses = _by_key(batches, answers)
        finally:
            self._settle(sizes, fits, statuses)
        exists = WriteStatus.EXISTS
        return tuple(
            tuple(
                exists if key in there else status
                for key, status in zip(batch.keys, answer, strict=True)
            )
            for batch, answer in zip(batches, answers, strict=True)
        )

    def _there(self, refused: Sequence[ObjectKey]) -> frozenset[ObjectKey]:
        """Return which of the objects that are refused are stored already, and count the others."""
        if not refused:
            return frozenset()
        flags = self._inner_exists(refused)
        self._counts.add("over_quota", len(refused) - sum(flags))
        return frozenset(key for key, flag in zip(refused, flags, strict=True) if flag)

    def _share(self, namespace: bytes) -> _Share | None:
        """Return a namespace's share; None where it may have anything."""
        with self._lock:
            if namespace in self._shares:
                return self._shares[namespace]
        limit = self._limits.get(namespace, self._default)
        made = (
            None if limit is None else _Share(limit=limit, usage=usage_of(self._inner, namespace))
        )
        with self._lock:
            return self._shares.setdefault(namespace, made)

    def _refresh(self, namespaces: Collection[bytes]) -> None:
        for namespace in namespaces:
            share = self._share(namespace)
            if share is not None:
                share.usage.refresh(self._refresh_seconds)

    def _reserve(self, sizes: Mapping[ObjectKey, int], fits: dict[ObjectKey, bool]) -> None:
        """Reserve what objects need, and note for which there is room; a namespace without is looked at anew, once."""
        full: set[bytes] = set()
        for key, size in sizes.items():
            namespace = key[:NAMESPACE_BYTES]
            share = self._share(namespace)
            if share is None or share.usage.reserve(key, size, limit=share.limit):
                fits[key] = True
                continue
            is_fresh = namespace in full or not share.recount()
            full.add(namespace)
            fits[key] = not is_fresh and share.usage.reserve(key, size, limit=share.limit)

    def _settle(
        self,
        sizes: Mapping[ObjectKey, int],
        reserved: Mapping[ObjectKey, bool],
        statuses: Mapping[ObjectKey, WriteStatus],
    ) -> None:
        for key, is_reserved in reserved.items():
            share = self._share(key[:NAMESPACE_BYTES])
            if share is not None and is_reserved:
                status = statuses.get(key, WriteStatus.FAILED)
                is_new = status is WriteStatus.WRITTEN
                share.usage.settle(key, sizes[key], is_new=is_new, is_stored=status.is_stored)

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        usages = {key: self._usage(key[:NAMESPACE_BYTES]) for key in keys}
        before = {key: usage.writes for key, usage in usages.items() if usage is not None}
        removed = self._inner.delete(keys)
        for key, usage in usages.items():
            if usage is not None:
                usage.forget(key, since=before[key])
        return removed

    def clear(self, namespace: bytes) -> int:
        """See Store."""
        count = self._inner.clear(namespace)
        usage = self._usage(namespace)
        if usage is not None:
            usage.recount(everything=True)
        return count

    def _usage(self, namespace: bytes) -> Usage | None:
        """Return a namespace's usage, where it was written to and is limited."""
        with self._lock:
            share = self._shares.get(namespace)
        return None if share is None else share.usage

    def stats(self) -> StoreStats:
        """See Store; `over_quota` counts objects that were refused."""
        return counting(self._inner.stats(), self._counts.snapshot())


def _by_key(
    batches: Sequence[WriteBatch], answers: Sequence[Sequence[WriteStatus]]
) -> dict[ObjectKey, WriteStatus]:
    """Return what became of each object; of one that was named twice, that it was written."""
    found: dict[ObjectKey, WriteStatus] = {}
    for batch, answer in zip(batches, answers, strict=True):
        for key, status in zip(batch.keys, answer, strict=True):
            if found.get(key) is not WriteStatus.WRITTEN:
                found[key] = status
    return found
