"""The store over slots: the contract's methods, each a few lines over the state of the open store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlinker.device import DeviceAccess
from kvlinker.frames import header_bytes
from kvlinker.named_values import digits_of_key, digits_of_namespace
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
from kvlinker_nixl.depots import Depot
from kvlinker_nixl.registering import PoolRegistrations
from kvlinker_nixl.sessions import SlotReadSession
from kvlinker_nixl.state import SlotState
from kvlinker_nixl.writing import write_batches

__all__ = ["SlotStore"]


class SlotStore(Store):
    """Objects in slots of a file, or of the memory of another process, that NIXL moves."""

    def __init__(
        self, state: SlotState, registrations: PoolRegistrations, *, is_shared: bool
    ) -> None:
        """Take over what `opening` made.

        Args:
            state: of the store.
            registrations: of pool memory.
            is_shared: other processes see the objects.
        """
        self._state = state
        self._registrations = registrations
        self._capabilities = StoreCapabilities(
            persistent=True,
            shared=is_shared,
            ranged_reads=True,
            device_memory=not state.is_staged,
            registers_memory=not state.is_staged,
            revocable=state.is_staged,
            leases=True,
            integrity=Integrity.CHECKSUM if state.has_checksums else Integrity.LENGTH,
            max_object_bytes=state.depot.max_frame_bytes - header_bytes(1),
        )

    @property
    def state(self) -> SlotState:
        """What its calls share, for figures and tests."""
        return self._state

    @property
    def capabilities(self) -> StoreCapabilities:
        """See Store."""
        return self._capabilities

    # ---- looking ------------------------------------------------------------------------------

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store.

        Raises:
            StoreError: a server cannot be asked.
        """
        self._state.reads.check_open()
        return self._state.depot.exists(_checked(keys))

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        """See Store."""
        self._state.reads.check_open()
        number, present = self._state.depot.hold(_checked(keys), seconds)
        return _SlotHold(self._state.depot, number, present)

    def stats(self) -> StoreStats:
        """See Store."""
        found = self._state.depot.stats()
        return StoreStats(
            objects=found.objects,
            used_bytes=found.used_bytes,
            capacity_bytes=found.capacity_bytes,
            counters={**found.counters, **self._state.counters},
        )

    # ---- moving -------------------------------------------------------------------------------

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store.

        Raises:
            StoreError: bytes cannot be moved; nothing was published.
        """
        self._state.writes.check_open()
        for batch in batches:
            _checked(batch.keys)
        return write_batches(self._state, batches, memory, may_publish)

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        self._state.reads.check_open()
        _checked(request.keys)
        return SlotReadSession(self._state, request)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See Store."""
        self._state.reads.check_open()
        self._registrations.register(regions)

    def unregister(self) -> None:
        """See Store."""
        self._registrations.unregister()

    # ---- removing -----------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        self._state.reads.check_open()
        return self._state.depot.delete(_checked(keys))

    def clear(self, namespace: bytes) -> int:
        """See Store.

        Raises:
            ContractError: that is no namespace.
        """
        self._state.reads.check_open()
        digits_of_namespace(namespace)
        return self._state.depot.clear(namespace)

    def close(self) -> None:
        """See Store."""
        if self._state.close():
            self._registrations.unregister()


class _SlotHold(Hold):
    """Objects that a depot keeps."""

    def __init__(self, depot: Depot, number: int, present: tuple[bool, ...]) -> None:
        self._depot = depot
        self._number: int | None = number
        self._present = present

    @property
    def present(self) -> tuple[bool, ...]:
        """See Hold."""
        return self._present

    def release(self) -> None:
        """See Hold."""
        number, self._number = self._number, None
        if number is not None:
            self._depot.release(number)


def _checked(keys: Sequence[ObjectKey]) -> Sequence[ObjectKey]:
    for key in keys:
        digits_of_key(key)
    return keys
