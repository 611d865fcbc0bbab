"""Page contents that follow from what a page is, so that any restored byte can be checked."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvlinker.keys import encode_fields
from kvlinker.transfers import PageKey

__all__ = ["PagePattern", "page_keys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePattern:
    """Bytes of every page, told by its key, its pool and its span; no two places look alike."""

    seed: bytes = b""
    """Another seed, other bytes."""

    def content(self, *, pool: str, label: str, page_key: PageKey, size: int) -> bytes:
        """Return the bytes of one page in one span.

        Args:
            pool: physical pool.
            label: the span's label.
            page_key: the engine's key of the page.
            size: bytes of the page in that span.
        """
        place = encode_fields((self.seed, pool, label, page_key))
        return hashlib.shake_128(place).digest(size)


def page_keys(count: int, *, chain: str = "prompt") -> tuple[bytes, ...]:
    """Return chained page keys of a made-up prompt: equal chains share keys, and prefixes of keys."""
    keys: list[bytes] = []
    parent = chain.encode()
    for _ in range(count):
        parent = hashlib.blake2b(parent, digest_size=16).digest()
        keys.append(parent)
    return tuple(keys)
