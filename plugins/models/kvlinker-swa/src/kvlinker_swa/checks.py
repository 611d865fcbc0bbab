"""What a description must say before it is laid out: whatever passes here is restored whole."""

from __future__ import annotations

from kvlinker.description import KVCacheDescription
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.layouts import (
    DRAFT_LAYERS,
    integer_fact,
    require_facts,
    require_page_rows,
    require_paged_pools,
    require_roles,
    role_spans,
)
from kvlinker.pools import KV
from kvlinker_swa.layers import (
    FACTS,
    FAMILY,
    KINDS,
    SCALES,
    SWA,
    VALUES,
    LayerKind,
    check_kinds,
)

__all__ = ["check"]


def check(description: KVCacheDescription) -> None:
    """Refuse what would be restored wrong.

    Raises:
        ContractError: something is missing, superfluous, or does not fit together.
        UnsupportedKVCacheError: a kind of layer, a role, a fact or a logical pool is not laid out here.
    """
    require_facts(description, known=FACTS)
    check_kinds(description)
    _check_pools(description)
    _check_roles(description)
    for kind in KINDS:
        _check_scales(description, kind)
        kind.value_format(description)
        _check_spans(description, kind)
        _check_rows(description, kind)
        _check_scale_rows(description, kind)
    _check_drafts(description)


def _check_pools(description: KVCacheDescription) -> None:
    _require_both_pools(description)
    require_paged_pools(description, KV, SWA)
    full, windows = (description.logical_pool(name) for name in (KV, SWA))
    if windows is not None and windows.window is None:
        msg = (
            f"family {FAMILY!r}: logical pool {SWA!r} states no window; state how many slots before a boundary its "
            f"layers read, for that many must be stored with it"
        )
        raise ContractError(msg)
    if full is not None and full.window is not None:
        msg = (
            f"family {FAMILY!r}: logical pool {KV!r} states a window of {full.window} slots, and its layers need "
            f"every page; describe layers of windows under {SWA!r}"
        )
        raise ContractError(msg)


def _require_both_pools(description: KVCacheDescription) -> None:
    """Refuse a model of one kind of layers; a pipeline stage may have one kind alone, but its engine both pools."""
    if description.logical_pool(SWA) is None:
        msg = (
            f"family {FAMILY!r}: there is no logical pool {SWA!r}, so no layer of the model looks through a window; "
            f"describe the cache as family 'mha'"
        )
        raise UnsupportedKVCacheError(msg)
    if description.logical_pool(KV) is None:
        msg = (
            f"family {FAMILY!r}: there is no logical pool {KV!r}, so every layer of the model looks through a window; "
            f"a prefix is known by its pages of {KV!r}, and such a model is not laid out here"
        )
        raise UnsupportedKVCacheError(msg)


def _check_roles(description: KVCacheDescription) -> None:
    required: list[str] = []
    known: list[str] = []
    for kind in KINDS:
        known += (*kind.roles(VALUES + SCALES), *kind.draft_roles(VALUES + SCALES))
        if kind.layers(description):
            required += kind.roles(VALUES)
    require_roles(description, required=required, optional=known)


def _check_scales(description: KVCacheDescription, kind: LayerKind) -> None:
    """Refuse scales that are missing where values need them, or described where none are said to."""
    roles = (*kind.roles(SCALES), *kind.draft_roles(SCALES))
    given = [role for role in roles if description.buffers.get(role, ())]
    if given and not kind.is_scaled(description):
        msg = (
            f"family {FAMILY!r}: the values of {kind.attention} are said to need no scales, but {given} are "
            f"described; state kv_scaled as 1"
        )
        raise ContractError(msg)
    wanted = list(kind.roles(SCALES)) if kind.layers(description) else []
    if kind.is_scaled(description) and not set(wanted) <= set(given):
        msg = (
            f"family {FAMILY!r}: the values of {kind.attention} are scaled, and their scales are not described "
            f"(got {given}, expected {wanted}); values restored with another page's scales are wrong"
        )
        raise ContractError(msg)


def _check_spans(description: KVCacheDescription, kind: LayerKind) -> None:
    names = VALUES + SCALES if kind.is_scaled(description) else VALUES
    layers, drafts = len(kind.layers(description)), _draft_count(description, kind, names)
    for role in kind.roles(names):
        role_spans(description, role, count=layers, per=f"layer of {kind.attention}")
    for role in kind.draft_roles(names):
        role_spans(description, role, count=drafts, per="draft layer")


def _check_scale_rows(description: KVCacheDescription, kind: LayerKind) -> None:
    if not kind.is_scaled(description):
        return
    paged = kind.rows_are_pages(description)
    for role in (*kind.roles(VALUES), *kind.draft_roles(VALUES)):
        require_page_rows(description, f"{role}_scale", beside=role, rows_are_pages=paged)


def _draft_count(description: KVCacheDescription, kind: LayerKind, names: tuple[str, ...]) -> int:
    """Return how many draft layers use the kind's slots."""
    counts = {role: len(description.buffers.get(role, ())) for role in kind.draft_roles(names)}
    if len(set(counts.values())) != 1:
        msg = f"family {FAMILY!r}: draft buffers must come in equal numbers, got {counts}"
        raise ContractError(msg)
    return next(iter(counts.values()))


def _check_rows(description: KVCacheDescription, kind: LayerKind) -> None:
    if not kind.rows_are_pages(description):
        return
    for role in (*kind.roles(VALUES), *kind.draft_roles(VALUES)):
        for span in description.buffers.get(role, ()):
            if span.row_bytes % description.page_size:
                msg = (
                    f"family {FAMILY!r}: span {span.label!r} has rows of {span.row_bytes} B, which are no pages "
                    f"of {description.page_size} slots; a head-major row is one page"
                )
                raise ContractError(msg)


def _check_drafts(description: KVCacheDescription) -> None:
    """Refuse drafts that are stated and not described, or that find no layer to ride on."""
    counts = {kind.pool: _draft_count(description, kind, VALUES) for kind in KINDS}
    described, layers = sum(counts.values()), len(description.layers)
    stated = described
    if DRAFT_LAYERS in description.facts:
        stated = integer_fact(description, DRAFT_LAYERS)
    if stated != described:
        msg = (
            f"family {FAMILY!r}: fact {DRAFT_LAYERS!r} says {stated}, but {described} are described ({counts}); "
            f"drafts without their KV would run on leftover rows"
        )
        raise ContractError(msg)
    if described > layers:
        msg = f"family {FAMILY!r}: {described} draft layers cannot ride on {layers} layers"
        raise ContractError(msg)
