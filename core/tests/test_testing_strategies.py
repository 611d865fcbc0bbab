"""The checks for model plugins find what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError
from kvlinker.hookspecs import StrategyMatch
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker.testing.pool_memory import HostMemory
from kvlinker.testing.strategies import MadeUpMemory, PageRows, check_round_trip, check_strategy

PAGE, PAGES = 2, 5
PAGE_ROWS = {"k": PageRows("kv", PAGE), "index": PageRows("kv", 1)}
Answer = Callable[[KVCacheDescription], StrategyMatch | None]


def describe(span: Callable[[int, int], BufferSpan]) -> KVCacheDescription:
    return KVCacheDescription(
        family="two",
        page_size=PAGE,
        buffers={
            "k": tuple(span(PAGES * PAGE, 3) for _ in range(2)),
            "index": (span(PAGES, 7),),
        },
        layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(2)),
        logical_pools=(LogicalPool(name="kv", page_size=PAGE),),
    )


def whole(description: KVCacheDescription) -> StrategyMatch | None:
    return StrategyMatch(buffers=frozenset(description.buffers))


@dataclass
class Plugin:
    """A strategy for `two` whose parts can be made wrong."""

    answer: Answer = whole
    index_role: str = "index"
    keys_role: str = "k"
    packed: bool = True
    layouts: list[str] = field(default_factory=lambda: ["two/1"])

    def match_kv_cache(self, description: KVCacheDescription) -> StrategyMatch | None:
        return self.answer(description)

    def build_direct_linker_pool_group(self, description: KVCacheDescription) -> DevicePoolGroup:
        keys = DevicePoolEntry(
            name="k",
            indices_from_pool="kv",
            components=[[span] for span in description.buffers[self.keys_role]],
            layer_mapping={0: 0},
            page_size=PAGE,
            rows_are_pages=self.keys_role != "k",
            packed=self.packed,
        )
        index = DevicePoolEntry(
            name="index",
            indices_from_pool="kv",
            components=[description.buffers[self.index_role][:1]],
            layer_mapping={1: 0},
            page_size=PAGE,
            rows_are_pages=self.index_role != "k",
        )
        layout = self.layouts[0]
        self.layouts = [*self.layouts[1:], layout]
        return DevicePoolGroup([keys, index], 2, PAGE, layout=layout)


@pytest.mark.parametrize("packed", [True, False])
def test_a_right_plugin_passes_both_checks(*, packed: bool) -> None:
    description = describe(HostMemory().allocate)

    group = check_strategy(Plugin(packed=packed), description)
    check_round_trip(group, description, PAGE_ROWS, {"kv": {0: 3, 3: 0, 4: 1}})

    assert [entry.page_bytes for entry in group.entries] == [12, 7]


def test_made_up_spans_lie_apart_and_may_have_no_rows() -> None:
    memory = MadeUpMemory()

    first, empty, second = memory.span(3, 5000), memory.span(0, 8), memory.span(1, 1)

    assert first.end_ptr <= second.base_ptr
    assert (empty.base_ptr, empty.rows, empty.row_bytes) == (0, 0, 8)


def partial(_: KVCacheDescription) -> StrategyMatch | None:
    return StrategyMatch(buffers=frozenset({"k"}))


def silent(_: KVCacheDescription) -> StrategyMatch | None:
    return None


def omits_what_it_uses(description: KVCacheDescription) -> StrategyMatch | None:
    return StrategyMatch(buffers=frozenset(description.buffers), omitted={"k[0]": "unread"})


def omits_a_stranger(description: KVCacheDescription) -> StrategyMatch | None:
    return StrategyMatch(buffers=frozenset(description.buffers), omitted={"k[9]": "unread"})


@dataclass
class Wavering:
    """Answers every second time with an omission more."""

    times: int = 0

    def __call__(self, description: KVCacheDescription) -> StrategyMatch | None:
        self.times += 1
        return whole(description) if self.times % 2 else omits_what_it_uses(description)


@pytest.mark.parametrize(
    ("plugin", "problem"),
    [
        (Plugin(answer=silent), "declines the family 'two'"),
        (Plugin(answer=partial), "matched, but leaves buffer 'index' out"),
        (Plugin(answer=Wavering()), "matches differently when asked again"),
        (Plugin(layouts=["two/1", "two/2"]), "gives another layout when asked again"),
        (Plugin(answer=omits_what_it_uses), r"uses span 'k\[0\]' and omits the same"),
        (
            Plugin(answer=omits_a_stranger),
            r"omits span 'k\[9\]', which the description does not have",
        ),
        (Plugin(index_role="k"), r"uses span 'k\[0\]' more than once"),
        (Plugin(keys_role="index"), r"uses span 'index\[0\]' more than once"),
    ],
)
def test_a_wrong_plugin_is_told_what_is_wrong(plugin: Plugin, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        check_strategy(plugin, describe(MadeUpMemory().span))


def test_a_span_that_was_never_described_is_found() -> None:
    description = describe(MadeUpMemory().span)
    stranger = description.buffers["index"][0].relabel("stranger")

    class Inventive(Plugin):
        def build_direct_linker_pool_group(self, _: KVCacheDescription) -> DevicePoolGroup:
            other = KVCacheDescription(
                family="two",
                page_size=PAGE,
                buffers={"k": description.buffers["k"], "index": (stranger,)},
                layers=description.layers,
                logical_pools=description.logical_pools,
            )
            return super().build_direct_linker_pool_group(other)

    with pytest.raises(AssertionError, match="uses span 'stranger' in pool 'index', which was not"):
        check_strategy(Inventive(), description)


def test_a_page_that_is_looked_for_in_the_wrong_rows_is_found() -> None:
    description = describe(HostMemory().allocate)
    group = Plugin().build_direct_linker_pool_group(description)
    wrong = PAGE_ROWS | {"k": PageRows("kv", 1)}

    with pytest.raises(AssertionError, match=r"span 'k\[0\]': rows \[.*\] are not as expected"):
        check_round_trip(group, description, wrong, {"kv": {0: 3}})


def test_a_span_that_must_stay_as_it_is_is_not_written() -> None:
    description = describe(HostMemory().allocate)
    group = Plugin().build_direct_linker_pool_group(description)

    with pytest.raises(AssertionError, match=r"span 'index\[0\]': rows \[3\] are not as expected"):
        check_round_trip(group, description, PAGE_ROWS, {"kv": {0: 3}}, omitted=["index[0]"])


def test_memory_that_is_made_up_is_not_touched() -> None:
    description = describe(MadeUpMemory().span)
    group = Plugin().build_direct_linker_pool_group(description)

    with pytest.raises(ContractError, match=r"span 'k\[0\]' has no owner"):
        check_round_trip(group, description, PAGE_ROWS, {"kv": {0: 3}})
