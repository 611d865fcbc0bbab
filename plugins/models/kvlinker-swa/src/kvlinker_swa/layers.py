"""The two kinds of layers of a hybrid: those that attend to every token, and those that look through a window.

Each kind keeps K and V in buffers of its own, addressed from an index space of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvlinker.description import KVCacheDescription
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.layouts import integer_fact, text_fact
from kvlinker.pools import KV

__all__ = [
    "ATTENTION_CHUNK_SIZE",
    "FACTS",
    "FAMILY",
    "FULL",
    "KINDS",
    "ROWS_ARE_PAGES",
    "SCALED_FORMATS",
    "SCALES",
    "SWA",
    "VALUES",
    "VALUE_BYTES",
    "WINDOWS",
    "LayerKind",
    "check_kinds",
]

FAMILY = "swa"
SWA = "swa"
"""The logical pool of trailing windows."""
VALUES = ("k", "v")
SCALES = ("k_scale", "v_scale")
ATTENTION_CHUNK_SIZE = "attention_chunk_size"
"""Fact: tokens of a chunk that layers attend within; 0 where none do, and where it is not stated."""
FACTS = (
    "kv_layout",
    "kv_format",
    "kv_scaled",
    "swa_kv_layout",
    "swa_kv_format",
    "swa_kv_scaled",
    ATTENTION_CHUNK_SIZE,
)
"""What a description states; another fact may change what the bytes mean."""
ROWS_ARE_PAGES: Mapping[str, bool] = MappingProxyType(
    {
        # [slots, heads, head_dim]: a slot's bytes are together.
        "token_major": False,
        # [pages, heads, slots, head_dim]: a slot's bytes are scattered over its page.
        "head_major": True,
    }
)
VALUE_BYTES: Mapping[str, int] = MappingProxyType(
    {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3fn": 1, "fp8_e5m2": 1}
)
"""Formats whose sizes are known, for caches that no engine has described yet."""
SCALED_FORMATS = (
    # Two values a byte; 16 share an exponent (NVFP4 has e4m3 scales).
    "fp4_e2m1_block16_e8m0",
    # 32 values share an exponent; the exponents of a page of 128 slots are interleaved.
    "mxfp8_e4m3fn_block32_interleaved",
)
"""Formats of values that have scales in buffers; what scales are, and in which order, is in the name."""
_CHUNKED = frozenset({"chunked", "chunked_attention"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers of one kind, and how a description names what they keep."""

    kind: str
    """`LayerFacts.kind` of its layers."""
    pool: str
    """The logical pool whose slots address its buffers, and the name of its entry."""
    prefix: str
    """In front of its roles, and of facts that hold for it alone."""
    attention: str
    """What its layers do, in messages."""

    def roles(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the roles of its layers' buffers."""
        return tuple(f"{self.prefix}{name}" for name in names)

    def draft_roles(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the roles of the buffers of draft layers that use the same slots."""
        return tuple(f"draft_{role}" for role in self.roles(names))

    def layers(self, description: KVCacheDescription) -> tuple[int, ...]:
        """Return the transfer layers of the kind, in order."""
        return tuple(facts.layer for facts in description.layers if facts.kind == self.kind)

    def value_format(self, description: KVCacheDescription) -> str:
        """Return what its values are.

        Raises:
            ContractError: the fact is missing, or no text.
            UnsupportedKVCacheError: they are scaled, and it is unknown how.
        """
        known = SCALED_FORMATS if self.is_scaled(description) else None
        return text_fact(description, self._fact(description, "kv_format"), known=known)

    def rows_are_pages(self, description: KVCacheDescription) -> bool:
        """Return whether a row of its buffers is a page.

        Raises:
            ContractError: the fact is missing, or no text.
            UnsupportedKVCacheError: the layout is unknown.
        """
        name = self._fact(description, "kv_layout")
        return ROWS_ARE_PAGES[text_fact(description, name, known=ROWS_ARE_PAGES)]

    def is_scaled(self, description: KVCacheDescription) -> bool:
        """Return whether its values need scales that are kept in buffers.

        Raises:
            ContractError: the fact is missing, or no integer.
            UnsupportedKVCacheError: it is neither 0 nor 1.
        """
        name = self._fact(description, "kv_scaled")
        return integer_fact(description, name, known=(0, 1)) == 1

    def _fact(self, description: KVCacheDescription, name: str) -> str:
        """Return the name under which a fact is stated for this kind: its own one, or that of both kinds."""
        own = f"{self.prefix}{name}"
        return own if own in description.facts else name


FULL = LayerKind(kind="attention", pool=KV, prefix="", attention="full attention")
WINDOWS = LayerKind(kind="sliding", pool=SWA, prefix="swa_", attention="sliding-window attention")
KINDS = (FULL, WINDOWS)
"""In entry order."""


def check_kinds(description: KVCacheDescription) -> None:
    """Refuse layers that are neither of full attention nor of a window that slides.

    Raises:
        ContractError: the fact `attention_chunk_size` is no integer.
        UnsupportedKVCacheError: a layer is of another kind; the message names it.
    """
    known = [kind.kind for kind in KINDS]
    stated = ATTENTION_CHUNK_SIZE in description.facts
    chunk = integer_fact(description, ATTENTION_CHUNK_SIZE) if stated else 0
    chunked = [facts.layer for facts in description.layers if facts.kind in _CHUNKED]
    if chunk or chunked:
        msg = (
            f"family {FAMILY!r}: layers {chunked} attend within chunks ({ATTENTION_CHUNK_SIZE} {chunk}), which is no "
            f"window that slides: what a boundary needs depends on where it lies in its chunk; not laid out here"
        )
        raise UnsupportedKVCacheError(msg)
    for facts in description.layers:
        if facts.kind not in known:
            msg = (
                f"family {FAMILY!r}: layer {facts.layer} (global {facts.global_layer}) is of kind {facts.kind!r}; "
                f"only {known} are laid out here"
            )
            raise UnsupportedKVCacheError(msg)
