"""A small linker moves pages of a fake engine to and from a store under test, and checks those that came."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker
from kvlinker.linker_options import LinkerOptions
from kvlinker.store import Store
from kvlinker.testing.pools import FakePools, Family, fake_group
from kvlinker.testing.verdicts import fail
from kvlinker.testing.waiting import wait_for
from kvlinker.transfers import PageKey, PoolTransfer

__all__ = ["SmallLinker", "load_pages", "offload_pages", "prefix_transfers"]

_PAGES = 16
_FIRST_LOADED = 8
_DEADLINE_S = 60.0
_LOOKUP_SECONDS = 20.0
"""More than a busy machine takes: what a test looks for is found, or the test fails."""


def prefix_transfers(
    pools: FakePools, keys: Sequence[PageKey], pages: Sequence[int]
) -> tuple[PoolTransfer, ...]:
    """Return the transfers of a prefix to or from some pages, of which a pool with a window has as many as that.

    Args:
        pools: of the engine.
        keys: of the prefix's pages.
        pages: of each logical pool, one a key.
    """
    windows = pools.windows
    chosen = {
        name: pages[: min(len(keys), windows.get(name, len(keys)))] for name in pools.logical_pools
    }
    return pools.page_transfers(keys, chosen)


def offload_pages(linker: Linker, pools: FakePools, keys: Sequence[PageKey]) -> bool:
    """Store the first pages of the pools, and return what the completion says; False where it is not accepted.

    Raises:
        AssertionError: it does not complete.
    """
    transfers = prefix_transfers(pools, keys, range(len(keys)))
    pools.fill(transfers)
    if not linker.offload(transfers):
        return False
    wait_for(linker.num_completed_offloads, f"an offload of {len(keys)} pages")
    return linker.pop_completed_offload()


def load_pages(linker: Linker, pools: FakePools, keys: Sequence[PageKey], *, rid: str) -> bool:
    """Load pages that were looked up, the last one to page 8, and return whether they came.

    Raises:
        AssertionError: they came, and one of them is wrong.
    """
    pages = range(_FIRST_LOADED, _FIRST_LOADED + len(keys))[::-1]  # not as they were stored
    transfers = prefix_transfers(pools, keys, pages)
    pools.memory.poison()
    if not linker.load(rid, transfers):
        return False
    has_landed = linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    if has_landed and (wrong := pools.wrong_pages(transfers)):
        fail(f"a load that landed left wrong pages: {wrong}")
    return has_landed


class SmallLinker:
    """A linker over a store, and the pools of a model with room for eight pages to write and eight to read."""

    def __init__(
        self, store: Store, *, family: Family = Family.DSA, breaker_seconds: float = 0.05
    ) -> None:
        """Make the pools of a family, and the linker, which asks a store that is down again after `breaker_seconds`."""
        self._requests = 0
        self.pools: FakePools = fake_group(family, pages=_PAGES)
        self.linker = Linker(
            self.pools.group,
            store,
            KeyNamespace(model_id="model", producer="tests"),
            device=self.pools.access(),
            options=LinkerOptions(
                lookup_seconds=_LOOKUP_SECONDS,
                hold_seconds=_DEADLINE_S,
                breaker_seconds=breaker_seconds,
            ),
        )

    def offload(self, keys: Sequence[PageKey]) -> bool:
        """Store pages, and return what the completion says."""
        return offload_pages(self.linker, self.pools, keys)

    def lookup(self, keys: Sequence[PageKey]) -> list[int]:
        """Return the boundaries that can be restored, for a new request."""
        self._requests += 1
        return self.linker.lookup(self._rid, self.pools.lookup_transfers(keys))

    @property
    def _rid(self) -> str:
        return f"request {self._requests}"

    def load(self, keys: Sequence[PageKey]) -> bool:
        """Load pages that were looked up last, and return whether they came.

        Raises:
            AssertionError: they came, and one of them is wrong.
        """
        return load_pages(self.linker, self.pools, keys, rid=self._rid)

    def close(self) -> None:
        """Close the linker; the store stays open. Idempotent."""
        self.linker.close()

    def __enter__(self) -> Self:
        """Return the linker."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the linker."""
        self.close()
