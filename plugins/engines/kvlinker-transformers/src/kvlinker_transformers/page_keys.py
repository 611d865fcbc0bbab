"""Page keys: one digest for each whole page, chained over everything that precedes its end.

Two requests share a page's key exactly when they share every token up to its end, the salt and the adapter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import SupportsIndex

import numpy as np

from kvlinker.errors import ContractError
from kvlinker.keys import digest_fields

__all__ = ["PageKeyChain", "page_keys"]

_DIGEST_BYTES = 32
_TOKEN_DTYPE = np.dtype("<i8")
"""Token ids are hashed as 8-byte little-endian integers: the same bytes on every machine."""
_ROOT = "kvlinker-transformers: page chain 1"
_PAGE = "kvlinker-transformers: page 1"


class PageKeyChain:
    """The keys of a sequence that grows."""

    def __init__(
        self, page_size: int, *, salt: str | None = None, adapter: str | None = None
    ) -> None:
        """Start a chain without tokens; see `page_keys` for the arguments.

        Raises:
            ContractError: the page size is not positive.
        """
        if page_size < 1:
            msg = f"page_size must be at least 1, got {page_size}"
            raise ContractError(msg)
        self.page_size = page_size
        self._last = digest_fields(_ROOT, (salt, adapter), size=_DIGEST_BYTES)
        self._open: list[int] = []
        """Tokens behind the last whole page."""
        self._keys: list[str] = []

    @property
    def keys(self) -> tuple[str, ...]:
        """The key of each whole page."""
        return tuple(self._keys)

    def extend(self, token_ids: Iterable[SupportsIndex]) -> None:
        """Append tokens.

        Raises:
            ContractError: a token id is no integer of at least 0; nothing is appended.
        """
        self._open += [_token(token) for token in token_ids]
        whole = len(self._open) // self.page_size * self.page_size
        for first in range(0, whole, self.page_size):
            page = np.array(self._open[first : first + self.page_size], dtype=_TOKEN_DTYPE)
            self._last = digest_fields(_PAGE, (self._last, page.tobytes()), size=_DIGEST_BYTES)
            self._keys.append(self._last.hex())
        del self._open[:whole]


def page_keys(
    token_ids: Iterable[SupportsIndex],
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
    chain = PageKeyChain(page_size, salt=salt, adapter=adapter)
    chain.extend(token_ids)
    return chain.keys


def _token(token: SupportsIndex) -> int:
    try:
        value = -1 if isinstance(token, bool) else operator.index(token)
    except TypeError:
        value = -1
    if not 0 <= value < 2**63:
        msg = f"token ids are integers of at least 0, got {token!r}"
        raise ContractError(msg)
    return value
