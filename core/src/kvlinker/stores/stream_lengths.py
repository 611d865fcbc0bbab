"""Stream lengths are few, so that a reader can find out which one a compressed object has by asking for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.frames import MAX_RANGES
from kvlinker.stores.compression import RAW_EXTRA_BYTES

__all__ = ["MAX_STREAM_BYTES", "StreamLengths", "cells_of"]

_STEPS = 32
"""Lengths that streams of one object length can have; KV of one layout has one or two of them."""
_MIN_STEP_BYTES = 64
_CELL_BYTES = 16 << 10
"""What of a stream is read alone."""
MAX_STREAM_BYTES = MAX_RANGES * _CELL_BYTES
_MAX_KNOWN = 256
"""Object lengths whose streams' usual lengths are remembered."""


def cells_of(stream_bytes: int) -> tuple[IndexArray, IndexArray]:
    """Return offsets and sizes of a stream's cells."""
    offsets = np.arange(0, stream_bytes, _CELL_BYTES, dtype=np.int64)
    return offsets, np.minimum(_CELL_BYTES, stream_bytes - offsets)


class StreamLengths:
    """The lengths that streams of an object length can have, the one that was found last in front."""

    def __init__(self) -> None:
        """Know of no stream yet."""
        self._lock = threading.Lock()
        self._known: dict[int, list[int]] = {}

    def fitting(self, object_bytes: int, stream_bytes: int) -> int:
        """Return the shortest length that a stream of so many bytes can be filled up to."""
        step = _step(object_bytes)
        return min(-(-stream_bytes // step) * step, object_bytes + RAW_EXTRA_BYTES)

    def usual(self, object_bytes: int) -> int:
        """Return the length that was found last; at first, that of an object which is not compressed."""
        return self.candidates(object_bytes)[0]

    def candidates(self, object_bytes: int) -> Sequence[int]:
        """Return every length that a stream can have, in the order in which to ask."""
        with self._lock:
            known = self._known.get(object_bytes)
            if known is not None:
                return tuple(known)
        whole = object_bytes + RAW_EXTRA_BYTES
        step = _step(object_bytes)
        return (whole, *range((whole - 1) // step * step, 0, -step))

    def note(self, object_bytes: int, stream_bytes: int) -> None:
        """Note the length of a stream that was found or written."""
        lengths = [*self.candidates(object_bytes)]
        if lengths[0] == stream_bytes and object_bytes in self._known:
            return
        lengths.remove(stream_bytes)
        with self._lock:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[object_bytes] = [stream_bytes, *lengths]


def _step(object_bytes: int) -> int:
    return max(_MIN_STEP_BYTES, -(-object_bytes // _STEPS))
