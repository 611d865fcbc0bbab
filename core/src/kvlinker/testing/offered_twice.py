"""What an admitting store is offered a second time, as the kit for stores offers everything once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlinker.device import DeviceAccess
from kvlinker.store import WriteBatch, WriteStatus
from kvlinker.stores.wrapped import WrappedStore

__all__ = ["OfferedTwice"]


class OfferedTwice(WrappedStore):
    """A store that is asked again for what it did not admit."""

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store; the first offer is never published."""
        self._inner.write(batches, memory, may_publish=lambda: False)
        return self._inner.write(batches, memory, may_publish=may_publish)
