"""A read-only store serves what is in another store, and adds and removes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlinker.device import DeviceAccess
from kvlinker.errors import UnsupportedOperationError
from kvlinker.store import ObjectKey, WriteBatch, WriteStatus
from kvlinker.stores.wrapped import WrappedStore

__all__ = ["ReadOnlyStore"]


class ReadOnlyStore(WrappedStore):
    """A store that answers writes as one does that is full; what is damaged, the store in it drops as ever."""

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,  # noqa: ARG002  # nothing is copied
        *,
        may_publish: Callable[[], bool],  # noqa: ARG002  # nothing is published
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """Return EXISTS for what is there and FULL for the rest, without copying anything."""
        found = iter(self._inner_exists([key for batch in batches for key in batch.keys]))
        return tuple(
            tuple(WriteStatus.EXISTS if next(found) else WriteStatus.FULL for _ in batch.keys)
            for batch in batches
        )

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Return False for each key: none was removed.

        No error: a linker deletes what it could not read, and would take a store that raises for one that is down.
        """
        return (False,) * len(keys)

    def clear(self, namespace: bytes) -> int:
        """Refuse.

        Raises:
            UnsupportedOperationError: always.
        """
        msg = f"namespace {namespace.hex()} is not cleared: the store is read-only; open it without that"
        raise UnsupportedOperationError(msg)
