"""Objects of a load: their kinds, their keys, and bytes that follow from both, so that every process can check them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from file_shelf import Shelf

__all__ = ["KINDS", "PAGES", "Damage", "Family", "LoadPages", "load_key", "namespace_of"]

KINDS = ((1, 512), (4, 1000), (3, 4096), (8, 2500), (2, 30_000))
"""Layers, and bytes of a layer, of each kind of object; a layer is a range with a checksum of its own."""
PAGES = 6
"""Objects of one call at most."""
_STEP = 0x9E37_79B9_7F4A_7C15
"""Odd, so that no two words of a layer are alike."""
_POISON = 0xFF


class Family(Enum):
    """What may become of an object."""

    STABLE = "stable"
    """Everybody writes and reads it, nobody deletes it: who holds it finds it."""
    VOLATILE = "volatile"
    """Everybody writes it, deletes it, and writes it as another kind of object."""
    OWN = "own"
    """One process alone knows it: what it deleted, or was not allowed to publish, must never be seen."""


def namespace_of(family: Family, kind: int, owner: str = "") -> bytes:
    """Return the 12 bytes that keys of a family begin with."""
    return hashlib.blake2b(f"{family.value} {kind} {owner}".encode(), digest_size=12).digest()


def load_key(family: Family, kind: int, number: int, owner: str = "") -> bytes:
    """Return the key of an object; those of one number end alike, as those of one page in several pools may."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=20).digest()
    return namespace_of(family, kind, owner) + digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A layer of a page that does not hold what it should."""

    layer: int
    offset: int
    """Of the first wrong byte in the layer."""
    wrong_bytes: int


class LoadPages(Shelf):
    """Pool pages of one kind of object."""

    def __init__(self, kind: int, *, pages: int = PAGES) -> None:
        """Make a pool of some pages."""
        layers, row_bytes = KINDS[kind]
        super().__init__(
            layers=layers, row_bytes=row_bytes, pages=pages, fingerprint=f"kind {kind}".encode()
        )
        self.kind = kind

    def content(self, key: bytes, layer: int) -> bytes:
        """Return what a layer of a key's page holds: each word tells its place."""
        place = key + bytes([self.kind, layer])
        seed = int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little")
        size = self.spans[layer].row_bytes
        words = np.arange(-(-size // 8), dtype=np.uint64) * np.uint64(_STEP) + np.uint64(seed)
        return words.tobytes()[:size]

    def spoil(self, page: int, choose: random.Random) -> None:
        """Change one byte of a page, as a store that lies would."""
        layer = choose.randrange(len(self.spans))
        row = bytearray(self.memory.read(self.spans[layer], page))
        row[choose.randrange(len(row))] ^= 1 << choose.randrange(8)
        self.memory.write(self.spans[layer], page, bytes(row))

    def damage(self, page: int, key: bytes, layers: Sequence[int]) -> Damage | None:
        """Return the first place of some layers of a page that is not what the key stands for."""
        for layer in layers:
            found = np.frombuffer(self.memory.read(self.spans[layer], page), dtype=np.uint8)
            right = np.frombuffer(self.content(key, layer), dtype=np.uint8)
            wrong = np.flatnonzero(found != right)
            if len(wrong):
                return Damage(layer=layer, offset=int(wrong[0]), wrong_bytes=len(wrong))
        return None

    def is_untouched(self, page: int) -> bool:
        """Return whether a page holds what `poison` wrote."""
        rows = (self.memory.read(span, page) for span in self.spans)
        return all(not row.strip(bytes([_POISON])) for row in rows)
