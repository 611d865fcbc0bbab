"""The pools of a DeepSeek V4 cache, and the group that they make over an engine's buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvlinker.description import KVCacheDescription
from kvlinker.entries import DevicePoolEntry
from kvlinker.layouts import (
    pool_entry,
    pool_group,
    require_paged_pools,
    require_roles,
    role_spans,
)
from kvlinker.pools import KV, DevicePoolGroup
from kvlinker_deepseek_v4.formats import HEAD_VALUES, INDEX_VALUES, V4Formats, read_formats
from kvlinker_deepseek_v4.mappings import (
    C1_RATIO,
    C2_RATIO,
    C4_RATIO,
    C128_RATIO,
    LayerPositions,
    V4LayerMappings,
)

__all__ = ["LAYOUT", "SWA", "V4Pool", "build_pool_group", "check_buffers", "v4_pools"]

LAYOUT = "deepseek_v4/1"
"""Goes into every key: raise it when the bytes of a page object change."""
SWA = "swa"
"""The logical pool of trailing windows."""

DRAFT_SWA = "draft_swa_kv"
ROLES: Mapping[str, str] = MappingProxyType(
    {
        "swa_kv": "layer",
        "c4_kv": "layer of ratio 4",
        "c4_indexer": "layer of ratio 4",
        "c4_indexer_scale": "layer of ratio 4 with a split indexer",
        "c4_state": "layer of ratio 4",
        "c4_indexer_state": "layer of ratio 4",
        "c128_kv": "layer of ratio 128",
        "c1_kv": "layer of ratio 1 that keeps KV",
        "c1_indexer": "layer of ratio 1 that keeps KV",
        "c2_kv": "layer of ratio 2 that keeps KV",
        "c2_indexer": "layer of ratio 2 that keeps KV",
        DRAFT_SWA: "draft layer",
    }
)
"""Role to what there is one buffer for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Pool:
    """One pool of a V4 cache as numbers: what both a device pool and its host mirror follow."""

    name: str
    indices_from_pool: str
    role: str
    """The description's buffers that it is made of."""
    layer_mapping: LayerPositions
    row_bytes: int
    """Bytes of a row of one layer's buffer."""
    rows_per_page: int = 1
    """Rows in a page: more than one where rows are not pages, those of a state's ring or of some shared index keys."""
    value_format: str

    @property
    def spans(self) -> int:
        """Buffers, those of drafts included."""
        return sum(len(positions) for positions in self.layer_mapping.values())

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all buffers."""
        return self.spans * self.rows_per_page * self.row_bytes


def v4_pools(formats: V4Formats, mappings: V4LayerMappings) -> tuple[V4Pool, ...]:
    """Return the pools of a stage in entry order; parts that no layer of the stage has are not among them."""
    pools = (
        _kv_pool(formats, "swa", SWA, "swa_kv", mappings.swa, ratio=1),
        _kv_pool(formats, "deepseek_v4_c4", KV, "c4_kv", mappings.c4, ratio=C4_RATIO),
        *_indexer_pools(formats, mappings),
        _kv_pool(formats, "deepseek_v4_c128", KV, "c128_kv", mappings.c128, ratio=C128_RATIO),
        *_shared_pools(formats, mappings.c1, "c1", ratio=C1_RATIO),
        *_shared_pools(formats, mappings.c2, "c2", ratio=C2_RATIO),
        _state_pool(formats, mappings, "c4_state", HEAD_VALUES),
        _state_pool(formats, mappings, "c4_indexer_state", INDEX_VALUES),
    )
    return tuple(pool for pool in pools if pool.layer_mapping)


def _kv_pool(
    formats: V4Formats,
    name: str,
    source: str,
    role: str,
    layers: LayerPositions,
    *,
    ratio: int,
) -> V4Pool:
    return V4Pool(
        name=name,
        indices_from_pool=source,
        role=role,
        layer_mapping=layers,
        row_bytes=formats.kv_page_bytes(ratio),
        value_format=formats.kv_format,
    )


def _indexer_pools(formats: V4Formats, mappings: V4LayerMappings) -> list[V4Pool]:
    """Return the indexer's pool, and one for its scales where they are kept apart."""
    sizes = formats.indexer_page_bytes(C4_RATIO)
    return [
        V4Pool(
            name=f"deepseek_v4_{role}",
            indices_from_pool=KV,
            role=role,
            layer_mapping=mappings.c4,
            row_bytes=size,
            value_format=formats.indexer_format,
        )
        for role, size in zip(("c4_indexer", "c4_indexer_scale"), sizes, strict=False)
    ]


def _shared_pools(
    formats: V4Formats, layers: LayerPositions, name: str, *, ratio: int
) -> tuple[V4Pool, ...]:
    """Return the pools of KV and index keys that layers of a ratio of V4.1 share; none where there are no such."""
    if not layers:
        return ()
    rows, row_bytes = formats.shared_indexer_rows(ratio)
    return (
        _kv_pool(formats, f"deepseek_v4_{name}", KV, f"{name}_kv", layers, ratio=ratio),
        V4Pool(
            name=f"deepseek_v4_{name}_indexer",
            indices_from_pool=KV,
            role=f"{name}_indexer",
            layer_mapping=layers,
            row_bytes=row_bytes,
            rows_per_page=rows,
            value_format=f"{formats.shared_indexer_format}",
        ),
    )


def _state_pool(formats: V4Formats, mappings: V4LayerMappings, role: str, values: int) -> V4Pool:
    return V4Pool(
        name=f"deepseek_v4_{role}",
        indices_from_pool=SWA,
        role=role,
        layer_mapping=mappings.c4_state,
        row_bytes=formats.state_row_bytes(values),
        rows_per_page=formats.state_ring_rows,
        value_format=formats.state_format,
    )


def build_pool_group(description: KVCacheDescription, mappings: V4LayerMappings) -> DevicePoolGroup:
    """Lay a V4 cache out under mappings that were resolved before.

    Args:
        description: the cache.
        mappings: of its layers and drafts, from `resolve_layer_mappings`.

    Raises:
        KVLinkerError: the cache is not laid out here; the text says why.
    """
    pools = check_buffers(description, mappings)
    return pool_group(description, [_entry(description, pool) for pool in pools], layout=LAYOUT)


def _entry(description: KVCacheDescription, pool: V4Pool) -> DevicePoolEntry:
    drafts = description.buffers.get(DRAFT_SWA, ()) if pool.role == "swa_kv" else ()
    spans = (*description.buffers[pool.role], *drafts)
    return pool_entry(
        description,
        name=pool.name,
        indices_from_pool=pool.indices_from_pool,
        roles=(pool.role, DRAFT_SWA) if drafts else (pool.role,),
        # A ring becomes one row, and so do a page's index keys; the spare rows behind the last one are cut.
        components=[[span.group_rows(pool.rows_per_page) for span in spans]],
        layer_mapping=pool.layer_mapping,
        rows_are_pages=True,
        value_format=pool.value_format,
    )


def check_buffers(description: KVCacheDescription, mappings: V4LayerMappings) -> tuple[V4Pool, ...]:
    """Return the pools of a description after checking that its buffers are theirs, all and whole.

    Raises:
        ContractError: a buffer is missing, superfluous, or of another size than its format says.
        UnsupportedKVCacheError: a role, a logical pool or a format is unknown.
    """
    require_roles(description, required=("swa_kv",), optional=ROLES)
    formats = read_formats(description)
    require_paged_pools(description, KV, SWA)
    pools = v4_pools(formats, mappings)
    counts = {pool.role: len(pool.layer_mapping) for pool in pools}
    sizes = {pool.role: pool.row_bytes for pool in pools}
    counts[DRAFT_SWA], sizes[DRAFT_SWA] = mappings.draft_layers, sizes["swa_kv"]
    for role, per in ROLES.items():
        count, row_bytes = counts.get(role, 0), sizes.get(role)
        role_spans(description, role, count=count, per=per, row_bytes=row_bytes)
    return pools
