"""Paged pools: what the engine reports about its KV memory, family by family.

This module needs no torch, so that describing can be asked of it in any process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from kvlinker.description import Fact, LayerFacts, LogicalPool

if TYPE_CHECKING:
    import torch

__all__ = ["KV", "MAMBA", "SWA", "PagedPools"]

KV = "kv"
"""Index space of everything that every page of a prefix needs."""
SWA = "swa"
"""Index space of the sliding window and of the states that go with it."""
MAMBA = "mamba"
"""Index space of states that stand for a whole prefix: a page is one slot."""


class PagedPools(ABC):
    """All KV memory of one model: one buffer for each layer and role, in pages."""

    family: ClassVar[str]
    """Family name that model plugins know."""
    is_replicated: ClassVar[bool]
    """Whether ranks of a tensor-parallel group would all hold the same bytes: one KV head for every rank."""

    def __init__(self, *, page_size: int, pages: Mapping[str, int], device: torch.device) -> None:
        self.page_size = page_size
        self.pages = dict(pages)
        """Index space to its number of pages, the reserved one included."""
        self.device = device

    @property
    @abstractmethod
    def layers(self) -> tuple[LayerFacts, ...]:
        """What each layer is, in order."""

    @property
    @abstractmethod
    def logical_pools(self) -> tuple[LogicalPool, ...]:
        """The index spaces that the engine allocates pages from."""

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, Fact]:
        """Value formats and layout facts that bytes alone do not tell."""

    def replicated_roles(self) -> frozenset[str]:
        """Return the roles of which ranks of a tensor-parallel group would all hold the same bytes."""
        return frozenset(self.tensors()) if self.is_replicated else frozenset()

    @abstractmethod
    def tensors(self) -> Mapping[str, tuple[torch.Tensor, ...]]:
        """Return everything persistent: role to one tensor for each layer, dimension 0 being the row."""
