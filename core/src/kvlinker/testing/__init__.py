"""What tests of linkers, stores and plugins are made of: honest small stores and pools, and faults on demand."""

from __future__ import annotations

from kvlinker.testing.memory_store import MemoryStore

__all__ = ["MemoryStore"]
