"""The store: objects in the memory of a cluster, moved by Mooncake's client, without a copy or framed."""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Sequence

from kvlinker.device import DeviceAccess
from kvlinker.errors import UnsupportedOperationError
from kvlinker.spans import MemoryRegion
from kvlinker.store import (
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
from kvlinker_mooncake.client import Client
from kvlinker_mooncake.cluster import count_objects
from kvlinker_mooncake.framed_reading import StagedReadSession
from kvlinker_mooncake.options import MooncakeStoreOptions
from kvlinker_mooncake.probing import reads_by_layer
from kvlinker_mooncake.reading import DirectReadSession
from kvlinker_mooncake.state import StoreState
from kvlinker_mooncake.writing import MAX_OBJECT_BYTES, write_batches

__all__ = ["MooncakeStore"]


class MooncakeStore(Store):
    """Objects of a Mooncake cluster, which its master evicts when its memory is nearly full."""

    def __init__(self, options: MooncakeStoreOptions, *, client: Client | None = None) -> None:
        """Join the cluster, and measure how it is read where nobody says so.

        Args:
            options: where it is.
            client: one that has joined already; a new one by default.

        Raises:
            UnsupportedOperationError: the client lacks calls or settings that are needed.
            StoreTimeoutError: the master does not answer.
            StoreError: there is no client, or it was refused.
        """
        self._state = StoreState(options, Client(options) if client is None else client)
        self._staged = options.staged
        # The client must be gone before the process is: a call of a thread that goes on would abort it.
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        try:
            if options.reads == "auto" and not options.staged:
                self._state.ranged = reads_by_layer(self._state)
            else:
                self._state.ranged = options.reads == "ranged"
        except BaseException:
            self.close()
            raise

    @property
    def capabilities(self) -> StoreCapabilities:
        """See Store."""
        return StoreCapabilities(
            persistent=not self._state.options.segment_bytes,
            shared=True,
            ranged_reads=self._state.ranged,
            device_memory=not self._staged,
            registers_memory=not self._staged,
            revocable=self._staged,
            integrity=Integrity.CHECKSUM if self._staged else Integrity.LENGTH,
            max_object_bytes=MAX_OBJECT_BYTES,
        )

    # ---- looking ------------------------------------------------------------------------------

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; what exists is leased for the master's time, so that it is there when it is loaded soon.

        Raises:
            StoreError: the master cannot be asked.
        """
        return self._state.exist(self._state.names.of_objects(keys))

    def stats(self) -> StoreStats:
        """See Store; the cluster's memory is shared with others, and so no capacity of this store.

        Raises:
            StoreError: the metrics server cannot be asked.
        """
        options, counters = self._state.options, dict(self._state.counters)
        counters["hidden"] = self._state.removals.hidden
        if not options.metrics:
            counters["uncounted"] = 1
            return StoreStats(objects=0, used_bytes=0, capacity_bytes=None, counters=counters)
        seconds = options.answer_seconds
        cluster = self._state.metrics.ask(
            "stats",
            lambda: count_objects(options.metrics, self._state.names, seconds=seconds),
            seconds=seconds,
        )
        if not cluster.is_exact:
            counters["uncounted"] = 1
        return StoreStats(
            objects=max(0, cluster.objects - self._state.removals.hidden),
            used_bytes=cluster.used_bytes,
            capacity_bytes=None,
            counters=counters,
        )

    # ---- moving -------------------------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See Store.

        Raises:
            RegistrationError: the client refused a region; those before it were rolled back.
            UnsupportedOperationError: the store is staged.
        """
        if self._staged:
            msg = f"{self._state.client.calls} is staged and registers no pools"
            raise UnsupportedOperationError(msg)
        self._state.pools.register(regions)

    def unregister(self) -> None:
        """See Store."""
        self._state.pools.unregister()

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store.

        Raises:
            ContractError: the pools' memory is not registered.
            StoreError: the master cannot be asked; nothing was published.
        """
        self._state.client.calls.check_open()
        return write_batches(self._state, batches, memory, may_publish)

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        self._state.client.calls.check_open()
        kind = StagedReadSession if self._staged else DirectReadSession
        return kind(self._state, request)

    # ---- removing -----------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; what others may still be reading is hidden here until its lease is over, and then removed.

        Raises:
            StoreError: the master cannot be asked; some may have been removed.
        """
        return tuple(self._state.removals.remove(self._state.names.of_objects(keys)))

    def clear(self, namespace: bytes) -> int:
        """See Store; it takes as long as a lease.

        Raises:
            ContractError: that is no namespace.
            StoreError: the master cannot be asked; some objects may have been removed.
        """
        return self._state.removals.clear(self._state.names.pattern_of(namespace))

    def close(self) -> None:
        """See Store; objects stay."""
        atexit.unregister(self._at_exit)
        self._state.close()

    def close_at_exit(self) -> None:
        """Close, and wait for the client, in a process that is about to end."""
        self._state.close(at_exit=True)


def _close_at_exit(reference: weakref.ref[MooncakeStore]) -> None:
    store = reference()
    if store is not None:
        store.close_at_exit()
