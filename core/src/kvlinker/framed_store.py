"""A framed store keeps framed values behind a network: loads go one way, offloads another.

What the contract says of writes, reads and closing is the same for all of them; looking and removing is each one's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from kvlinker.device import DeviceAccess
from kvlinker.framed_looks import FramedState
from kvlinker.framed_reads import FramedReadSession
from kvlinker.framed_writes import FramedWrite
from kvlinker.named_values import NamedValues
from kvlinker.store import (
    ReadRequest,
    ReadSession,
    Store,
    StoreCapabilities,
    WriteBatch,
    WriteStatus,
)
from kvlinker.store_lanes import StoreLane

__all__ = ["FramedStore"]


class FramedStore(Store):
    """A store that others share and that outlives its processes, through a lane for loads and one for offloads."""

    def __init__(
        self,
        *,
        reads: StoreLane,
        writes: StoreLane,
        values: NamedValues,
        framed: FramedState,
        max_object_bytes: int,
    ) -> None:
        """Take over what the store goes through.

        Args:
            reads: the lane of lookups and loads.
            writes: the lane of offloads.
            values: where loads find objects.
            framed: what all calls share.
            max_object_bytes: payloads that are longer fail.
        """
        self._reads = reads
        self._writes = writes
        self._values = values
        self._framed = framed
        self._max_object_bytes = max_object_bytes

    @abstractmethod
    def begin_write(self, batches: Sequence[WriteBatch]) -> FramedWrite:
        """Return the write of some batches, which nothing was done of yet.

        Raises:
            StoreError: the server is known to be down.
        """

    @property
    def capabilities(self) -> StoreCapabilities:
        """See Store."""
        return StoreCapabilities(
            persistent=True,
            shared=True,
            ranged_reads=True,
            max_object_bytes=self._max_object_bytes,
        )

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store.

        Raises:
            StoreError: the server cannot be asked; nothing was published.
        """
        self._writes.check_open()
        return self.begin_write(batches).run(memory, may_publish)

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        check_open = self._reads.check_open
        check_open()
        return FramedReadSession(self._values, self._framed, request, check_open=check_open)

    def close(self) -> None:
        """See Store; objects stay. Idempotent."""
        self._reads.close()
        self._writes.close()
