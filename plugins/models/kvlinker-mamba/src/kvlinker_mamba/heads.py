"""K and V of attention heads, of full attention and of windows: one buffer each per layer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvlinker.description import KVCacheDescription
from kvlinker.errors import ContractError
from kvlinker.layouts import integer_fact, text_fact
from kvlinker_mamba.layers import FAMILY, layers_in
from kvlinker_mamba.parts import (
    Kept,
    Part,
    draft_roles,
    require_whole_values,
    role_part,
    spans_of_roles,
)

__all__ = ["HEAD_BYTES", "ROWS_ARE_PAGES", "DraftHeads", "Heads"]

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


class Heads(Kept):
    """K and V that are addressed from one logical pool, with their scales and drafts."""

    def __init__(self, pool: str, prefix: str = "") -> None:
        """Name the logical pool, and what its roles and its own facts begin with."""
        self._pool = pool
        self._prefix = prefix
        self._values = (f"{prefix}k", f"{prefix}v")
        self._scales = (f"{prefix}k_scale", f"{prefix}v_scale")

    def facts(self, description: KVCacheDescription) -> tuple[str, ...]:  # noqa: ARG002
        """See Kept."""
        names = ("kv_layout", "kv_format", "kv_scaled")
        return (*names, *(f"{self._prefix}{name}" for name in names if self._prefix))

    def required_roles(self, description: KVCacheDescription) -> tuple[str, ...]:
        """See Kept."""
        if not layers_in(description, self._pool):
            return ()
        return (*self._values, *self._scales) if self._is_scaled(description) else self._values

    def known_roles(self, description: KVCacheDescription) -> tuple[str, ...]:  # noqa: ARG002
        """See Kept."""
        roles = (*self._values, *self._scales)
        return (*roles, *draft_roles(roles))

    def parts(self, description: KVCacheDescription) -> tuple[Part, ...]:
        """See Kept."""
        layers, drafts = layers_in(description, self._pool), self.draft_layers(description)
        layout = text_fact(description, self._fact(description, "kv_layout"), known=ROWS_ARE_PAGES)
        value_format = text_fact(description, self._fact(description, "kv_format"))
        if ROWS_ARE_PAGES[layout]:
            spans = spans_of_roles(description, (*self._values, *draft_roles(self._values)))
            require_whole_values(spans, description.page_size, "pages of slots, at least")
        values = role_part(
            description,
            self._values,
            name=self._pool,
            pool=self._pool,
            layers=layers,
            drafts=drafts,
            rows_are_pages=ROWS_ARE_PAGES[layout],
            value_format=value_format,
        )
        if not self._is_scaled(description):
            self._refuse_scales(description)
            return (values,)
        scales = role_part(
            description,
            self._scales,
            name=f"{self._pool}_scale",
            pool=self._pool,
            layers=layers,
            drafts=drafts,
            # A page of scales is one row, whatever the rows of the values are.
            rows_are_pages=True,
            value_format=f"{value_format}_scale",
        )
        return values, scales

    def _refuse_scales(self, description: KVCacheDescription) -> None:
        roles = (*self._scales, *draft_roles(self._scales))
        if given := [role for role in roles if description.buffers.get(role)]:
            msg = (
                f"family {FAMILY!r}: the values are said to need no scales, but {given} are described; "
                f"state {self._fact(description, 'kv_scaled')} as 1"
            )
            raise ContractError(msg)

    def _is_scaled(self, description: KVCacheDescription) -> bool:
        return integer_fact(description, self._fact(description, "kv_scaled"), known=(0, 1)) == 1

    def _fact(self, description: KVCacheDescription, name: str) -> str:
        """Return the name under which a fact is stated for these layers: their own one, or that of all."""
        own = f"{self._prefix}{name}"
        return own if own in description.facts else name


class DraftHeads(Kept):
    """K and V of a draft model's heads under slots of `kv`, beside a target that keeps latents."""

    _VALUES = ("draft_k", "draft_v")
    _FACTS = ("draft_kv_layout", "draft_kv_format")

    def __init__(self, pool: str) -> None:
        """Name the logical pool."""
        self._pool = pool

    def facts(self, description: KVCacheDescription) -> tuple[str, ...]:  # noqa: ARG002
        """See Kept."""
        return self._FACTS

    def required_roles(self, description: KVCacheDescription) -> tuple[str, ...]:  # noqa: ARG002
        """See Kept."""
        return ()

    def known_roles(self, description: KVCacheDescription) -> tuple[str, ...]:  # noqa: ARG002
        """See Kept."""
        return self._VALUES

    def parts(self, description: KVCacheDescription) -> tuple[Part, ...]:
        """See Kept."""
        drafts = self.draft_layers(description)
        if not drafts:
            return ()
        layout = text_fact(description, "draft_kv_layout", known=ROWS_ARE_PAGES)
        if ROWS_ARE_PAGES[layout]:
            spans = spans_of_roles(description, self._VALUES)
            require_whole_values(spans, description.page_size, "pages of slots, at least")
        part = role_part(
            description,
            ("k", "v"),
            name="draft",
            pool=self._pool,
            layers=(),
            drafts=drafts,
            rows_are_pages=ROWS_ARE_PAGES[layout],
            value_format=text_fact(description, "draft_kv_format"),
        )
        return (part,)
