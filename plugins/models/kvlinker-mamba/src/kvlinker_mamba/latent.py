"""Latents of attention, with the index keys that select them where attention is sparse."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvlinker.description import IndexerKind
from kvlinker.errors import ContractError
from kvlinker.layouts import folded_keys, integer_fact, require_row_bytes, text_fact
from kvlinker.pools import KV
from kvlinker.spans import BufferSpan
from kvlinker_mamba.folded import INDEX_KPOOL
from kvlinker_mamba.layers import FAMILY, layers_in
from kvlinker_mamba.parts import Kept, Part, draft_roles, role_part

__all__ = ["LATENT_BYTES", "LATENT_VALUES", "Latent", "SparseLatent", "latent_bytes"]

LATENT_VALUES = 512 + 64
"""Values of a slot, latent and rope (config.json of DeepSeek V3: kv_lora_rank, qk_rope_head_dim)."""
LATENT_BYTES: Mapping[str, int] = MappingProxyType(
    {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3fn": 1}
)
"""Value formats to the bytes of a value."""
_PACKED = "fp8_packed_656"
_PACKED_BYTES = 512 + 4 * 4 + 64 * 2
"""512 e4m3 values, 4 fp32 scales, 64 rope values in bf16."""
_INDEX_BYTES: Mapping[str, int] = MappingProxyType({"fp8_e4m3fn_fp32_scale": 128 + 4})
"""Bytes of an index key: e4m3 values and one scale; a page has all keys, then all scales."""


def latent_bytes(kv_format: str, values: int) -> int:
    """Return the bytes of a slot of so many values.

    Raises:
        ContractError: the format holds another number of values.
    """
    if kv_format != _PACKED:
        return values * LATENT_BYTES[kv_format]
    if values != LATENT_VALUES:
        msg = f"family {FAMILY!r}: {_PACKED} holds {LATENT_VALUES} values, got latent_values {values}; use bf16"
        raise ContractError(msg)
    return _PACKED_BYTES


class Latent(Kept):
    """One latent for each slot and layer, with its drafts."""

    _ROLE = "latent"

    def facts(self) -> tuple[str, ...]:
        """See Kept."""
        return ("kv_format", "latent_values")

    def required_roles(self) -> tuple[str, ...]:
        """See Kept."""
        return (self._ROLE,) if layers_in(self._description, KV) else ()

    def known_roles(self) -> tuple[str, ...]:
        """See Kept."""
        return (self._ROLE, *draft_roles([self._ROLE]))

    def parts(self) -> tuple[Part, ...]:
        """See Kept."""
        kv_format = text_fact(self._description, "kv_format", known=(*LATENT_BYTES, _PACKED))
        values = LATENT_VALUES
        if "latent_values" in self._description.facts:
            values = integer_fact(self._description, "latent_values")
        part = role_part(
            self._description,
            (self._ROLE,),
            name=KV,
            pool=KV,
            layers=layers_in(self._description, KV),
            drafts=self.draft_layers(),
            rows_are_pages=False,
            value_format=kv_format,
            row_bytes=latent_bytes(kv_format, values),
        )
        return (part,)


class SparseLatent(Latent):
    """A latent for each slot and layer, and index keys of the layers that own an indexer, with their drafts."""

    _ROLE = "kv"
    _INDEX = "index_k"
    _DRAFT_INDEX = "draft_index_k"

    def facts(self) -> tuple[str, ...]:
        """See Kept."""
        return (*super().facts(), "index_format", INDEX_KPOOL)

    def required_roles(self) -> tuple[str, ...]:
        """See Kept."""
        roles = super().required_roles()
        return (*roles, self._INDEX) if roles else ()

    def known_roles(self) -> tuple[str, ...]:
        """See Kept."""
        return (*super().known_roles(), self._INDEX, self._DRAFT_INDEX)

    def parts(self) -> tuple[Part, ...]:
        """See Kept."""
        return (*super().parts(), self._indexer())

    def omitted(self) -> Mapping[str, str]:
        """See Kept."""
        left_out = {
            span.label: f"layer {layer} keeps no index keys that it selects by"
            for layer, span in self._indexes().items()
            if not self._owns(layer)
        }
        for draft, span in enumerate(self._description.buffers.get(self._DRAFT_INDEX, ())):
            if not span.rows:
                left_out[span.label] = f"draft layer {draft} keeps no index buffer"
        return left_out

    def _indexes(self) -> dict[int, BufferSpan]:
        """Return the index buffer of each layer of attention, with rows or without."""
        layers, spans = (
            layers_in(self._description, KV),
            self._description.buffers.get(self._INDEX, ()),
        )
        if len(layers) != len(spans):
            msg = (
                f"family {FAMILY!r}: {self._INDEX!r} has {len(spans)} buffers for {len(layers)} layers of attention; "
                f"describe one per layer, without rows where a layer keeps none"
            )
            raise ContractError(msg)
        return dict(zip(layers, spans, strict=True))

    def _owns(self, layer: int) -> bool:
        return self._description.layers[layer].indexer is IndexerKind.OWN

    def _indexer(self) -> Part:
        indexes = self._indexes()
        for layer, span in indexes.items():
            self._check_owner(layer, span)
        own = {la: span for la, span in indexes.items() if self._owns(la)}
        drafts = {
            layer: span
            for layer, span in enumerate(self._description.buffers.get(self._DRAFT_INDEX, ()))
            if span.rows
        }
        spans = (*own.values(), *drafts.values())
        index_format = text_fact(self._description, "index_format", known=_INDEX_BYTES)
        keys, value_format = folded_keys(self._description, INDEX_KPOOL, index_format, unstated=1)
        require_row_bytes(self._description, spans, keys * _INDEX_BYTES[index_format])
        return Part(
            name="indexer",
            pool=KV,
            roles=(*((self._INDEX,) if own else ()), *((self._DRAFT_INDEX,) if drafts else ())),
            layers=tuple(own),
            components=(spans,),
            drafts=tuple(drafts),
            rows_are_pages=True,
            value_format=value_format,
        )

    def _check_owner(self, layer: int, span: BufferSpan) -> None:
        indexer = self._description.layers[layer].indexer
        if (indexer is IndexerKind.OWN and not span.rows) or (
            indexer is IndexerKind.NONE and span.rows
        ):
            msg = (
                f"family {FAMILY!r}: span {span.label!r} of layer {layer} has {span.rows} rows, but the layer's "
                f"indexer is said to be {indexer.value!r}; say whether it owns its index or shares another's"
            )
            raise ContractError(msg)
