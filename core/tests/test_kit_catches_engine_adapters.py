"""For each test of the engine adapters' kit, an adapter that is wrong in just that way, and is told so."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np
import pytest
from fake_site import FakeSite
from numpy.typing import NDArray

from kvlinker.description import DescribeRequest, KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker.testing.engines import EngineAdapterTests, EngineModule, PoolExample
from kvlinker.testing.found_memory import find_memory
from kvlinker.testing.kit import kit_tests

Bytes = NDArray[np.uint8]
PAGE, PAGES = 4, 3


class Scales:
    """Memory behind a slot, as compiled engines keep it."""

    __slots__ = ("__table",)

    def __init__(self) -> None:
        self.__table = np.zeros((PAGES, 5), dtype=np.uint8)

    def table(self) -> Bytes:
        return self.__table


class RingPool:
    """An engine's pool: a buffer a layer, scales beside them, and scratch of the running request."""

    def __init__(self) -> None:
        fused = np.zeros((2, PAGES * PAGE, 8), dtype=np.uint8)
        self.layers = {"k": [fused[0], fused[1]]}
        self.scales = Scales()
        self.scratch = (np.zeros(16, dtype=np.uint8),)
        self.again = self
        self.page_size = PAGE


class MirroredPool(RingPool):
    """A pool of the same engine that nobody can restore."""


def span_of(array: Bytes, label: str) -> BufferSpan:
    rows, size = array.shape
    region = MemoryRegion(base_ptr=array.ctypes.data, size_bytes=array.nbytes, owner=array)
    return BufferSpan(
        base_ptr=region.base_ptr,
        rows=rows,
        row_bytes=size,
        row_stride=size,
        region=region,
        label=label,
    )


class RingAdapter:
    """The right adapter, in parts that are made wrong below."""

    def describe_plugin(self) -> PluginInfo | None:
        return PluginInfo(api_version=1, summary="rings, for tests of the kit")

    def describe(
        self, engine: str, kv_cache: object, request: DescribeRequest
    ) -> KVCacheDescription | None:
        if engine != "ring" or not isinstance(kv_cache, RingPool):
            return None
        self.check(kv_cache)
        return KVCacheDescription(
            family="ring",
            page_size=request.page_size,
            buffers=self.buffers(kv_cache),
            layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(2)),
            logical_pools=(LogicalPool(name="kv", page_size=self.pool_page(kv_cache, request)),),
            facts=self.facts(),
        )

    def check(self, pool: RingPool) -> None:
        if isinstance(pool, MirroredPool):
            msg = "a MirroredPool keeps half of its pages elsewhere"
            raise UnsupportedKVCacheError(msg)

    def buffers(self, pool: RingPool) -> dict[str, tuple[BufferSpan, ...]]:
        keys = (span_of(array, f"k[{i}]") for i, array in enumerate(pool.layers["k"]))
        return {"k": tuple(keys), "scale": (span_of(pool.scales.table(), "scale"),)}

    def pool_page(self, pool: RingPool, _request: DescribeRequest) -> int:
        return pool.page_size

    def facts(self) -> dict[str, str | int]:
        return {"kv_format": "fp8_e4m3fn"}


# ---- adapters that are wrong in one way -------------------------------------------------------


class SaysNothing(RingAdapter):
    def describe_plugin(self) -> PluginInfo | None:
        return None


class DescribesForAnyEngine(RingAdapter):
    def describe(
        self, _engine: str, kv_cache: object, request: DescribeRequest
    ) -> KVCacheDescription | None:
        return super().describe("ring", kv_cache, request)


class RaisesForOthers(RingAdapter):
    def describe(
        self, engine: str, kv_cache: object, request: DescribeRequest
    ) -> KVCacheDescription | None:
        if not isinstance(kv_cache, RingPool):
            msg = "no ring"
            raise ContractError(msg)
        return super().describe(engine, kv_cache, request)


class ForgetsTheScales(RingAdapter):
    def buffers(self, pool: RingPool) -> dict[str, tuple[BufferSpan, ...]]:
        return {"k": super().buffers(pool)["k"]}


class ForgetsALayer(RingAdapter):
    def buffers(self, pool: RingPool) -> dict[str, tuple[BufferSpan, ...]]:
        found = super().buffers(pool)
        return found | {"k": found["k"][:1]}


class DescribesACopy(RingAdapter):
    def buffers(self, pool: RingPool) -> dict[str, tuple[BufferSpan, ...]]:
        return super().buffers(pool) | {"scale": (span_of(pool.scales.table().copy(), "scale"),)}


class KeepsNothingAlive(RingAdapter):
    def buffers(self, pool: RingPool) -> dict[str, tuple[BufferSpan, ...]]:
        found = super().buffers(pool)
        return found | {"k": tuple(replace(span, region=None) for span in found["k"])}


class CountsItsCalls(RingAdapter):
    def __init__(self) -> None:
        self.times = 0

    def facts(self) -> dict[str, str | int]:
        self.times += 1
        return {**super().facts(), "described": self.times}


class MakesPagesUp(RingAdapter):
    def pool_page(self, _pool: RingPool, request: DescribeRequest) -> int:
        return request.page_size


class AnotherFormat(RingAdapter):
    def facts(self) -> dict[str, str | int]:
        return {"kv_format": "bf16"}


class TakesMirrors(RingAdapter):
    def check(self, _pool: RingPool) -> None:
        return


EXCUSED = {"scratch.*": "of the running request"}


def example(excused: dict[str, str] | None = None) -> PoolExample:
    return PoolExample(
        name="ring", make=RingPool, page_size=PAGE, excused=EXCUSED if excused is None else excused
    )


def as_module(adapter: RingAdapter) -> EngineModule:
    """Return a module with the hooks of an adapter."""
    module = ModuleType("ring_adapter")

    @hookimpl
    def describe_plugin() -> PluginInfo | None:
        return adapter.describe_plugin()

    @hookimpl
    def describe_kv_cache(
        engine: str, kv_cache: object, request: DescribeRequest
    ) -> KVCacheDescription | None:
        return adapter.describe(engine, kv_cache, request)

    vars(module).update(describe_plugin=describe_plugin, describe_kv_cache=describe_kv_cache)
    return cast("EngineModule", module)


def subject(adapter: EngineModule, goldens: Path, pool: PoolExample) -> EngineAdapterTests:
    """Return an adapter's tests as its author would write them."""
    folder, one = goldens, pool

    class TestSubject(EngineAdapterTests):
        plugin = adapter
        engine = "ring"
        goldens = folder
        pools = (one,)
        unsupported = (PoolExample(name="mirror", make=MirroredPool, page_size=PAGE),)

    return TestSubject()


class Request:
    """What pytest would hand to a test that asks for its request."""

    def __init__(self, *, update: bool) -> None:
        self.config = self
        self.update = update

    def getoption(self, name: str, *, default: bool) -> bool:
        assert (name, default) == ("--kvlinker-update-goldens", False)
        return self.update


def run(
    test: str,
    adapter: EngineModule,
    goldens: Path,
    *,
    pool: PoolExample | None = None,
    update: bool = False,
) -> None:
    """Run one test of the kit on an adapter."""
    tests = subject(adapter, goldens, pool or example())
    method: Callable[..., None] = inspect.getattr_static(type(tests), test)
    given: dict[str, object] = {"pool": tests.pools[0], "unsupported_pool": tests.unsupported[0]}
    wanted = set(inspect.signature(method).parameters)
    if "registry" in wanted:
        given["registry"] = vars(EngineAdapterTests)["_registry"](tests)
    given["request"] = Request(update=update)
    method(tests, **{name: value for name, value in given.items() if name in wanted})


@pytest.fixture
def goldens(tmp_path: Path) -> Path:
    """Give a folder with the description of the right adapter."""
    name = full_name("descriptions_are")
    run(name, as_module(RingAdapter()), tmp_path, update=True)
    return tmp_path


WRONG: list[tuple[str, RingAdapter, PoolExample, str]] = [
    ("s8_it_loads", SaysNothing(), example(), "describe_plugin returned NoneType"),
    ("other_caches", DescribesForAnyEngine(), example(), "it describes that; return None"),
    ("other_caches", RaisesForOthers(), example(), "it raises ContractError: no ring; return None"),
    (
        "every_tensor",
        ForgetsTheScales(),
        example(),
        r"15 of 15 B in scales.__table are not described",
    ),
    (
        "every_tensor",
        ForgetsALayer(),
        example(),
        r"96 of 192 B in layers.k.0, layers.k.1 are not described",
    ),
    ("every_tensor", RingAdapter(), example({}), "16 of 16 B in scratch.0 are not described"),
    ("every_excuse", RingAdapter(), example(EXCUSED | {"spare.*": "unused"}), "excuses nothing"),
    (
        "every_excuse",
        RingAdapter(),
        example(EXCUSED | {"scales.*": "small"}),
        "excuses memory that is described",
    ),
    (
        "b92_c10_spans",
        DescribesACopy(),
        example(),
        "'scale' lies in no tensor that the pool refers",
    ),
    ("b92_c10_spans", KeepsNothingAlive(), example(), r"the memory of span 'k\[0\]' alive"),
    (
        "describing_again",
        CountsItsCalls(),
        example(),
        "described twice, it is described differently",
    ),
    ("b96_another_page_size", MakesPagesUp(), example(), "are described as pages of 8 because"),
    ("descriptions_are", AnotherFormat(), example(), "was .*fp8_e4m3fn.* and is .*bf16"),
    (
        "descriptions_are",
        RingAdapter(),
        replace(example(), name="new"),
        "there is no such file; if the new description is right, run pytest with",
    ),
    ("unsupported", TakesMirrors(), example(), "a MirroredPool is described, and listed as unsup"),
]


@pytest.mark.parametrize(
    ("test", "adapter", "pool", "problem"),
    WRONG,
    ids=[f"{test}-{type(adapter).__name__}-{i}" for i, (test, adapter, *_) in enumerate(WRONG)],
)
def test_a_wrong_adapter_is_told_what_is_wrong(
    goldens: Path, test: str, adapter: RingAdapter, pool: PoolExample, problem: str
) -> None:
    with pytest.raises((AssertionError, ImportError), match=problem):
        run(full_name(test), as_module(adapter), goldens, pool=pool)


@pytest.mark.parametrize(("line", "problem"), [("import redis", "loads redis"), ("", "")])
def test_b107_an_adapter_that_loads_an_engine_is_told_so(
    site: FakeSite, tmp_path: Path, line: str, problem: str
) -> None:
    site.write("redis", "")
    site.write("ring_module", line)
    module = cast("EngineModule", importlib.import_module("ring_module"))
    name = full_name("b107")

    if problem:
        with pytest.raises(AssertionError, match=problem):
            run(name, module, tmp_path)
    else:
        run(name, module, tmp_path)


def test_a_right_adapter_passes_every_other_test(goldens: Path) -> None:
    for test in kit_tests(EngineAdapterTests):
        if test != full_name("b107"):
            run(test, as_module(RingAdapter()), goldens)


def test_every_test_of_the_kit_catches_an_adapter() -> None:
    caught = {full_name(test) for test, *_ in WRONG} | {full_name("b107")}

    assert caught == set(kit_tests(EngineAdapterTests))


def test_memory_is_found_once_with_every_way_to_it() -> None:
    pool = RingPool()

    found = find_memory(pool)

    ways = {memory.paths: memory.size_bytes for memory in found}
    assert ways == {
        ("layers.k.0", "layers.k.1"): 2 * PAGES * PAGE * 8,
        ("scales.__table",): PAGES * 5,
        ("scratch.0",): 16,
    }


def test_an_excuse_needs_a_reason() -> None:
    with pytest.raises(ContractError, match=r"'scratch.\*' is excused without a reason"):
        example({"scratch.*": " "})


def full_name(test: str) -> str:
    """Return the kit test's name of which these are the first words."""
    names = kit_tests(EngineAdapterTests)
    (name,) = (name for name in names if name.startswith(f"test_{test}"))
    return name
