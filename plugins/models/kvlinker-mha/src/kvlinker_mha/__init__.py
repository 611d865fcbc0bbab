"""Multi-head and grouped-query attention: one K and one V buffer per layer, token-major or head-major.

Shapes do not tell the two layouts apart (with 2 heads and pages of 2 slots they are the same), so the adapter must.
"""

from __future__ import annotations

from kvlinker.description import KVCacheDescription
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError
from kvlinker.hookspecs import ModelConfig, ModelConfigRequest, PluginInfo, StrategyMatch, hookimpl
from kvlinker.layouts import (
    draft_count,
    integer_fact,
    pool_entry,
    pool_group,
    require_facts,
    require_page_rows,
    require_paged_pools,
    require_roles,
    require_row_bytes,
    ride_along,
    role_spans,
    text_fact,
)
from kvlinker.pools import KV, DevicePoolGroup
from kvlinker_mha import planned
from kvlinker_mha.formats import (
    DRAFT_FACTS,
    FACTS,
    FAMILY,
    ROWS_ARE_PAGES,
    SCALED_FORMATS,
    SCALES,
    VALUES,
)
from kvlinker_mha.indexes import (
    check_indexes,
    index_entries,
    index_facts,
    index_roles,
    indexes_left_out,
)

__all__ = [
    "build_direct_linker_pool_group",
    "describe_model_config",
    "describe_plugin",
    "match_kv_cache",
]

LAYOUT = "mha/1"
"""Goes into every key: raise it when the bytes of a page object change."""


@hookimpl
def describe_plugin() -> PluginInfo:
    """See `kvlinker.hookspecs`."""
    return PluginInfo(api_version=1, summary="multi-head and grouped-query attention: K and V")


@hookimpl
def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
    """Claim an MHA cache, scales, index keys and drafts included; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the family is this one, and the cache is not laid out here; the text says why.
    """
    if description.family != FAMILY:
        return None
    _check(description)
    return StrategyMatch(
        buffers=frozenset(description.buffers), omitted=indexes_left_out(description)
    )


@hookimpl
def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
    """Lay an MHA cache out as `kv`, and what it has of scales, index keys and other drafts; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    _check(description)
    kv_format = text_fact(description, "kv_format")
    entries = [
        _entry(
            description,
            name="kv",
            roles=VALUES,
            rows_are_pages=_rows_are_pages(description),
            value_format=kv_format,
        )
    ]
    if _is_scaled(description):
        # An entry of its own: a page of scales is one row, whatever the rows of the values are.
        entries.append(
            _entry(
                description,
                name="kv_scale",
                roles=SCALES,
                rows_are_pages=True,
                value_format=f"{kv_format}_scale",
            )
        )
    entries += index_entries(description)
    if _drafts_differ(description) and description.buffers.get(_drafts_of(VALUES)[0]):
        entries.append(_draft_entry(description))
    return pool_group(description, entries, layout=LAYOUT)


@hookimpl
def describe_model_config(
    config: ModelConfig, request: ModelConfigRequest
) -> KVCacheDescription | None:
    """Describe the cache that a model would have; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the model has such a cache, and it is not laid out here; the text says why.
    """
    return planned.describe(config, request) if config.model_type in planned.MODEL_TYPES else None


def _entry(
    description: KVCacheDescription,
    *,
    name: str,
    roles: tuple[str, str],
    rows_are_pages: bool,
    value_format: str,
) -> DevicePoolEntry:
    """Return an entry with one component for K and one for V, drafts behind the target in both."""
    target = [description.buffers[role] for role in roles]
    apart = _drafts_differ(description)
    drafts = [() if apart else description.buffers.get(role, ()) for role in _drafts_of(roles)]
    positions = {i: i for i in range(len(target[0]))}
    return pool_entry(
        description,
        name=name,
        indices_from_pool=KV,
        roles=(*roles, *_drafts_of(roles)) if drafts[0] else roles,
        components=[[*own, *riding] for own, riding in zip(target, drafts, strict=True)],
        layer_mapping=ride_along(positions, range(len(drafts[0]))),
        rows_are_pages=rows_are_pages,
        value_format=value_format,
    )


def _draft_entry(description: KVCacheDescription) -> DevicePoolEntry:
    """Return the entry of drafts that keep K and V otherwise than the target: they ride on its first layers."""
    components = [description.buffers[role] for role in _drafts_of(VALUES)]
    return pool_entry(
        description,
        name="draft",
        indices_from_pool=KV,
        roles=_drafts_of(VALUES),
        components=components,
        layer_mapping={layer: layer for layer in range(len(components[0]))},
        rows_are_pages=_draft_rows_are_pages(description),
        value_format=text_fact(description, "draft_kv_format"),
    )


def _drafts_of(roles: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"draft_{role}" for role in roles)


def _rows_are_pages(description: KVCacheDescription) -> bool:
    return ROWS_ARE_PAGES[text_fact(description, "kv_layout", known=ROWS_ARE_PAGES)]


def _drafts_differ(description: KVCacheDescription) -> bool:
    """Return whether drafts keep K and V in a format of their own, which has no scales in buffers."""
    return any(name in description.facts for name in DRAFT_FACTS)


def _draft_rows_are_pages(description: KVCacheDescription) -> bool:
    return ROWS_ARE_PAGES[text_fact(description, "draft_kv_layout", known=ROWS_ARE_PAGES)]


def _is_scaled(description: KVCacheDescription) -> bool:
    return integer_fact(description, "kv_scaled", known=(0, 1)) == 1


# ---- checks: what is not refused here would be restored wrong ---------------------------------


def _check(description: KVCacheDescription) -> None:
    require_facts(description, known=(*FACTS, *DRAFT_FACTS, *index_facts(description)))
    require_paged_pools(description, KV)
    text_fact(description, "kv_format")
    _check_scales(description)
    roles = (*VALUES, *SCALES) if _is_scaled(description) else VALUES
    require_roles(
        description,
        required=(*roles, *index_roles(description)),
        optional=(*SCALES, *_drafts_of((*VALUES, *SCALES))),
    )
    for role in roles:
        role_spans(description, role, count=len(description.layers))
    drafting = _draft_roles(description)
    drafts = draft_count(description, *drafting)
    for role in drafting:
        role_spans(description, role, count=drafts, per="draft layer")
    _check_pages(description)
    if _is_scaled(description):
        _check_scale_rows(description)
    check_indexes(description)


def _draft_roles(description: KVCacheDescription) -> tuple[str, ...]:
    """Return the roles of which each draft has a buffer; a pipeline stage may have no drafts.

    Raises:
        KVLinkerError: drafts are stated to have a format of their own, and have scales, or it is not whole.
    """
    if not _drafts_differ(description):
        return _drafts_of((*VALUES, *SCALES)) if _is_scaled(description) else _drafts_of(VALUES)
    text_fact(description, "draft_kv_format")
    if scales := [role for role in _drafts_of(SCALES) if description.buffers.get(role, ())]:
        msg = (
            f"family {FAMILY!r}: drafts are said to keep K and V in a format of their own, which has no scales, and "
            f"{scales} are described; state {list(DRAFT_FACTS)} for drafts without scales alone"
        )
        raise ContractError(msg)
    return _drafts_of(VALUES)


def _check_scale_rows(description: KVCacheDescription) -> None:
    """Refuse scales that are no row for each page, with one for each of its blocks."""
    paged = _rows_are_pages(description)
    block = SCALED_FORMATS[text_fact(description, "kv_format", known=SCALED_FORMATS)]
    for role in (*VALUES, *(() if _drafts_differ(description) else _drafts_of(VALUES))):
        require_page_rows(description, f"{role}_scale", beside=role, rows_are_pages=paged)
        scales = description.buffers.get(f"{role}_scale", ())
        for span, values in zip(scales, description.buffers.get(role, ()), strict=True):
            page_bytes = values.row_bytes * (1 if paged else description.page_size)
            require_row_bytes(description, [span], page_bytes // block)


def _check_scales(description: KVCacheDescription) -> None:
    given = [role for role in (*SCALES, *_drafts_of(SCALES)) if description.buffers.get(role, ())]
    if _is_scaled(description) and not set(SCALES) <= set(given):
        msg = (
            f"family {FAMILY!r}: the values are scaled, and their scales are not described (got {given}, "
            f"expected {list(SCALES)}); values restored with another page's scales are wrong"
        )
        raise ContractError(msg)
    if _is_scaled(description):
        text_fact(description, "kv_format", known=SCALED_FORMATS)
    if given and not _is_scaled(description):
        msg = f"family {FAMILY!r}: kv_scaled is 0, but scales {given} are described; state kv_scaled as 1"
        raise ContractError(msg)
    _refuse_unscaled_blocks(description)


def _refuse_unscaled_blocks(description: KVCacheDescription) -> None:
    """Refuse a format that has scales in buffers where none are said to be kept."""
    stated = [] if _is_scaled(description) else ["kv_format"]
    for name in (*stated, "draft_kv_format"):
        if (found := description.facts.get(name)) in SCALED_FORMATS:
            msg = (
                f"family {FAMILY!r}: {name} is {found!r}, whose scales are in buffers, and none are said to be kept; "
                f"describe them, with kv_scaled as 1 and drafts in the target's format"
            )
            raise ContractError(msg)


def _check_pages(description: KVCacheDescription) -> None:
    """Refuse rows that are said to be pages, and have no equal share for each slot."""
    drafts_are_pages = (
        _draft_rows_are_pages(description)
        if _drafts_differ(description)
        else _rows_are_pages(description)
    )
    paged = (
        *(VALUES if _rows_are_pages(description) else ()),
        *(_drafts_of(VALUES) if drafts_are_pages else ()),
    )
    for role in paged:
        for span in description.buffers.get(role, ()):
            if span.row_bytes % description.page_size:
                msg = (
                    f"family {FAMILY!r}: span {span.label!r} has rows of {span.row_bytes} B, which are no pages "
                    f"of {description.page_size} slots; a head-major row is one page"
                )
                raise ContractError(msg)
