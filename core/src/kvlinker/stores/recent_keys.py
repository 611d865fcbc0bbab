"""Recent keys are remembered in bounded memory: some may be taken for remembered that are not, never the other way.

They are two Bloom filters (Bloom, "Space/time trade-offs in hash coding with allowable errors", 1970), a young one
and an old one. When the young one has its share of keys it becomes the old one, and the old one is forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlinker.store import ObjectKey

__all__ = ["RecentKeys"]

_BITS_PER_KEY = 16
_HASHES = 4
"""With 16 to 32 bits for each key, at most 1 of 400 strange keys is taken for one of a full filter."""
_WORDS = 2


class RecentKeys:
    """Keys that were noted lately: at least the last half of so many, and at most all of them."""

    def __init__(self, count: int) -> None:
        """Make an empty memory of `count` keys, which takes 2 to 4 bytes for each."""
        self._share = -(-count // 2)
        bits = 1 << (self._share * _BITS_PER_KEY - 1).bit_length()
        self._mask = np.uint64(bits - 1)
        self._young = np.zeros(-(-bits // 8), dtype=np.uint8)
        self._old = np.zeros_like(self._young)
        self._noted = 0
        self._lock = threading.Lock()

    def contain(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Return which keys were noted lately, or are taken for such."""
        if not keys:
            return ()
        places = self._places(keys)
        with self._lock:
            found = _holds(self._young, places) | _holds(self._old, places)
        return tuple(found.tolist())

    def note(self, keys: Sequence[ObjectKey]) -> None:
        """Remember keys."""
        for first in range(0, len(keys), self._share):
            self._note(keys[first : first + self._share])

    def _note(self, keys: Sequence[ObjectKey]) -> None:
        places = self._places(keys)
        with self._lock:
            if self._noted + len(keys) > self._share:
                self._old, self._young = self._young, np.zeros_like(self._young)
                self._noted = 0
            self._noted += len(keys)
            bits = np.left_shift(1, places & np.uint64(7)).astype(np.uint8)
            np.bitwise_or.at(self._young, places >> np.uint64(3), bits)

    def _places(self, keys: Sequence[ObjectKey]) -> NDArray[np.uint64]:
        """[keys, hashes] bits of each key, from the digest at its end (Kirsch, Mitzenmacher, 2006)."""
        words = np.frombuffer(b"".join(key[-16:].rjust(16, b"\0") for key in keys), dtype="<u8")
        first, step = words.reshape(len(keys), _WORDS).T
        number = np.arange(_HASHES, dtype=np.uint64)
        return (first[:, None] + number * (step[:, None] | np.uint64(1))) & self._mask


def _holds(bits: NDArray[np.uint8], places: NDArray[np.uint64]) -> NDArray[np.bool_]:
    found = bits[places >> np.uint64(3)] >> (places & np.uint64(7)).astype(np.uint8)
    return np.asarray((found & 1).all(axis=1), dtype=np.bool_)
