"""A sequence: one request's place in the pools, shared by its cache layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvlinker.errors import ContractError
from kvlinker_transformers.engine.tables import PageTable
from kvlinker_transformers.pools import KV, SWA, PagedPools

__all__ = ["LayerGate", "PagedSequence"]

LayerGate: TypeAlias = Callable[[int], None]
"""Called with a layer before its restored rows are read; returns when they are there, or never will be."""


def _open_gate(_layer: int) -> None:
    """Let a layer pass: nothing is being restored."""


class PagedSequence:
    """Page tables of every index space, and the gate in front of each layer."""

    def __init__(self, pools: PagedPools) -> None:
        """Start without pages in the given pools."""
        self.page_size = pools.page_size
        self.tables = {space: PageTable(pools.page_size, pools.device) for space in pools.pages}
        self.gate: LayerGate = _open_gate

    @property
    def kv(self) -> PageTable:
        """Pages of the whole prefix."""
        return self.tables[KV]

    @property
    def swa(self) -> PageTable:
        """Pages of the sliding window.

        Raises:
            ContractError: the pools have no window.
        """
        if SWA not in self.tables:
            msg = f"these pools have no index space {SWA!r}, only {sorted(self.tables)}"
            raise ContractError(msg)
        return self.tables[SWA]
