"""K and V of attention heads, of full attention and of windows: one buffer each per layer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvlinker.description import KVCacheDescription
from kvlinker.errors import ContractError
from kvlinker.layouts import integer_fact, require_page_rows, text_fact
from kvlinker.pools import KV
from kvlinker_mamba.layers import FAMILY, layers_in
from kvlinker_mamba.parts import (
    Kept,
    Part,
    draft_roles,
    require_whole_pages,
    role_part,
    spans_of_roles,
)

__all__ = ["HEAD_BYTES", "ROWS_ARE_PAGES", "SCALED_FORMATS", "DraftHeads", "Heads"]

ROWS_ARE_PAGES: Mapping[str, bool] = MappingProxyType(
    {
        # [slots, heads, head_dim]: a slot's bytes are together.
        "token_major": False,
        # [pages, heads, slots, head_dim]: a slot's bytes are scattered over its page.
        "head_major": True,
    }
)
HEAD_BYTES: Mapping[str, int] = MappingProxyType(
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


class Heads(Kept):
    """K and V that are addressed from one logical pool, with their scales and drafts."""

    def __init__(self, description: KVCacheDescription, pool: str, prefix: str = "") -> None:
        """Read the form from a description.

        Args:
            description: the cache.
            pool: logical pool.
            prefix: what the roles and the own facts of these layers begin with.
        """
        super().__init__(description)
        self._pool = pool
        self._prefix = prefix
        self._values = (f"{prefix}k", f"{prefix}v")
        self._scales = (f"{prefix}k_scale", f"{prefix}v_scale")

    def facts(self) -> tuple[str, ...]:
        """See Kept."""
        names = ("kv_layout", "kv_format", "kv_scaled")
        return (*names, *(f"{self._prefix}{name}" for name in names if self._prefix))

    def required_roles(self) -> tuple[str, ...]:
        """See Kept."""
        if not layers_in(self._description, self._pool):
            return ()
        return (*self._values, *self._scales) if self._is_scaled() else self._values

    def known_roles(self) -> tuple[str, ...]:
        """See Kept."""
        roles = (*self._values, *self._scales)
        return (*roles, *draft_roles(roles))

    def parts(self) -> tuple[Part, ...]:
        """See Kept."""
        layers, drafts = layers_in(self._description, self._pool), self.draft_layers()
        layout = text_fact(self._description, self._fact("kv_layout"), known=ROWS_ARE_PAGES)
        known = SCALED_FORMATS if self._is_scaled() else None
        value_format = text_fact(self._description, self._fact("kv_format"), known=known)
        if ROWS_ARE_PAGES[layout]:
            spans = spans_of_roles(self._description, (*self._values, *draft_roles(self._values)))
            require_whole_pages(self._description, spans)
        values = role_part(
            self._description,
            self._values,
            name=self._pool,
            pool=self._pool,
            layers=layers,
            drafts=drafts,
            rows_are_pages=ROWS_ARE_PAGES[layout],
            value_format=value_format,
        )
        if not self._is_scaled():
            self._refuse_scales()
            return (values,)
        scales = role_part(
            self._description,
            self._scales,
            name=f"{self._pool}_scale",
            pool=self._pool,
            layers=layers,
            drafts=drafts,
            # A page of scales is one row, whatever the rows of the values are.
            rows_are_pages=True,
            value_format=f"{value_format}_scale",
        )
        for role in (*self._values, *draft_roles(self._values)):
            require_page_rows(
                self._description,
                f"{role}_scale",
                beside=role,
                rows_are_pages=ROWS_ARE_PAGES[layout],
            )
        return values, scales

    def _refuse_scales(self) -> None:
        roles = (*self._scales, *draft_roles(self._scales))
        if given := [role for role in roles if self._description.buffers.get(role)]:
            msg = (
                f"family {FAMILY!r}: the values are said to need no scales, but {given} are described; "
                f"state {self._fact('kv_scaled')} as 1"
            )
            raise ContractError(msg)

    def _is_scaled(self) -> bool:
        return integer_fact(self._description, self._fact("kv_scaled"), known=(0, 1)) == 1

    def _fact(self, name: str) -> str:
        """Return the name under which a fact is stated for these layers: their own one, or that of all."""
        own = f"{self._prefix}{name}"
        return own if own in self._description.facts else name


class DraftHeads(Kept):
    """K and V of a draft model's heads under slots of `kv`, beside a target that keeps latents."""

    _VALUES = ("draft_k", "draft_v")
    _FACTS = ("draft_kv_layout", "draft_kv_format")

    def facts(self) -> tuple[str, ...]:
        """See Kept."""
        return self._FACTS

    def required_roles(self) -> tuple[str, ...]:
        """See Kept."""
        return ()

    def known_roles(self) -> tuple[str, ...]:
        """See Kept."""
        return self._VALUES

    def parts(self) -> tuple[Part, ...]:
        """See Kept."""
        drafts = self.draft_layers()
        if not drafts:
            return ()
        layout = text_fact(self._description, "draft_kv_layout", known=ROWS_ARE_PAGES)
        if ROWS_ARE_PAGES[layout]:
            spans = spans_of_roles(self._description, self._VALUES)
            require_whole_pages(self._description, spans)
        part = role_part(
            self._description,
            ("k", "v"),
            name="draft",
            pool=KV,
            layers=(),
            drafts=drafts,
            rows_are_pages=ROWS_ARE_PAGES[layout],
            value_format=text_fact(self._description, "draft_kv_format"),
        )
        return (part,)
