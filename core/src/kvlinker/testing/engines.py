"""The conformance kit for engine adapters: subclass `EngineAdapterTests` in the adapter's own tests.

It looks at the engine's pools as they are in memory; the engine's own classes are needed, a model is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pytest

from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.hookspecs import PluginInfo
from kvlinker.plugins import one_line
from kvlinker.registry import PluginRegistry
from kvlinker.testing import pool_examples as checks
from kvlinker.testing.fresh_process import heavy_imports
from kvlinker.testing.kit import KitTests
from kvlinker.testing.loading import load_under_test
from kvlinker.testing.pool_examples import PoolExample
from kvlinker.testing.verdicts import fail

__all__ = ["EngineAdapterTests", "EngineModule", "PoolExample"]

STRANGE_ENGINE = "kvlinker-kit-unknown"
"""An engine that no adapter is for."""


class EngineModule(Protocol):
    """The module that an engine adapter's entry point names."""

    __name__: str

    def describe_plugin(self) -> PluginInfo:
        """See `kvlinker.hookspecs`."""
        ...

    def describe_kv_cache(
        self, engine: str, kv_cache: object, request: DescribeRequest
    ) -> KVCacheDescription | None:
        """See `kvlinker.hookspecs`."""
        ...


class EngineAdapterTests(KitTests):
    """What holds for every engine adapter, tested with examples of the engine's pools.

    A subclass is named Test..., and gives `plugin`, `engine`, `pools`, `unsupported` and `goldens`.
    """

    @property
    def plugin(self) -> EngineModule:
        """The module that the entry point names; a subclass sets the attribute."""
        raise self._missing("plugin", "the plugin's module")

    @property
    def engine(self) -> str:
        """Name under which the engine asks; a subclass sets the attribute."""
        raise self._missing("engine", "the name under which the engine asks, such as sglang")

    @property
    def pools(self) -> Sequence[PoolExample]:
        """Pools that are described, one for each class and format; a subclass sets the attribute."""
        raise self._missing("pools", "examples of the engine's pools")

    @property
    def unsupported(self) -> Sequence[PoolExample]:
        """Objects of the engine that nobody can restore; a subclass sets the attribute."""
        raise self._missing("unsupported", "pools that the adapter refuses, at least one")

    @property
    def goldens(self) -> Path:
        """Folder of the golden descriptions, checked in with the tests; a subclass sets the attribute."""
        raise self._missing("goldens", "a folder, such as Path(__file__).parent / 'goldens'")

    def _missing(self, name: str, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} must set `{name}` to {what}")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test once for each example, where it asks for a `pool` or an `unsupported_pool`."""
        for argument, attribute in (("pool", "pools"), ("unsupported_pool", "unsupported")):
            if argument in metafunc.fixturenames:
                examples = self.pools if argument == "pool" else self.unsupported
                if not examples:
                    msg = f"{type(self).__name__}.{attribute} is empty; give at least one example"
                    raise pytest.UsageError(msg)
                metafunc.parametrize(argument, examples, ids=[one.name for one in examples])

    @pytest.fixture
    def registry(self) -> PluginRegistry:
        """Return a registry of the adapter alone."""
        return self._registry()

    def _registry(self) -> PluginRegistry:
        return load_under_test(self.plugin, name=self.engine)

    # ---- the plugin -----------------------------------------------------------------------------

    def test_s8_it_loads_with_the_hooks_and_the_version_of_this_api(self) -> None:
        """Hooks are marked and take the arguments that exist, and the API version is this one."""
        if not self._registry().engines():
            fail("the module has no hook describe_kv_cache, so it is no engine adapter")

    def test_b107_importing_it_loads_no_engine(self) -> None:
        """The adapter is loaded in every process that asks for plugins, engine or not."""
        if loaded := heavy_imports(self.plugin.__name__):
            fail(
                f"importing the adapter loads {', '.join(loaded)}; import them inside its functions"
            )

    def test_other_caches_and_engines_are_declined_in_silence(self, pool: PoolExample) -> None:
        """Every adapter is asked about every cache, and exactly one may answer."""
        request = DescribeRequest(page_size=pool.page_size, facts=pool.facts, extras=pool.extras())
        for engine, cache in ((self.engine, object()), (STRANGE_ENGINE, pool.make())):
            try:
                answer = self.plugin.describe_kv_cache(engine, cache, request)
            except Exception as error:  # noqa: BLE001 - whatever it raises, the test says what to return
                fail(
                    f"asked about {_kind(cache)} of {engine!r}, it raises {one_line(error)}; return None"
                )
            if answer is not None:
                fail(f"asked about {_kind(cache)} of {engine!r}, it describes that; return None")

    # ---- descriptions ---------------------------------------------------------------------------

    def test_every_tensor_is_described_or_excused(
        self, pool: PoolExample, registry: PluginRegistry
    ) -> None:
        """Memory of the pool that nobody describes would come back as it happens to be."""
        checks.check_memory(self.engine, pool, registry)

    def test_every_excuse_is_needed(self, pool: PoolExample, registry: PluginRegistry) -> None:
        """An excuse for nothing would hide the next tensor of that name."""
        checks.check_excuses(self.engine, pool, registry)

    def test_b92_c10_spans_lie_in_the_engines_own_memory_and_keep_it_alive(
        self, pool: PoolExample, registry: PluginRegistry
    ) -> None:
        """A copy would be stored and restored, and the engine would never see it."""
        checks.check_spans(self.engine, pool, registry)

    def test_describing_again_gives_the_same(
        self, pool: PoolExample, registry: PluginRegistry
    ) -> None:
        """A description is a report of facts."""
        checks.check_repeatable(self.engine, pool, registry)

    def test_b96_another_page_size_than_the_pools_is_not_made_up(
        self, pool: PoolExample, registry: PluginRegistry
    ) -> None:
        """What the prefix tree has and what the pool has are two facts."""
        checks.check_other_page_size(self.engine, pool, registry)

    def test_descriptions_are_the_ones_that_were_checked_in(
        self, pool: PoolExample, registry: PluginRegistry, request: pytest.FixtureRequest
    ) -> None:
        """A new version of the engine that changes its pools changes a golden file, and people see it."""
        update = bool(request.config.getoption("--kvlinker-update-goldens", default=False))
        checks.check_golden(self.engine, pool, registry, self.goldens, update=update)

    def test_unsupported_pools_are_refused_by_name(
        self, unsupported_pool: PoolExample, registry: PluginRegistry
    ) -> None:
        """An operator reads which pool cannot be linked."""
        checks.check_unsupported(self.engine, unsupported_pool, registry)


def _kind(cache: object) -> str:
    return f"a {type(cache).__name__}"
