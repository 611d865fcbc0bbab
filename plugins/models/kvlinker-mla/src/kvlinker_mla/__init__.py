"""Multi-head latent attention (DeepSeek V2 and V3, Kimi K2): one compressed KV buffer per layer."""

from __future__ import annotations

from kvlinker.description import KVCacheDescription
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError, UnsupportedKVCacheError
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
    ride_along,
    role_spans,
    text_fact,
)
from kvlinker.pools import KV, DevicePoolGroup
from kvlinker_mla import planned
from kvlinker_mla.formats import (
    FACTS,
    FAMILY,
    LATENT_VALUES,
    LATENTS_IN_ROW,
    PACKED,
    SCALED,
    VALUE_BYTES,
    row_bytes,
    scale_bytes,
)

__all__ = [
    "build_direct_linker_pool_group",
    "describe_model_config",
    "describe_plugin",
    "match_kv_cache",
]

LAYOUT = "mla/1"
"""Goes into every key: raise it when the bytes of a page object change."""
_SHARES = "dcp"
"""Axis of the ranks that take the slots of a page in turn."""


@hookimpl
def describe_plugin() -> PluginInfo:
    """See `kvlinker.hookspecs`."""
    return PluginInfo(api_version=1, summary="multi-head latent attention: one buffer per layer")


@hookimpl
def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
    """Claim an MLA cache, scales and drafts included; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the family is this one, and the cache is not laid out here; the text says why.
    """
    if description.family != FAMILY:
        return None
    _check(description)
    return StrategyMatch(buffers=frozenset(description.buffers))


@hookimpl
def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
    """Lay an MLA cache out as `kv`, and `kv_scale` where the values have scales; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    _check(description)
    kv_format = text_fact(description, "kv_format")
    shares = _latents_in_row(description) is not None
    entries = [_entry(description, "kv", "latent", kv_format, rows_are_pages=shares)]
    if kv_format == SCALED:
        # An entry of its own: a page of scales is one row, and those of the latents are slots.
        scales = f"{kv_format}_scale"
        entries.append(_entry(description, "kv_scale", "latent_scale", scales, rows_are_pages=True))
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
    name: str,
    role: str,
    value_format: str,
    *,
    rows_are_pages: bool,
) -> DevicePoolEntry:
    """Return an entry with one component, drafts behind the target."""
    target, drafts = (description.buffers.get(place, ()) for place in (role, f"draft_{role}"))
    return pool_entry(
        description,
        name=name,
        indices_from_pool=KV,
        roles=(role, f"draft_{role}") if drafts else (role,),
        components=[[*target, *drafts]],
        layer_mapping=ride_along({i: i for i in range(len(target))}, range(len(drafts))),
        rows_are_pages=rows_are_pages,
        value_format=value_format,
    )


# ---- checks: what is not refused here would be restored wrong ---------------------------------


def _check(description: KVCacheDescription) -> None:
    require_facts(description, known=FACTS)
    require_paged_pools(description, KV)
    sizes = _row_sizes(description)
    roles = tuple(sizes)
    drafts = tuple(f"draft_{role}" for role in roles)
    require_roles(description, required=roles, optional=drafts)
    count = draft_count(description, *drafts)
    for role, size in sizes.items():
        role_spans(description, role, count=len(description.layers), row_bytes=size)
        role_spans(description, f"draft_{role}", count=count, per="draft layer", row_bytes=size)
    if _latents_in_row(description) is not None and (count or "latent_scale" in sizes):
        msg = (
            f"family {FAMILY!r}: {count} drafts and the roles {list(roles)} beside {LATENTS_IN_ROW}; "
            f"shares of pages are laid out without drafts and scales"
        )
        raise UnsupportedKVCacheError(msg)
    if "latent_scale" in sizes:
        for prefix in ("", "draft_"):
            require_page_rows(
                description,
                f"{prefix}latent_scale",
                beside=f"{prefix}latent",
                rows_are_pages=False,
            )


def _row_sizes(description: KVCacheDescription) -> dict[str, int]:
    """Return a target's roles in the stated format, with the bytes of a row: a slot, a share, or a page of scales."""
    kv_format = text_fact(description, "kv_format", known=(*VALUE_BYTES, PACKED, SCALED))
    values = _latent_values(description)
    sizes = {"latent": row_bytes(kv_format, values) * (_latents_in_row(description) or 1)}
    if kv_format == SCALED:
        sizes["latent_scale"] = description.page_size * scale_bytes(values)
    return sizes


def _latents_in_row(description: KVCacheDescription) -> int | None:
    """Return the latents in a row that is a rank's share of a page; None where rows are slots.

    Raises:
        ContractError: the shares of all ranks do not make a page.
    """
    if LATENTS_IN_ROW not in description.facts:
        return None
    count = integer_fact(description, LATENTS_IN_ROW)
    axes = {axis.name: axis.size for axis in description.replication.axes_of("latent")}
    ranks = axes.get(_SHARES, 1)
    if count * ranks != description.page_size:
        msg = (
            f"family {FAMILY!r}: {LATENTS_IN_ROW} {count} on each of {ranks} ranks of the axis {_SHARES!r} do not make "
            f"a page of {description.page_size} slots; shard 'latent' over that axis"
        )
        raise ContractError(msg)
    return count


def _latent_values(description: KVCacheDescription) -> int:
    """Return the values of a slot: DeepSeek's, unless the description states another number."""
    if "latent_values" not in description.facts:
        return LATENT_VALUES
    return integer_fact(description, "latent_values")
