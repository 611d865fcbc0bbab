"""Compiled copies and checksums for kvlinker: many ranges in one call, on several cores, without Python's lock."""

from __future__ import annotations

from kvlinker_native.mover import NativeMover, NativeMoverError, open_mover

__all__ = ["NativeMover", "NativeMoverError", "open_mover"]
