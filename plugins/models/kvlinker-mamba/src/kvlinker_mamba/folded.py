"""Index keys that several neighbouring tokens share, beside K and V (compressed sparse attention).

A page has whole groups of tokens, so that no group is open at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvlinker.errors import ContractError
from kvlinker.layouts import folded_keys, integer_fact, text_fact
from kvlinker.pools import KV
from kvlinker_mamba.layers import FAMILY, layers_in
from kvlinker_mamba.parts import Kept, Part, draft_roles, role_part

__all__ = ["INDEX_KPOOL", "FoldedIndex"]

INDEX_KPOOL = "index_kpool"
"""Fact: neighbouring tokens that share an index key."""
_INDEX_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp8_e4m3fn": 1})
"""Formats of index keys to the bytes of a value; fp8 ones have no scales."""
_FORMAT, _VALUES = "index_format", "index_values"


class FoldedIndex(Kept):
    """A page's index keys, one after the other, for each layer of attention and each draft."""

    _ROLE = "index_k"

    def facts(self) -> tuple[str, ...]:
        """See Kept."""
        return _FORMAT, _VALUES, INDEX_KPOOL

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
        values = integer_fact(self._description, _VALUES)
        keys, value_format = folded_keys(self._description, INDEX_KPOOL, index_format)
        if values < 1:
            msg = f"family {FAMILY!r}: fact {_VALUES!r} is {values}; state how many values an index key has"
            raise ContractError(msg)
        part = role_part(
            self._description,
            (self._ROLE,),
            name="indexer",
            pool=KV,
            layers=layers_in(self._description, KV),
            drafts=len(self._description.buffers.get("draft_k", ())),
            rows_are_pages=True,
            value_format=value_format,
            row_bytes=keys * values * _INDEX_BYTES[index_format],
        )
        return (part,)
