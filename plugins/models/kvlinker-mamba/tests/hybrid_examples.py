"""Small hybrids of every kind, as an engine adapter would describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvlinker.description import (
    Fact,
    IndexerKind,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
    PoolKind,
)
from kvlinker.spans import BufferSpan
from kvlinker.testing.cache_examples import Allocate, CacheExample

__all__ = ["CONV", "INT8", "KINDS", "PAGE", "PAGES", "SSM", "Hybrid", "example", "layers_of"]

Buffers = dict[str, tuple[BufferSpan, ...]]

PAGE, PAGES = 16, 6
KINDS = ("mamba", "mlp", "attention", "mamba", "attention_and_mamba")
SSM: Mapping[str, Fact] = {"ssm_format": "fp32", "ssm_layout": "value_major"}
CONV: Mapping[str, Fact] = {
    "conv_states": 1,
    "conv_format": "bf16",
    "conv_layout": "channel_major",
    "conv_window": 3,
}
INT8: Mapping[str, Fact] = {**SSM, "ssm_format": "int8", "ssm_scale_format": "bf16"}
STATE_ROWS = {"ssm_state": 32, "ssm_scale": 4, "conv_state_0": 12, "conv_state_1": 6}
"""Bytes of a state in one layer."""
_HEADS: Mapping[str, Fact] = {"kv_layout": "token_major", "kv_format": "bf16", "kv_scaled": 0}
_PAGE_FACTS: Mapping[str, Mapping[str, Fact]] = {
    "mha": _HEADS,
    "swa": {**_HEADS, "swa_kv_format": "fp8_e4m3fn"},
    "qsa": {**_HEADS, "index_format": "bf16", "index_values": 8, "index_kpool": 4},
    "mla": {"kv_format": "bf16", "latent_values": 20},
    "dsa": {"kv_format": "fp8_packed_656", "index_format": "fp8_e4m3fn_fp32_scale"},
}
_SLOT_ROWS: Mapping[str, Mapping[str, int]] = {
    "mha": {"k": 8, "v": 10},
    "swa": {"k": 8, "v": 10, "swa_k": 4, "swa_v": 6},
    "qsa": {"k": 8, "v": 10},
    "mla": {"latent": 40},
    "dsa": {"kv": 656},
}
"""Bytes of a slot in one layer; of what windows keep, `swa` begins the role."""
_KEYS_ROW = PAGE // 4 * 8 * 2
"""Bytes of a page's index keys that four tokens share."""
_INDEX_ROW = 132
"""Bytes of an index key."""


def kept_in(kind: str, pool: str) -> bool:
    """Say whether a layer keeps something in a logical pool, as the test has it."""
    return pool in {"attention": "kv", "sliding": "swa", "attention_and_mamba": "kv, mamba"}.get(
        kind, kind
    )


def layers_of(kinds: Sequence[str], pool: str) -> list[int]:
    return [layer for layer, kind in enumerate(kinds) if kept_in(kind, pool)]


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """A model, of which stages are described; no two kinds of rows have one size."""

    pages: str = "mha"
    kinds: Sequence[str] = KINDS
    states: Mapping[str, Fact] = field(default_factory=lambda: {**SSM, **CONV})
    facts: Mapping[str, Fact] = field(default_factory=dict)
    envelope: bool = False
    """The states of a slot lie side by side, so that the rows of each are a whole slot apart."""
    has_sides: bool = False
    """Layers 1 and 3 keep a side state, and the first stage one that is of no layer."""
    drafts: int = 0
    head_drafts: int = 0
    """Drafts with heads, beside latents."""

    def describe(
        self, allocate: Allocate, start: int = 0, end: int | None = None
    ) -> KVCacheDescription:
        """Describe layers [start, end)."""
        kinds = list(self.kinds[start:end])
        sides = self._sides(allocate, start, len(kinds)) if self.has_sides else {}
        drafts = {"draft_kv_layout": "token_major", "draft_kv_format": "fp16"}
        buffers = {**self._pages(allocate, kinds, start), **self._states(allocate, kinds), **sides}
        return KVCacheDescription(
            family="mamba",
            page_size=PAGE,
            buffers={role: spans for role, spans in buffers.items() if spans},
            layers=tuple(map(self._layer, range(len(kinds)), kinds, range(start, len(self.kinds)))),
            logical_pools=self._logical_pools(),
            facts={
                "kv_family": self.pages,
                **_PAGE_FACTS[self.pages],
                **self.states,
                **{f"{role}_format": "int64" for role in sides},
                **(drafts if self.head_drafts else {}),
                **self.facts,
            },
        )

    def _layer(self, layer: int, kind: str, number: int) -> LayerFacts:
        facts = LayerFacts(layer=layer, global_layer=number, kind=kind)
        if self.pages != "dsa" or not kept_in(kind, "kv"):
            return facts
        # The first layer of attention owns an index, and the next one selects by it.
        owns = number == layers_of(self.kinds, "kv")[0]
        return replace(facts, indexer=IndexerKind.OWN if owns else IndexerKind.SHARED)

    def _logical_pools(self) -> tuple[LogicalPool, ...]:
        windows = (LogicalPool(name="swa", page_size=PAGE, window=20),)
        return (
            LogicalPool(name="kv", page_size=PAGE),
            *(windows if self.pages == "swa" else ()),
            LogicalPool(name="mamba", page_size=1, kind=PoolKind.SLOT),
        )

    def _pages(self, allocate: Allocate, kinds: Sequence[str], start: int) -> Buffers:
        in_a_row = PAGE if self.facts.get("kv_layout") == "head_major" else 1
        rows = PAGES * PAGE // in_a_row
        buffers: Buffers = {}
        for role, size in _SLOT_ROWS[self.pages].items():
            layers = layers_of(kinds, "swa" if "swa" in role else "kv")
            counts = {role: len(layers), f"draft_{role}": self.drafts}
            for name, count in counts.items():
                buffers[name] = tuple(allocate(rows, in_a_row * size) for _ in range(count))
                if self.facts.get("kv_scaled"):
                    buffers[f"{name}_scale"] = tuple(
                        allocate(PAGES, 4 * PAGE) for _ in range(count)
                    )
        if self.pages == "dsa":
            buffers |= self._indexes(allocate, kinds, start)
        if self.pages == "qsa":
            for role, count in (("", len(layers_of(kinds, "kv"))), ("draft_", self.drafts)):
                buffers[f"{role}index_k"] = tuple(allocate(PAGES, _KEYS_ROW) for _ in range(count))
        for role, size in (("draft_k", 24), ("draft_v", 28)) if self.head_drafts else ():
            buffers[role] = tuple(allocate(PAGES * PAGE, size) for _ in range(self.head_drafts))
        return buffers

    def _indexes(self, allocate: Allocate, kinds: Sequence[str], start: int) -> Buffers:
        first, folded = layers_of(self.kinds, "kv")[0], self.facts.get("index_kpool", 1)
        assert isinstance(folded, int)
        row_bytes = PAGE // folded * _INDEX_ROW
        return {
            "index_k": tuple(
                allocate(PAGES if layer + start == first else 0, row_bytes)
                for layer in layers_of(kinds, "kv")
            ),
            "draft_index_k": tuple(allocate(PAGES, row_bytes) for _ in range(self.drafts)),
        }

    def _states(self, allocate: Allocate, kinds: Sequence[str]) -> Buffers:
        layers = len(layers_of(kinds, "mamba"))
        roles = [role for role in STATE_ROWS if self._has_state(role)]
        if not self.envelope:
            return {
                role: tuple(allocate(PAGES, STATE_ROWS[role]) for _ in range(layers))
                for role in roles
            }
        slot = allocate(PAGES, layers * sum(STATE_ROWS[role] for role in roles))
        buffers: Buffers = {}
        at = slot.base_ptr
        for role in roles:
            starts = range(at, at + layers * STATE_ROWS[role], STATE_ROWS[role])
            buffers[role] = tuple(
                replace(slot, base_ptr=start, row_bytes=STATE_ROWS[role]) for start in starts
            )
            at += layers * STATE_ROWS[role]
        return buffers

    def _has_state(self, role: str) -> bool:
        ssm_format, convs = self.states["ssm_format"], self.states["conv_states"]
        count = convs if isinstance(convs, int) else 0
        return {"ssm_state": ssm_format != "none", "ssm_scale": ssm_format == "int8"}.get(
            role, role in [f"conv_state_{number}" for number in range(count)]
        )

    def _sides(self, allocate: Allocate, start: int, count: int) -> Buffers:
        layers = range(start, start + count)
        sides = {
            "side_short_conv": tuple(allocate(PAGES if i in (1, 3) else 0, 14) for i in layers)
        }
        return sides if start else {**sides, "side_ngram": (allocate(PAGES, 16),)}


def example(name: str, hybrid: Hybrid, *, cuts: Sequence[int] = (2,)) -> CacheExample:
    """Return a cache for the kit, cut into stages before some layers."""
    described = hybrid.describe(
        lambda rows, size: BufferSpan(base_ptr=1 << 20, rows=rows, row_bytes=size, row_stride=size)
    )
    slots = ("ssm_", "conv_", "side_")
    pools = {
        role: "mamba" if role.startswith(slots) else "swa"
        for role in described.buffers
        if role.startswith(slots) or "swa" in role
    }
    ends = (*cuts, len(hybrid.kinds))
    return CacheExample(
        name=name,
        describe=hybrid.describe,
        pages=PAGES,
        pools=pools,
        role_layers={
            **{
                role: layers_of(hybrid.kinds, pools.get(role, "kv"))
                for role in described.buffers
                if not role.startswith("side_")
            },
            "side_ngram": [0],
        },
        stages=[_Stage(hybrid, start, end) for start, end in zip((0, *cuts), ends, strict=True)],
    )


@dataclass(frozen=True)
class _Stage:
    """Describes some layers of a model, each time anew."""

    hybrid: Hybrid
    start: int
    end: int

    def __call__(self, allocate: Allocate) -> KVCacheDescription:
        return self.hybrid.describe(allocate, self.start, self.end)
