"""Tiers of two stores in memory that can go wrong, for tests of what is where."""

from __future__ import annotations

from kvlinker.stores.tiered import TieredStore
from kvlinker.testing import Call, FaultStore, MemoryStore, Raise, Rule
from kvlinker.testing.shelves import Shelf

__all__ = ["Tiers"]


class Tiers:
    """Two stores in memory that can go wrong, the tiers of them, and pages beside them."""

    def __init__(
        self,
        *,
        near_bytes: int | None = None,
        far_bytes: int | None = None,
        promotion_bytes: int = 1 << 20,
    ) -> None:
        self.near_memory = MemoryStore(capacity_bytes=near_bytes)
        self.far_memory = MemoryStore(capacity_bytes=far_bytes)
        self.near, self.far = FaultStore(self.near_memory), FaultStore(self.far_memory)
        self.store = TieredStore(
            self.near, self.far, names=("ram", "disk"), promotion_bytes=promotion_bytes
        )
        self.shelf = Shelf(self.store)

    def fail(self, store: FaultStore, call: Call, error: Exception) -> None:
        store.script.add(Rule(call=call, fault=Raise(error=error)))

    def forget_near(self) -> None:
        """Empty the near store, as a restart does."""
        self.near_memory.delete(self.near_memory.keys())

    def promote(self) -> None:
        assert self.store.wait_for_promotions(60)

    def count(self, event: str) -> int:
        return self.store.stats().counters.get(event, 0)
