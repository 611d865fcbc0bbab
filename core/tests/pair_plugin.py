"""A right model plugin for an invented family, in parts that tests of the kit make wrong one by one.

Family `pair`: `keys`, one span a layer, rows are slots; `index`, one span a layer, rows are pages, and dead
on the last layer; `state`, one span a layer, rows are pages of the index space `swa`; drafts in `draft_keys`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.entries import DevicePoolEntry
from kvlinker.hookspecs import PluginInfo, StrategyMatch, hookimpl
from kvlinker.layouts import (
    draft_count,
    pool_entry,
    pool_group,
    require_facts,
    require_paged_pools,
    require_roles,
    ride_along,
    role_spans,
    text_fact,
)
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker.testing.cache_examples import Allocate, CacheExample

__all__ = [
    "CACHES",
    "PairStrategy",
    "build_direct_linker_pool_group",
    "describe_plugin",
    "match_kv_cache",
]

PAGE, PAGES, LAYERS = 2, 5, 4


class PairStrategy:
    """The plugin's decisions, one a method."""

    __name__ = "pair_plugin"

    def describe_plugin(self) -> PluginInfo:
        return PluginInfo(api_version=1, summary="pairs, for tests of the kit")

    def match_kv_cache(self, description: KVCacheDescription) -> StrategyMatch | None:
        if not self.is_mine(description):
            return None
        self.check(description)
        return StrategyMatch(
            buffers=frozenset(description.buffers), omitted=self.omitted(description)
        )

    def build_direct_linker_pool_group(self, description: KVCacheDescription) -> DevicePoolGroup:
        return pool_group(description, self.entries(description), layout=self.layout(description))

    def is_mine(self, description: KVCacheDescription) -> bool:
        return description.family == "pair"

    def check(self, description: KVCacheDescription) -> None:
        self.check_roles(description)
        self.check_facts(description)
        self.check_pools(description)
        self.check_drafts(description)
        for role in ("keys", "index", "state"):
            role_spans(description, role, count=len(description.layers))

    def check_roles(self, description: KVCacheDescription) -> None:
        require_roles(description, required=["keys", "index", "state"], optional=["draft_keys"])

    def check_facts(self, description: KVCacheDescription) -> None:
        require_facts(description, known=["kv_format"])

    def check_pools(self, description: KVCacheDescription) -> None:
        require_paged_pools(description, "kv", "swa")

    def check_drafts(self, description: KVCacheDescription) -> None:
        draft_count(description, "draft_keys")

    def is_dead(self, description: KVCacheDescription, layer: int) -> bool:
        return description.layers[layer].kind == "last"

    def omitted(self, description: KVCacheDescription) -> dict[str, str]:
        return {
            span.label: "the last layer's index is never read"
            for layer, span in enumerate(description.buffers["index"])
            if self.is_dead(description, layer)
        }

    def layout(self, description: KVCacheDescription) -> str:
        del description
        return "pair/1"

    def value_format(self, description: KVCacheDescription) -> str:
        return text_fact(description, "kv_format")

    def entries(self, description: KVCacheDescription) -> list[DevicePoolEntry]:
        index = {
            layer: span
            for layer, span in enumerate(description.buffers["index"])
            if span.label not in self.omitted(description)
        }
        at = {layer: position for position, layer in enumerate(index)}
        entries = [self.keys(description), self.paged(description, "state", "swa")]
        if index:
            entries.append(self.paged(description, "index", "kv", list(index.values()), at))
        return entries

    def keys(self, description: KVCacheDescription) -> DevicePoolEntry:
        own, drafts = description.buffers["keys"], description.buffers.get("draft_keys", ())
        return pool_entry(
            description,
            name="keys",
            indices_from_pool="kv",
            roles=["keys", "draft_keys"] if drafts else ["keys"],
            components=[[*own, *drafts]],
            layer_mapping=ride_along(self.positions(len(own)), range(len(drafts))),
            rows_are_pages=self.key_rows_are_pages(),
            value_format=self.value_format(description),
        )

    def key_rows_are_pages(self) -> bool:
        return False

    def positions(self, count: int) -> dict[int, int]:
        return {layer: layer for layer in range(count)}

    def paged(
        self,
        description: KVCacheDescription,
        role: str,
        source: str,
        spans: Sequence[BufferSpan] | None = None,
        at: dict[int, int] | None = None,
    ) -> DevicePoolEntry:
        spans = description.buffers[role] if spans is None else spans
        return pool_entry(
            description,
            name=role,
            indices_from_pool=source,
            roles=[role],
            components=[spans],
            layer_mapping=at or {layer: layer for layer in range(len(spans))},
            rows_are_pages=True,
            value_format="",
        )


@hookimpl
def describe_plugin() -> PluginInfo:
    return PairStrategy().describe_plugin()


@hookimpl
def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
    return PairStrategy().match_kv_cache(description)


@hookimpl
def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
    return PairStrategy().build_direct_linker_pool_group(description)


def _example(name: str, drafts: int) -> CacheExample:
    def describe(allocate: Allocate) -> KVCacheDescription:
        def slots(count: int) -> tuple[BufferSpan, ...]:
            return tuple(allocate(PAGES * PAGE, 3) for _ in range(count))

        def pages(size: int) -> tuple[BufferSpan, ...]:
            return tuple(allocate(PAGES, size) for _ in range(LAYERS))

        buffers = {"keys": slots(LAYERS), "index": pages(7), "state": pages(11)}
        return KVCacheDescription(
            family="pair",
            page_size=PAGE,
            buffers=buffers | ({"draft_keys": slots(drafts)} if drafts else {}),
            layers=tuple(
                LayerFacts(layer=i, global_layer=i, kind="last" if i == LAYERS - 1 else "first")
                for i in range(LAYERS)
            ),
            logical_pools=(
                LogicalPool(name="kv", page_size=PAGE),
                LogicalPool(name="swa", page_size=PAGE, window=PAGE),
            ),
            facts={"kv_format": "bf16"},
        )

    return CacheExample(
        name=name,
        describe=describe,
        pages=PAGES,
        pools={"state": "swa"},
        omitted=frozenset({f"index[{LAYERS - 1}]"}),
    )


CACHES = (_example("plain", 0), _example("drafts", 2))
