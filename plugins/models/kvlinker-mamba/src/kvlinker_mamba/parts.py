"""A part is one physical pool of a hybrid: whose layers keep something there, and in which buffers.

What a hybrid keeps comes in several forms, which are laid out each by itself and end up in one group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvlinker.description import KVCacheDescription
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError
from kvlinker.layouts import pool_entry, require_row_bytes, ride_along, role_spans
from kvlinker.spans import BufferSpan
from kvlinker_mamba.layers import FAMILY

__all__ = [
    "Kept",
    "Part",
    "draft_roles",
    "require_whole_pages",
    "require_whole_values",
    "role_part",
    "spans_of_roles",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One physical pool: a component for each role, in each a span for each of its layers, then the drafts'."""

    name: str
    pool: str
    """The logical pool whose slots address it."""
    roles: tuple[str, ...]
    """Those that have spans in it, of drafts too."""
    layers: tuple[int, ...]
    """Transfer layer of each span, drafts left out."""
    components: tuple[tuple[BufferSpan, ...], ...]
    drafts: tuple[int, ...] = ()
    """For each draft's span, the layer that it rides on."""
    rows_are_pages: bool
    value_format: str

    def entry(self, description: KVCacheDescription) -> DevicePoolEntry | None:
        """Return the pool's entry, or None where a pipeline stage keeps nothing in it."""
        if not self.layers and not self.drafts:
            return None
        return pool_entry(
            description,
            name=self.name,
            indices_from_pool=self.pool,
            roles=self.roles,
            components=self.components,
            layer_mapping=ride_along({la: at for at, la in enumerate(self.layers)}, self.drafts),
            rows_are_pages=self.rows_are_pages,
            value_format=self.value_format,
        )


class Kept(ABC):
    """One form of what a hybrid keeps: how its description names it, what is refused, and its parts."""

    def __init__(self, description: KVCacheDescription) -> None:
        """Read the form from a description."""
        self._description = description

    @abstractmethod
    def facts(self) -> tuple[str, ...]:
        """Return the names of the facts that are read."""

    @abstractmethod
    def required_roles(self) -> tuple[str, ...]:
        """Return the roles without which the stage's cache is not whole."""

    @abstractmethod
    def known_roles(self) -> tuple[str, ...]:
        """Return all roles of the form."""

    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Return the physical pools.

        Raises:
            KVLinkerError: a fact or a buffer is not as it should be; the text says how.
        """

    def draft_layers(self) -> int:
        """Return how many draft layers keep something in this form.

        Raises:
            ContractError: some keep a part of it.
        """
        counts = {
            role: len(self._description.buffers.get(role, ()))
            for role in self.known_roles()
            if role.startswith("draft_") and not role.endswith("_scale")
        }
        if len(set(counts.values())) > 1:
            msg = f"family {FAMILY!r}: draft buffers must come in equal numbers, got {counts}"
            raise ContractError(msg)
        return next(iter(counts.values()), 0)

    def omitted(self) -> Mapping[str, str]:
        """Return why each buffer that is not moved is not needed, by label."""
        return {}


def draft_roles(roles: Sequence[str]) -> tuple[str, ...]:
    """Return the roles of the same buffers of draft layers."""
    return tuple(f"draft_{role}" for role in roles)


def role_part(  # noqa: PLR0913  # one record, named field by field
    description: KVCacheDescription,
    roles: tuple[str, ...],
    *,
    name: str,
    pool: str,
    layers: tuple[int, ...],
    rows_are_pages: bool,
    value_format: str,
    drafts: int = 0,
    row_bytes: int | None = None,
) -> Part:
    """Return the part that some roles make, each with one span for each layer and each draft.

    Args:
        description: the cache.
        roles: a component each; their drafts' roles begin with `draft_`.
        name: physical pool.
        pool: logical pool.
        layers: those that keep something in it.
        rows_are_pages: see `DevicePoolEntry`.
        value_format: what a value's bits mean.
        drafts: draft layers, which ride on the first layers.
        row_bytes: expected bytes of a row; None accepts any.

    Raises:
        ContractError: a role has another number of spans, one without rows, or rows of another size.
    """
    target = [
        role_spans(description, role, count=len(layers), per=f"layer with {name!r}")
        for role in roles
    ]
    riding = [
        role_spans(description, role, count=drafts, per="draft layer")
        for role in draft_roles(roles)
    ]
    components = tuple((*own, *more) for own, more in zip(target, riding, strict=True))
    if row_bytes is not None:
        require_row_bytes(description, (s for spans in components for s in spans), row_bytes)
    stored = (*(roles if layers else ()), *(draft_roles(roles) if drafts else ()))
    return Part(
        name=name,
        pool=pool,
        roles=stored,
        layers=layers,
        components=components,
        drafts=tuple(range(drafts)),
        rows_are_pages=rows_are_pages,
        value_format=value_format,
    )


def spans_of_roles(description: KVCacheDescription, roles: Sequence[str]) -> tuple[BufferSpan, ...]:
    """Return all spans of some roles."""
    return tuple(span for role in roles for span in description.buffers.get(role, ()))


def require_whole_pages(description: KVCacheDescription, spans: Sequence[BufferSpan]) -> None:
    """Refuse spans whose rows are no pages, where a row is said to be one.

    Raises:
        ContractError: a row has no equal share for each slot of a page.
    """
    size = description.page_size
    require_whole_values(spans, size, f"pages of {size} slots")


def require_whole_values(spans: Sequence[BufferSpan], unit_bytes: int, what: str) -> None:
    """Refuse spans whose rows do not have a whole number of units.

    Args:
        spans: of one form.
        unit_bytes: bytes of which a row has a multiple.
        what: the units, in messages.

    Raises:
        ContractError: a buffer is not whole, or not of the stated format.
    """
    for span in spans:
        if span.row_bytes % unit_bytes:
            msg = (
                f"family {FAMILY!r}: span {span.label!r} has rows of {span.row_bytes} B, which is no multiple of "
                f"{unit_bytes} B, for {what}; the buffer is not whole, or not of the stated format"
            )
            raise ContractError(msg)
