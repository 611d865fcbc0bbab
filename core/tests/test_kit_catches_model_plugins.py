"""For each test of the model plugins' kit, a plugin that is wrong in just that way, and is told so."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

import pytest
from fake_site import FakeSite
from pair_plugin import CACHES, PairStrategy

from kvlinker.description import KVCacheDescription
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError
from kvlinker.hookspecs import StrategyMatch
from kvlinker.layouts import require_paged_pools
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker.testing.cache_examples import CacheExample
from kvlinker.testing.fresh_process import ask_afresh
from kvlinker.testing.kit import kit_tests
from kvlinker.testing.models import ModelModule, ModelPluginTests

MODULE = """
from kvlinker.hookspecs import PluginInfo, hookimpl
from pair_plugin import PairStrategy

strategy = PairStrategy()

@hookimpl
def describe_plugin():
    return PluginInfo(api_version=1, summary="wrong")

@hookimpl
def match_kv_cache(description):
    return strategy.match_kv_cache(description)

@hookimpl
def build_direct_linker_pool_group(description):
    return strategy.build_direct_linker_pool_group(description)
"""

HASHING = """
class Wrong(PairStrategy):
    def layout(self, description):
        return f"pair/{hash('pair')}"

strategy = Wrong()
"""


def run(test: str, plugin: ModelModule, caches: Sequence[CacheExample] = CACHES) -> None:
    """Run one test of the kit on a plugin, for each cache that it takes."""
    under_test, examples = plugin, caches

    class TestSubject(ModelPluginTests):
        plugin = under_test
        caches = examples

    method = inspect.getattr_static(TestSubject, test)
    wanted = inspect.signature(method).parameters
    for cache in caches if "cache" in wanted else caches[:1]:
        given: dict[str, object] = {"cache": cache} if "cache" in wanted else {}
        if "fresh_answers" in wanted:
            given["fresh_answers"] = ask_afresh(plugin.__name__, caches)
        method(TestSubject(), **given)


# ---- plugins that are wrong in one way --------------------------------------------------------


class ClaimsAPart(PairStrategy):
    def match_kv_cache(self, description: KVCacheDescription) -> StrategyMatch | None:
        match = super().match_kv_cache(description)
        return None if match is None else replace(match, buffers=match.buffers - {"state"})


class UsesASpanTwice(PairStrategy):
    def entries(self, description: KVCacheDescription) -> list[DevicePoolEntry]:
        first = description.buffers["state"][:1]
        again = self.paged(description, "index", "kv", first)
        return [self.keys(description), self.paged(description, "state", "swa"), again]


class LeavesTheIndexOut(PairStrategy):
    def is_dead(self, _: KVCacheDescription, _layer: int) -> bool:
        return True


class MovesTheDeadIndex(PairStrategy):
    def is_dead(self, _: KVCacheDescription, _layer: int) -> bool:
        return False


class RaisesForOthers(PairStrategy):
    def is_mine(self, description: KVCacheDescription) -> bool:
        if description.family != "pair":
            msg = "not mine"
            raise ContractError(msg)
        return True


class TakesEveryFamily(PairStrategy):
    def is_mine(self, _: KVCacheDescription) -> bool:
        return True


class TakesEveryBuffer(PairStrategy):
    def check_roles(self, _: KVCacheDescription) -> None:
        return


class TakesEveryFact(PairStrategy):
    def check_facts(self, _: KVCacheDescription) -> None:
        return


class RaisesForBuffersItDoesNotKnow(PairStrategy):
    def check_roles(self, description: KVCacheDescription) -> None:
        assert set(description.buffers) <= {"keys", "index", "state", "draft_keys"}


class NeedsNoState(PairStrategy):
    def check(self, description: KVCacheDescription) -> None:
        if "state" in description.buffers:
            super().check(description)


class IgnoresDrafts(PairStrategy):
    def check_drafts(self, _: KVCacheDescription) -> None:
        return


class IgnoresPageSizes(PairStrategy):
    def check_pools(self, _: KVCacheDescription) -> None:
        return


class RefusesWithoutNumbers(PairStrategy):
    def check_pools(self, description: KVCacheDescription) -> None:
        try:
            require_paged_pools(description, "kv", "swa")
        except ContractError as error:
            msg = "pages do not fit"
            raise ContractError(msg) from error


class ChangesTheDescription(PairStrategy):
    def check(self, description: KVCacheDescription) -> None:
        super().check(description)
        object.__setattr__(description, "facts", MappingProxyType({"kv_format": "fp8"}))


class AnswersAnew(PairStrategy):
    def __init__(self) -> None:
        self.times = 0

    def layout(self, _: KVCacheDescription) -> str:
        self.times += 1
        return f"pair/{self.times}"


class HashesAddresses(PairStrategy):
    def layout(self, description: KVCacheDescription) -> str:
        return f"pair/{description.buffers['keys'][0].base_ptr}"


class HashesRows(PairStrategy):
    def layout(self, description: KVCacheDescription) -> str:
        return f"pair/{description.buffers['keys'][0].rows}"


class IgnoresTheFormat(PairStrategy):
    def value_format(self, _: KVCacheDescription) -> str:
        return ""


class LoadsLayersCrossed(PairStrategy):
    def positions(self, count: int) -> dict[int, int]:
        return {layer: (layer + 1) % count for layer in range(count)}


class TakesSlotsForPages(PairStrategy):
    def key_rows_are_pages(self) -> bool:
        return True


class TakesStatesFromKV(PairStrategy):
    def paged(
        self,
        description: KVCacheDescription,
        role: str,
        _source: str,
        spans: Sequence[BufferSpan] | None = None,
        at: dict[int, int] | None = None,
    ) -> DevicePoolEntry:
        return super().paged(description, role, "kv", spans, at)


class Rebuilds(PairStrategy):
    """Makes the keys' entry itself, and forgets what the helper would have passed on."""

    def keys(self, description: KVCacheDescription) -> DevicePoolEntry:
        right = super().keys(description)
        return DevicePoolEntry(
            name=right.name,
            indices_from_pool=right.indices_from_pool,
            components=right.components,
            layer_mapping=right.layer_mapping,
            page_size=right.page_size,
            rows_are_pages=False,
            value_format=right.value_format,
            rank_axes=right.rank_axes,
            replicated=right.replicated,
        )


class ForgetsTheStage(PairStrategy):
    def build_direct_linker_pool_group(self, description: KVCacheDescription) -> DevicePoolGroup:
        entries = self.entries(description)
        return DevicePoolGroup(entries, len(description.layers), 2, layout="pair/1")


class StoresTheFirstStageAlone(PairStrategy):
    def is_dead(self, description: KVCacheDescription, layer: int) -> bool:
        return bool(description.layers[0].global_layer) or super().is_dead(description, layer)


WRONG: list[tuple[str, PairStrategy, str]] = [
    ("s1_s4_the_whole_cache", ClaimsAPart(), "matched, but leaves buffer 'state' out"),
    ("s1_s4_the_whole_cache", UsesASpanTwice(), r"uses span 'state\[0\]' more than once"),
    (
        "s4_only_what_nobody",
        LeavesTheIndexOut(),
        r"leaves out \['index\[0\]', 'index\[1\]', 'index\[2\]'\]",
    ),
    ("s4_only_what_nobody", MovesTheDeadIndex(), r"moves \['index\[3\]'\], which the example says"),
    ("other_families", RaisesForOthers(), r"raises for another family \(not mine\); return None"),
    ("other_families", TakesEveryFamily(), "takes a cache of the family 'kvlinker_kit_unknown'"),
    ("s1_buffers_that_it", TakesEveryBuffer(), "takes a cache with the unknown buffers"),
    ("s1_buffers_that_it", RaisesForBuffersItDoesNotKnow(), "raises AssertionError.*KVLinkerError"),
    ("facts_that_it_does_not", TakesEveryFact(), "takes a cache with the unknown fact"),
    ("b02_a_cache_without", NeedsNoState(), "takes a cache without its buffers 'state'"),
    ("b08_drafts", IgnoresDrafts(), "that states 1 draft layers and describes 0"),
    ("b96_page_sizes", IgnoresPageSizes(), "takes a cache of pages of 2 slots under .* of 4"),
    ("b96_page_sizes", RefusesWithoutNumbers(), "must name both page sizes, 2 and 4; got: pages"),
    ("asking_again", ChangesTheDescription(), "the description is not what it was"),
    ("asking_again", AnswersAnew(), "gives another layout when asked again"),
    ("g5_addresses", HashesAddresses(), "changes with addresses or row counts"),
    ("g5_addresses", HashesRows(), "changes with addresses or row counts"),
    ("g5_a_changed_fact", IgnoresTheFormat(), "with kv_format 'bf16-other' instead of 'bf16'"),
    (
        "l4_every_span",
        LoadsLayersCrossed(),
        r"'keys\[0\]' belongs to layer 0 and is loaded with \[3\]",
    ),
    ("every_byte", TakesSlotsForPages(), r"span 'keys\[0\]': rows .* are not as expected"),
    ("every_byte", TakesStatesFromKV(), r"span 'state\[0\]': rows .* are not as expected"),
    (
        "slots_are_translated",
        Rebuilds(),
        "drops the engine's index map of 'kv' in pool 'keys'; pass it as index_mapper",
    ),
    ("g6_k3_every_shard", Rebuilds(), "pool 'keys' on rank 1 of 2 has .* the description says"),
    ("k3_a_stage", ForgetsTheStage(), r"global layer range is \(0, 4\), but the description says"),
    (
        "stages_together",
        StoresTheFirstStageAlone(),
        "a page of all stages has .* bytes, one of the",
    ),
]

WRONG_MODULES: list[tuple[str, str, str]] = [
    ("s8_it_loads", "@hookimpl\ndef describe_plugin():\n    return None", "returned NoneType"),
    (
        "s8_it_loads",
        "@hookimpl\ndef describe_plugin():\n    return PluginInfo(api_version=9, summary='new')",
        "speaks plugin API 9, this kvlinker speaks 1",
    ),
    (
        "it_reads_the_description",
        "@hookimpl\ndef match_kv_cache(description):\n    open(__file__).close()",
        "and touched: open .*wrong_plugin.py",
    ),
    (
        "it_reads_the_description",
        "@hookimpl\ndef match_kv_cache(description):\n    import wave",
        "and touched: import 'wave'",
    ),
    ("b107_no_engine", "import redis", "asking the plugin loads redis; remove the import"),
    (
        "g5_every_process",
        HASHING,
        "here and .* in a new process; sort what has no order",
    ),
]


@pytest.mark.parametrize(
    ("test", "plugin", "problem"),
    WRONG,
    ids=[f"{test}-{type(wrong).__name__}" for test, wrong, _ in WRONG],
)
def test_a_wrong_plugin_is_told_what_is_wrong(
    test: str, plugin: PairStrategy, problem: str
) -> None:
    with pytest.raises(AssertionError, match=problem):
        run(full_name(test), plugin)


@pytest.fixture
def write_plugin(site: FakeSite) -> Callable[[str], ModelModule]:
    """Write a module that is right but for the lines at its end, and import it."""

    def write(lines: str) -> ModelModule:
        site.write("redis", "")
        site.write("wrong_plugin", MODULE + lines)
        module: ModelModule = importlib.import_module("wrong_plugin")
        return module

    return write


@pytest.mark.parametrize(
    ("test", "lines", "problem"),
    WRONG_MODULES,
    ids=[f"{test}-{number}" for number, (test, *_) in enumerate(WRONG_MODULES)],
)
def test_a_wrong_module_is_told_what_is_wrong(
    write_plugin: Callable[[str], ModelModule], test: str, lines: str, problem: str
) -> None:
    plugin = write_plugin(lines)

    with pytest.raises((AssertionError, ImportError), match=problem):
        run(full_name(test), plugin)


def test_a_right_plugin_passes_every_test(write_plugin: Callable[[str], ModelModule]) -> None:
    plugin = write_plugin("")

    for test in kit_tests(ModelPluginTests):
        run(test, plugin)


def test_every_test_of_the_kit_catches_a_plugin() -> None:
    caught = {full_name(test) for test, *_ in (*WRONG, *WRONG_MODULES)}

    assert caught == set(kit_tests(ModelPluginTests))


def full_name(test: str) -> str:
    """Return the kit test's name of which these are the first words."""
    (name,) = (name for name in kit_tests(ModelPluginTests) if name.startswith(f"test_{test}"))
    return name
