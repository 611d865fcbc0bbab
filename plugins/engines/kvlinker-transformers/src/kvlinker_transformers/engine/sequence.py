"""A sequence: one request's place in the pools, shared by its cache layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvlinker.errors import ContractError
from kvlinker_transformers.engine.tables import PageTable
from kvlinker_transformers.pools import KV, MAMBA, SWA, PagedPools

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
        self.tables = {
            pool.name: PageTable(pool.page_size, pools.device) for pool in pools.logical_pools
        }
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
        return self._table(SWA)

    @property
    def state_slot(self) -> int:
        """Where the state is, or will be, of the page that the sequence ends with.

        Raises:
            ContractError: the pools have no states.
        """
        return self._table(MAMBA).pages[-1]

    def _table(self, space: str) -> PageTable:
        if space not in self.tables:
            msg = f"these pools have no index space {space!r}, only {sorted(self.tables)}"
            raise ContractError(msg)
        return self.tables[space]
