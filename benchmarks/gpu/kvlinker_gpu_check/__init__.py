"""Tests and measures the access to pools on a device: exact, overlapped, and never ahead of the engine's kernels."""

from __future__ import annotations

__all__: list[str] = []
