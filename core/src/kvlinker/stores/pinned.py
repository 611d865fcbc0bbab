"""A pinning store keeps chosen objects from eviction: of some namespaces, those that are used often, or by name."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from kvlinker.device import DeviceAccess
from kvlinker.errors import ContractError
from kvlinker.event_counts import EventCounts
from kvlinker.integers import as_integer
from kvlinker.keys import NAMESPACE_BYTES, checked_namespace
from kvlinker.store import (
    ObjectKey,
    ReadRequest,
    ReadSession,
    Store,
    StoreStats,
    WriteBatch,
    WriteStatus,
)
from kvlinker.stores.pins import Pins
from kvlinker.stores.wrapped import WrappedStore, counting

__all__ = ["LEASE_SECONDS", "PinningStore"]

_EVENTS = ("pin_failed", "pin_lost", "pin_refused", "pinned", "unpinned")
LEASE_SECONDS = 60.0
_MAX_LEASE_SECONDS = 86_400.0
_MAX_COUNTED = 1 << 16
"""Objects whose uses are counted, those that were used last."""
_SHARE = 0.75
"""Of a store's capacity at most: what is pinned takes its headers too, and others need room."""


class PinningStore(WrappedStore):
    """A store with leases, some of whose objects this process renews for as long as it lives."""

    def __init__(
        self,
        store: Store,
        *,
        max_bytes: int,
        namespaces: Collection[bytes] = (),
        uses: int | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """Take over an open store.

        Args:
            store: with leases.
            max_bytes: payload bytes of all pinned objects together; what is more is not pinned.
            namespaces: whose objects are pinned when they are written or read here.
            uses: reads here after which an object of any namespace is pinned; None for none.
            lease_seconds: how long objects stay pinned once this process is gone.

        Raises:
            ContractError: the store has no leases, or not so much room, or a value is out of bounds.
        """
        super().__init__(store)
        _check_leases(store)
        count = as_integer(max_bytes, "max_bytes", at_least=1)
        _check_room(store, count)
        self._uses = None if uses is None else as_integer(uses, "uses", at_least=1)
        if not (math.isfinite(lease_seconds) and 0 < lease_seconds <= _MAX_LEASE_SECONDS):
            msg = f"lease_seconds must be above 0 and at most a day, got {lease_seconds!r}"
            raise ContractError(msg)
        self._namespaces = frozenset(map(checked_namespace, namespaces))
        self._counts = EventCounts(_EVENTS)
        self._pins = Pins(store, self._counts, max_bytes=count, lease_seconds=lease_seconds)
        self._lock = threading.Lock()
        self._used: OrderedDict[ObjectKey, int] = OrderedDict()

    @property
    def pinned_bytes(self) -> int:
        """Payload bytes that are pinned now."""
        return self._pins.used_bytes

    def pin(self, keys: Sequence[ObjectKey], *, object_bytes: int) -> int:
        """Pin stored objects as far as there is room; return how many are pinned now that were not.

        Args:
            keys: of one pool.
            object_bytes: payload bytes of each.
        """
        size = as_integer(object_bytes, "object_bytes", at_least=1)
        return self._pins.add(keys, size)

    def unpin(self, keys: Sequence[ObjectKey]) -> int:
        """Let objects be evicted again; return how many were pinned."""
        dropped = self._pins.drop(keys)
        if dropped:
            self._pins.renew()
        return dropped

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store."""
        answers = self._inner_write(batches, memory, may_publish)
        for batch, answer in zip(batches, answers, strict=True):
            stored = [key for key, s in zip(batch.keys, answer, strict=True) if s.is_stored]
            self._pin_wanted(self._named(stored), batch.plan.object_bytes)
        return answers

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store; counts as a use of every object that is asked for."""
        session = self._inner.open_read(request)
        wanted = [*self._named(request.keys), *self._used_often(request.keys)]
        self._pin_wanted(wanted, request.object_bytes)
        return session

    def _named(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        return [key for key in keys if key[:NAMESPACE_BYTES] in self._namespaces]

    def _used_often(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Count a use of each object, and return those that have enough."""
        if self._uses is None:
            return []
        often = []
        with self._lock:
            for key in keys:
                uses = self._used.pop(key, 0) + 1
                self._used[key] = uses
                if uses >= self._uses:
                    often.append(key)
            while len(self._used) > _MAX_COUNTED:
                self._used.popitem(last=False)
        return often

    def _pin_wanted(self, keys: Sequence[ObjectKey], size: int) -> None:
        if keys:
            self._pins.add(keys, size)

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; pinned objects too."""
        removed = self._inner.delete(keys)
        self._pins.drop(keys)
        return removed

    def clear(self, namespace: bytes) -> int:
        """See Store; pinned objects too."""
        count = self._inner.clear(namespace)
        self._pins.drop_namespace(namespace)
        return count

    def stats(self) -> StoreStats:
        """See Store; counts objects that were `pinned` and `unpinned`, `pin_refused`, `pin_failed` and `pin_lost`."""
        return counting(self._inner.stats(), self._counts.snapshot())

    def close(self) -> None:
        """See Store; nothing is pinned any more."""
        self._pins.close()
        self._inner.close()


def _check_leases(store: Store) -> None:
    if not store.capabilities.leases:
        msg = (
            f"{type(store).__name__} has no leases, so that nothing can be pinned in it; pin in a store that has, "
            f"such as memory or file, in front of it"
        )
        raise ContractError(msg)


def _check_room(store: Store, max_bytes: int) -> None:
    capacity = store.stats().capacity_bytes
    if capacity is not None and max_bytes > capacity * _SHARE:
        msg = (
            f"{max_bytes} B of pinned objects leave too little of the {capacity} B that {type(store).__name__} has; "
            f"pin at most {int(capacity * _SHARE)} B, three quarters of it"
        )
        raise ContractError(msg)
