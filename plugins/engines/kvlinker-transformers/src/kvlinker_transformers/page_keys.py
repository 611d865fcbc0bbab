"""Page keys: one digest for each whole page, chained over everything that precedes its end.

Two requests share a page's key exactly when they share every token up to its end, the salt and the adapter.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np

from kvlinker.errors import ContractError
from kvlinker.keys import digest_fields

__all__ = ["page_keys"]

_DIGEST_BYTES = 32
_TOKEN_DTYPE = np.dtype("<i8")
"""Token ids are hashed as 8-byte little-endian integers: the same bytes on every machine."""
_ROOT = "kvlinker-transformers: page chain 1"
_PAGE = "kvlinker-transformers: page 1"


def page_keys(
    token_ids: Sequence[SupportsIndex],
    page_size: int,
    *,
    salt: str | None = None,
    adapter: str | None = None,
) -> tuple[str, ...]:
    """Return the key of each whole page, hexadecimal; the unfinished page has none.

    Args:
        token_ids: the request's tokens from its first one on.
        page_size: tokens in a page.
        salt: keeps requests apart that must not share pages, such as two tenants'; None differs from an empty one.
        adapter: name and version of what changes the weights for this request, such as a LoRA.

    Raises:
        ContractError: the page size is not positive, or a token id is no integer of at least 0.
    """
    if page_size < 1:
        msg = f"page_size must be at least 1, got {page_size}"
        raise ContractError(msg)
    key = _root(salt, adapter)
    keys = []
    for first in range(0, len(token_ids) - page_size + 1, page_size):
        key = _next(key, token_ids[first : first + page_size])
        keys.append(key.hex())
    return tuple(keys)


def _root(salt: str | None, adapter: str | None) -> bytes:
    return digest_fields(_ROOT, (salt, adapter), size=_DIGEST_BYTES)


def _next(parent: bytes, tokens: Sequence[SupportsIndex]) -> bytes:
    ids = np.array([_token(token) for token in tokens], dtype=_TOKEN_DTYPE)
    return digest_fields(_PAGE, (parent, ids.tobytes()), size=_DIGEST_BYTES)


def _token(token: SupportsIndex) -> int:
    try:
        value = -1 if isinstance(token, bool) else operator.index(token)
    except TypeError:
        value = -1
    if not 0 <= value < 2**63:
        msg = f"token ids are integers of at least 0, got {token!r}"
        raise ContractError(msg)
    return value
