"""A wrapped store does what the store in it does, but for what a subclass changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvlinker.device import DeviceAccess
from kvlinker.errors import ContractError
from kvlinker.guard import checked_flags, checked_write
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

__all__ = ["WrappedStore", "check_takes_other_bytes", "counting"]


def counting(stats: StoreStats, counts: Mapping[str, int]) -> StoreStats:
    """Return a store's figures with counts of a wrapper's own; of one policy in another one of its kind, the sums."""
    counters = dict(stats.counters)
    for event, count in counts.items():
        counters[event] = counters.get(event, 0) + count
    return replace(stats, counters=counters)


def check_takes_other_bytes(store: Store, *, done: str, do: str) -> None:
    """Refuse a store that cannot be given other bytes than the pools hold.

    Args:
        store: that is to be wrapped.
        done: what the objects are, such as "encrypted".
        do: the same as what to do, such as "encrypt".

    Raises:
        ContractError: it needs the pools' own memory, or bounds the ranges of a call.
    """
    able = store.capabilities
    if able.device_memory or able.registers_memory or able.max_ranges_per_call is not None:
        msg = (
            f"{type(store).__name__} moves pool memory itself, or bounds the ranges of a call, and so cannot be "
            f"given {done} objects; {do} another store"
        )
        raise ContractError(msg)


class WrappedStore(Store):
    """A store around another one, which it owns and closes."""

    def __init__(self, store: Store) -> None:
        """Take over an open store."""
        self._inner = store

    # ---- for those that work with the answers: of another count they would become wrong ones (T4) -------

    @property
    def _inner_name(self) -> str:
        return type(self._inner).__name__

    def _inner_exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Return a hint for each key.

        Raises:
            StoreContractError: the store answers with something else.
        """
        return checked_flags(self._inner_name, "exists", self._inner.exists(keys), len(keys))

    def _inner_write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """Return a status for each object.

        Raises:
            StoreContractError: the store answers with something else.
        """
        answer = self._inner.write(batches, memory, may_publish=may_publish)
        return checked_write(self._inner_name, answer, batches)

    def _inner_delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Return for each key whether an object was removed.

        Raises:
            StoreContractError: the store answers with something else.
        """
        return checked_flags(self._inner_name, "delete", self._inner.delete(keys), len(keys))

    # ---- the store ----------------------------------------------------------------------------

    @property
    def capabilities(self) -> StoreCapabilities:
        """See Store."""
        return self._inner.capabilities

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        return self._inner.exists(keys)

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store."""
        return self._inner.write(batches, memory, may_publish=may_publish)

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        return self._inner.open_read(request)

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        """See Store."""
        return self._inner.hold(keys, seconds=seconds)

    def prefetch(self, request: ReadRequest, *, range_bytes: Sequence[int] = ()) -> int:
        """See Store."""
        return self._inner.prefetch(request, range_bytes=range_bytes)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See Store."""
        self._inner.register(regions)

    def unregister(self) -> None:
        """See Store."""
        self._inner.unregister()

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        return self._inner.delete(keys)

    def clear(self, namespace: bytes) -> int:
        """See Store."""
        return self._inner.clear(namespace)

    def stats(self) -> StoreStats:
        """See Store."""
        return self._inner.stats()

    def namespace_bytes(self, namespace: bytes) -> int | None:
        """See Store."""
        return self._inner.namespace_bytes(namespace)

    def close(self) -> None:
        """See Store."""
        self._inner.close()
