"""An admitting store takes an object when it is offered the second time: much is computed once and never asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlinker.device import DeviceAccess
from kvlinker.event_counts import EventCounts
from kvlinker.integers import as_integer
from kvlinker.store import ObjectKey, Store, StoreStats, WriteBatch, WriteStatus
from kvlinker.stores.chosen_writes import write_chosen
from kvlinker.stores.recent_keys import RecentKeys
from kvlinker.stores.wrapped import WrappedStore, counting

__all__ = ["REMEMBERED", "AdmittingStore"]

_EVENTS = ("not_admitted",)
REMEMBERED = 1_000_000
"""Offers that are remembered; they take 2 to 4 MB."""
_MAX_REMEMBERED = 1 << 32


class AdmittingStore(WrappedStore):
    """A store that keeps out what this process has not offered it before, lately."""

    def __init__(self, store: Store, *, remember: int = REMEMBERED) -> None:
        """Take over an open store.

        Args:
            store: which is written to from the second offer on.
            remember: offers. At least the last half of so many are known again, and at most all of them. A few
                in a thousand others are taken for known, and so are written when they are offered first.

        Raises:
            ContractError: the number is out of bounds.
        """
        super().__init__(store)
        what = "remember"
        self._offers = RecentKeys(as_integer(remember, what, at_least=2, at_most=_MAX_REMEMBERED))
        self._counts = EventCounts(_EVENTS)

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store; NOT_ADMITTED, without a byte being copied, where nobody offered the object before."""
        keys = [key for batch in batches for key in batch.keys]
        return write_chosen(
            lambda chosen: self._inner_write(chosen, memory, may_publish),
            batches,
            self._admitted(keys),
            otherwise=WriteStatus.NOT_ADMITTED,
        )

    def _admitted(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """Return which objects the store is to take, and remember the others."""
        known = dict(zip(keys, self._offers.contain(keys), strict=True))
        new = [key for key, is_known in known.items() if not is_known]
        if new:  # what is stored is not kept out: the answer is that it is there
            known |= zip(new, self._inner_exists(new), strict=True)
        refused = [key for key, is_known in known.items() if not is_known]
        self._offers.note(refused)
        admitted = [known[key] for key in keys]
        self._counts.add("not_admitted", admitted.count(False))
        return admitted

    def stats(self) -> StoreStats:
        """See Store; `not_admitted` counts objects that were kept out."""
        return counting(self._inner.stats(), self._counts.snapshot())
