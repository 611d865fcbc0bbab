"""Index keys that several neighbouring tokens share, beside K and V (compressed sparse attention).

A page has whole groups of tokens, so that no group is open at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvlinker.errors import ContractError
from kvlinker.layouts import integer_fact, text_fact
from kvlinker.pools import KV
from kvlinker_mamba.layers import FAMILY, layers_in
from kvlinker_mamba.parts import Kept, Part, draft_roles, role_part

__all__ = ["FoldedIndex"]

_INDEX_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp8_e4m3fn": 1})
"""Formats of index keys to the bytes of a value; fp8 ones have no scales."""
_FORMAT, _VALUES, _RATIO = "index_format", "index_values", "index_ratio"


class FoldedIndex(Kept):
    """A page's index keys, one after the other, for each layer of attention and each draft."""

    _ROLE = "index_k"

    def facts(self) -> tuple[str, ...]:
        """See Kept."""
        return _FORMAT, _VALUES, _RATIO

    def required_roles(self) -> tuple[str, ...]:
        """See Kept."""
        return (self._ROLE,) if layers_in(self._description, KV) else ()

    def known_roles(self) -> tuple[str, ...]:
        """See Kept."""
        return (self._ROLE, *draft_roles([self._ROLE]))

    def draft_layers(self) -> int:
        """Return 0: drafts are those that keep K and V, each with its index keys."""
        return 0

    def parts(self) -> tuple[Part, ...]:
        """See Kept."""
        index_format = text_fact(self._description, _FORMAT, known=_INDEX_BYTES)
        values, ratio = (integer_fact(self._description, name) for name in (_VALUES, _RATIO))
        size = self._description.page_size
        if values < 1 or ratio < 1 or size % ratio:
            msg = (
                f"family {FAMILY!r}: {_VALUES} {values} and {_RATIO} {ratio} do not fit a page of {size} slots; a page "
                f"must have whole groups, or its last one is open at its end"
            )
            raise ContractError(msg)
        part = role_part(
            self._description,
            (self._ROLE,),
            name="indexer",
            pool=KV,
            layers=layers_in(self._description, KV),
            drafts=len(self._description.buffers.get("draft_k", ())),
            rows_are_pages=True,
            value_format=f"{index_format}, a key for {ratio} tokens",
            row_bytes=size // ratio * values * _INDEX_BYTES[index_format],
        )
        return (part,)
