"""The conformance kit for model plugins: subclass `ModelPluginTests` in the plugin's own tests.

It needs no model, no GPU and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pytest

from kvlinker.hookspecs import PluginInfo
from kvlinker.testing import model_checks as checks
from kvlinker.testing.cache_examples import CacheExample
from kvlinker.testing.fresh_process import FreshAnswers, ask_afresh
from kvlinker.testing.kit import KitTests
from kvlinker.testing.strategies import ModelHooks, check_strategy
from kvlinker.testing.verdicts import fail

__all__ = ["CacheExample", "ModelModule", "ModelPluginTests"]


_FRESH_ANSWERS = pytest.StashKey[dict[type, FreshAnswers]]()
"""Test class to what its plugin does in a process of its own, for the length of a session."""


class ModelModule(ModelHooks, Protocol):
    """The module that a model plugin's entry point names."""

    __name__: str

    def describe_plugin(self) -> PluginInfo:
        """See `kvlinker.hookspecs`."""
        ...


class ModelPluginTests(KitTests):
    """What holds for every model plugin, tested with examples of the caches that it takes.

    A subclass is named Test..., gives `plugin` and `caches`, and may have tests of its own, which can ask
    for a `cache` too.
    """

    @property
    def plugin(self) -> ModelModule:
        """The module that the entry point names; a subclass sets the attribute."""
        msg = f"{type(self).__name__} must set `plugin` to the plugin's module"
        raise NotImplementedError(msg)

    @property
    def caches(self) -> Sequence[CacheExample]:
        """Caches that the plugin takes, with and without drafts; a subclass sets the attribute."""
        msg = f"{type(self).__name__} must set `caches` to examples, at least one for each layout"
        raise NotImplementedError(msg)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test once for each example, where it asks for a `cache`."""
        if "cache" in metafunc.fixturenames:
            if not self.caches:
                msg = f"{type(self).__name__}.caches is empty; give at least one cache that the plugin takes"
                raise pytest.UsageError(msg)
            names = [cache.name for cache in self.caches]
            metafunc.parametrize("cache", self.caches, ids=names)

    @pytest.fixture
    def fresh_answers(self, request: pytest.FixtureRequest) -> FreshAnswers:
        """Return what the plugin does in a process of its own, which is started once."""
        known = request.session.stash.setdefault(_FRESH_ANSWERS, {})
        if type(self) not in known:
            known[type(self)] = ask_afresh(self.plugin.__name__, self.caches)
        return known[type(self)]

    # ---- the plugin ---------------------------------------------------------------------------

    def test_s8_it_loads_with_the_hooks_and_the_version_of_this_api(self) -> None:
        """Hooks are marked and take the arguments that exist, and the API version is this one."""
        checks.check_loads(self.plugin)

    def test_it_reads_the_description_and_nothing_else(self, fresh_answers: FreshAnswers) -> None:
        """Hooks open no file, import nothing, and talk to nobody."""
        if fresh_answers.events:
            fail(
                f"hooks must read the description alone, and touched: {'; '.join(fresh_answers.events[:4])}"
            )

    def test_b107_no_engine_and_no_tensor_library_is_loaded(
        self, fresh_answers: FreshAnswers
    ) -> None:
        """A model plugin plans with numbers: a laptop without torch can load and ask it."""
        if fresh_answers.heavy_modules:
            fail(
                f"importing and asking the plugin loads {', '.join(fresh_answers.heavy_modules)}; remove the import"
            )

    # ---- the claim ----------------------------------------------------------------------------

    def test_s1_s4_the_whole_cache_is_claimed_and_laid_out(self, cache: CacheExample) -> None:
        """Every buffer is claimed, and every span used once and unaltered, or omitted."""
        check_strategy(self.plugin, cache.made_up())

    def test_s4_only_what_nobody_reads_is_left_out(self, cache: CacheExample) -> None:
        """Spans with rows are omitted exactly where the example says that their bytes are never read."""
        checks.check_omitted(self.plugin, cache)

    def test_other_families_are_declined_in_silence(self, cache: CacheExample) -> None:
        """The answer to another family is None: what a plugin raises is shown to people."""
        checks.check_declines_other_families(self.plugin, cache)

    def test_s1_buffers_that_it_does_not_know_are_refused(self, cache: CacheExample) -> None:
        """A cache with more buffers is another cache, and would lose them."""
        checks.check_unknown_role(self.plugin, cache)

    def test_facts_that_it_does_not_know_are_refused(self, cache: CacheExample) -> None:
        """What an engine states beyond what the plugin reads may change what the bytes mean."""
        checks.check_unknown_fact(self.plugin, cache)

    def test_b02_a_cache_without_one_of_its_buffers_is_refused(self, cache: CacheExample) -> None:
        """What an adapter forgot is not silently left out of every page."""
        checks.check_every_role_is_needed(self.plugin, cache)

    def test_b08_drafts_that_are_not_described_are_refused(self, cache: CacheExample) -> None:
        """Draft layers that an engine states have buffers, as many as it states."""
        checks.check_draft_count(self.plugin, cache)

    def test_b96_page_sizes_that_differ_are_refused_with_both_numbers(
        self, cache: CacheExample
    ) -> None:
        """A page of the pools is a page of the prefix tree."""
        checks.check_page_size(self.plugin, cache)

    # ---- the layout ---------------------------------------------------------------------------

    def test_asking_again_gives_the_same_and_changes_nothing(self, cache: CacheExample) -> None:
        """Hooks are functions of the description, which they leave as it is."""
        checks.check_unchanged(self.plugin, cache)

    def test_g5_every_process_makes_the_same_layout(
        self, cache: CacheExample, fresh_answers: FreshAnswers
    ) -> None:
        """Another process, with another hash seed, builds the same fingerprint: it finds what this one stored."""
        here = check_strategy(self.plugin, cache.made_up()).fingerprint.hex()
        there = fresh_answers.fingerprints[cache.name]
        if here != there:
            fail(
                f"the fingerprint is {here} here and {there} in a new process; sort what has no order"
            )

    def test_g5_addresses_and_row_counts_change_no_layout(self, cache: CacheExample) -> None:
        """An engine with other addresses and more pages finds what this one stored."""
        checks.check_fingerprint_is_the_layouts(self.plugin, cache)

    def test_g5_a_changed_fact_is_refused_or_makes_another_layout(
        self, cache: CacheExample
    ) -> None:
        """What the values mean goes into every key, so that no other meaning is read into them."""
        checks.check_changed_facts(self.plugin, cache)

    def test_l4_every_span_is_restored_with_its_own_layer(self, cache: CacheExample) -> None:
        """A span that is loaded with a later layer is still empty when its own layer runs."""
        checks.check_layers(self.plugin, cache)

    def test_every_byte_comes_back_in_any_order_of_layers(self, cache: CacheExample) -> None:
        """Pages are restored at other places, and no other byte is touched."""
        checks.check_bytes(self.plugin, cache)

    def test_slots_are_translated_once_for_each_index_space(self, cache: CacheExample) -> None:
        """The engine's index maps reach the pools that are fed from their index spaces."""
        checks.check_index_maps(self.plugin, cache)

    def test_g6_k3_every_shard_is_written_by_one_rank(self, cache: CacheExample) -> None:
        """Shards carry their rank axes, and of replicas only the first rank's is written."""
        checks.check_sharding(self.plugin, cache)

    # ---- stages -------------------------------------------------------------------------------

    def test_k3_a_stage_keeps_its_place_in_the_model(self, cache: CacheExample) -> None:
        """Layers deeper in the model are laid out under their global numbers, which their keys carry."""
        checks.check_shifted_stage(self.plugin, cache)

    def test_stages_together_hold_every_layer_once(self, cache: CacheExample) -> None:
        """What pipeline stages store is what the whole model would, each layer once."""
        checks.check_stages(self.plugin, cache)
