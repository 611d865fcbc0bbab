"""A hybrid is states and one kind of pages; whatever passes the check here is restored whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvlinker.description import KVCacheDescription
from kvlinker.errors import ContractError
from kvlinker.layouts import (
    DRAFT_LAYERS,
    integer_fact,
    require_facts,
    require_pools,
    require_roles,
    text_fact,
)
from kvlinker.pools import KV
from kvlinker_mamba.folded import FoldedIndex
from kvlinker_mamba.heads import DraftHeads, Heads
from kvlinker_mamba.latent import Latent, SparseLatent
from kvlinker_mamba.layers import FAMILY, MAMBA, SWA, check_kinds
from kvlinker_mamba.parts import Kept, Part
from kvlinker_mamba.states import States

__all__ = ["KV_FAMILY", "PAGES", "checked_parts", "omitted"]

KV_FAMILY = "kv_family"
"""Fact: the kind of pages beside the states, by the name of the family that keeps them alone."""
PAGES: Mapping[str, Callable[[KVCacheDescription], tuple[Kept, ...]]] = MappingProxyType(
    {
        "mha": lambda cache: (Heads(cache, KV),),
        "swa": lambda cache: (Heads(cache, KV), Heads(cache, SWA, prefix="swa_")),
        "qsa": lambda cache: (Heads(cache, KV), FoldedIndex(cache)),
        "mla": lambda cache: (Latent(cache), DraftHeads(cache)),
        "dsa": lambda cache: (SparseLatent(cache), DraftHeads(cache)),
    }
)
"""Kinds of pages that states are laid out beside."""


def checked_parts(description: KVCacheDescription) -> tuple[Part, ...]:
    """Return the physical pools of a hybrid, refusing what would be restored wrong.

    Raises:
        ContractError: something is missing, superfluous, or does not fit together.
        UnsupportedKVCacheError: a kind of layer, a role, a fact or a logical pool is not laid out here.
    """
    kept = _kept(description)
    require_facts(description, known=[KV_FAMILY, *(name for part in kept for name in part.facts())])
    _check_pools(description)
    require_roles(
        description,
        required=[role for part in kept for role in part.required_roles()],
        optional=[role for part in kept for role in part.known_roles()],
    )
    _check_drafts(description, kept)
    return tuple(pool for part in kept for pool in part.parts())


def omitted(description: KVCacheDescription) -> dict[str, str]:
    """Return why each buffer that is not moved is not needed, by label."""
    return {
        label: reason for part in _kept(description) for label, reason in part.omitted().items()
    }


def _kept(description: KVCacheDescription) -> tuple[Kept, ...]:
    pages = PAGES[text_fact(description, KV_FAMILY, known=PAGES)]
    return (*pages(description), States(description))


def _check_pools(description: KVCacheDescription) -> None:
    paged = (KV, SWA) if description.facts[KV_FAMILY] == "swa" else (KV,)
    require_pools(description, paged=paged, slots=(MAMBA,))
    check_kinds(description, (*paged, MAMBA))
    for pool in description.logical_pools:
        has_window, wants_window = pool.window is not None, pool.name == SWA
        if has_window != wants_window:
            msg = (
                f"family {FAMILY!r}: logical pool {pool.name!r} states the window {pool.window}; "
                f"state one of {SWA!r}, and of no other pool"
            )
            raise ContractError(msg)


def _check_drafts(description: KVCacheDescription, kept: tuple[Kept, ...]) -> None:
    """Refuse drafts that are stated and not described, or that find no layer to ride on."""
    described = sum(part.draft_layers() for part in kept)
    layers, stated = len(description.layers), described
    if DRAFT_LAYERS in description.facts:
        stated = integer_fact(description, DRAFT_LAYERS)
    if stated != described:
        msg = (
            f"family {FAMILY!r}: fact {DRAFT_LAYERS!r} says {stated}, but {described} are described; drafts without "
            f"their KV would run on leftover rows"
        )
        raise ContractError(msg)
    if described > layers:
        msg = f"family {FAMILY!r}: {described} draft layers cannot ride on {layers} layers"
        raise ContractError(msg)
