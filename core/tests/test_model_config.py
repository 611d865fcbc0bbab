"""A model's configuration is read with care, and described by exactly one plugin over memory that is nobody's."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest

from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.description_json import description_from_json, description_to_json
from kvlinker.device_access import device_access_for
from kvlinker.discovery import load_modules
from kvlinker.errors import (
    AmbiguousStrategyError,
    ContractError,
    PluginContractError,
    PluginError,
    UnsupportedKVCacheError,
    UnsupportedOperationError,
)
from kvlinker.explanation import explain
from kvlinker.hookspecs import PluginInfo, StrategyMatch, hookimpl
from kvlinker.layouts import pool_entry, pool_group
from kvlinker.model_caches import describe_model
from kvlinker.model_config import (
    MADE_UP_DEVICE,
    MADE_UP_PAGES,
    MadeUpPools,
    ModelConfig,
    ModelConfigRequest,
    model_config_from_json,
)
from kvlinker.pools import DevicePoolGroup

TOY = ModelConfig(values={"model_type": "toy", "num_hidden_layers": 3, "width": 10})


def toy_cache(config: ModelConfig, page_size: int) -> KVCacheDescription:
    layers = config.integer("num_hidden_layers")
    spans = MadeUpPools().buffers(
        layers, row_bytes=config.integer("width"), rows_per_page=page_size
    )
    return KVCacheDescription(
        family="toy",
        page_size=page_size,
        buffers={"kv": spans},
        layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(layers)),
        logical_pools=(LogicalPool(name="kv", page_size=page_size),),
    )


def toy_plugin(*, reads: bool = True, page_size: int | None = None) -> ModuleType:
    """Make a plugin of the family `toy`, which may read no configurations or give any page size."""
    module = ModuleType("fake_toy")

    @hookimpl
    def describe_plugin() -> PluginInfo:
        return PluginInfo(api_version=1, summary="a fake")

    @hookimpl
    def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
        return StrategyMatch(buffers=frozenset({"kv"})) if description.family == "toy" else None

    @hookimpl
    def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
        spans = description.buffers["kv"]
        entry = pool_entry(
            description,
            name="kv",
            indices_from_pool="kv",
            roles=["kv"],
            components=[spans],
            layer_mapping={i: i for i in range(len(spans))},
            rows_are_pages=False,
            value_format="",
        )
        return pool_group(description, [entry], layout="toy/1")

    @hookimpl
    def describe_model_config(
        config: ModelConfig, request: ModelConfigRequest
    ) -> KVCacheDescription | None:
        if config.model_type != "toy":
            return None
        return toy_cache(config, page_size or request.page_size or 16)

    hooks = [describe_plugin, match_kv_cache, build_direct_linker_pool_group]
    for hook in [*hooks, describe_model_config] if reads else hooks:
        setattr(module, hook.__name__, hook)
    return module


def test_a_model_that_nobody_runs_is_described_and_explained() -> None:
    registry = load_modules(models={"toy": toy_plugin()})

    described = describe_model(TOY, ModelConfigRequest(page_size=32), registry=registry)
    explanation = explain(described, registry)

    assert (described.family, described.page_size) == ("toy", 32)
    assert explanation.winner == "toy"
    assert explanation.bytes_per_token == 30


def test_the_page_size_is_the_families_usual_one_unless_another_is_asked_for() -> None:
    registry = load_modules(models={"toy": toy_plugin()})

    described = describe_model(TOY, ModelConfigRequest(), registry=registry)

    assert described.page_size == 16


def test_an_unknown_model_is_refused_with_what_every_plugin_said() -> None:
    registry = load_modules(models={"toy": toy_plugin(), "old": toy_plugin(reads=False)})
    config = ModelConfig(values={"model_type": "other"})

    with pytest.raises(UnsupportedKVCacheError, match="type 'other'") as caught:
        describe_model(config, ModelConfigRequest(), registry=registry)

    text = str(caught.value)
    assert "model plugin 'toy' (fake_toy as a module): declined" in text
    assert "model plugin 'old' (fake_toy as a module): reads no configurations" in text


def test_a_refusal_of_the_plugin_that_knows_the_model_is_its_reason_and_its_cause() -> None:
    registry = load_modules(models={"toy": toy_plugin()})
    config = ModelConfig(values={"model_type": "toy", "num_hidden_layers": 3})

    with pytest.raises(
        UnsupportedKVCacheError, match="width must be an integer, got None"
    ) as caught:
        describe_model(config, ModelConfigRequest(), registry=registry)

    assert isinstance(caught.value.__cause__, ContractError)


def test_two_plugins_that_describe_one_model_are_an_error() -> None:
    registry = load_modules(models={"a": toy_plugin(), "b": toy_plugin()})

    with pytest.raises(AmbiguousStrategyError, match=r"'a'.*'b'.*disable all but one"):
        describe_model(TOY, ModelConfigRequest(), registry=registry)


def test_without_plugins_the_refusal_says_so() -> None:
    with pytest.raises(UnsupportedKVCacheError, match="no model plugin is installed"):
        describe_model(TOY, ModelConfigRequest(), registry=load_modules())


def test_another_page_size_than_asked_for_breaks_the_plugin_contract() -> None:
    registry = load_modules(models={"toy": toy_plugin(page_size=8)})

    with pytest.raises(PluginContractError, match="pages of 8 slots, but 32 were asked for"):
        describe_model(TOY, ModelConfigRequest(page_size=32), registry=registry)


def test_a_plugin_without_the_hook_says_so_when_it_is_asked() -> None:
    plugin = load_modules(models={"old": toy_plugin(reads=False)}).model("old")

    assert not plugin.reads_configs
    with pytest.raises(UnsupportedOperationError, match="does not implement describe_model_config"):
        plugin.describe_config(TOY, ModelConfigRequest())


def test_a_plugin_that_raises_anything_else_is_named() -> None:
    module = toy_plugin()

    @hookimpl
    def describe_model_config(config: ModelConfig) -> KVCacheDescription | None:
        raise ZeroDivisionError(config.model_type)

    setattr(module, "describe_model_config", describe_model_config)  # noqa: B010  # a module has no such attribute for mypy
    plugin = load_modules(models={"toy": module}).model("toy")

    with pytest.raises(PluginError, match="describe_model_config raised ZeroDivisionError: toy"):
        plugin.describe_config(TOY, ModelConfigRequest())


# ---- made-up memory ---------------------------------------------------------------------------


def test_made_up_buffers_overlap_nowhere_and_nothing_can_be_copied_to_them() -> None:
    registry = load_modules(models={"toy": toy_plugin()})
    described = describe_model(TOY, ModelConfigRequest(), registry=registry)
    group = registry.model("toy").build(described)

    spans = described.buffers["kv"]
    assert all(one.end_ptr <= other.base_ptr for one, other in pairwise(spans))
    assert {span.device for span in spans} == {MADE_UP_DEVICE}
    assert {span.rows for span in spans} == {16 * MADE_UP_PAGES}
    with pytest.raises(UnsupportedOperationError, match="'made-up'"):
        device_access_for(group)


def test_a_buffer_of_a_layer_that_keeps_none_has_no_rows() -> None:
    absent = MadeUpPools().absent(row_bytes=8448)

    assert (absent.rows, absent.row_bytes) == (0, 8448)


def test_a_made_up_cache_survives_its_json_form() -> None:
    described = toy_cache(TOY, 16)

    again = description_from_json(description_to_json(described))

    assert description_to_json(again) == description_to_json(described)


# ---- config.json ------------------------------------------------------------------------------


def test_a_configuration_is_read_from_its_json() -> None:
    config = model_config_from_json('{"model_type": "llama", "num_hidden_layers": 32}')

    assert (config.model_type, config.integer("num_hidden_layers")) == ("llama", 32)


def test_of_a_model_that_sees_and_reads_the_language_model_counts() -> None:
    inner = {"model_type": "qwen3", "num_hidden_layers": 36}

    config = model_config_from_json(json.dumps({"model_type": "qwen3_vl", "text_config": inner}))

    assert config.model_type == "qwen3"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "must be JSON"),
        ("[]", "must be a JSON object, got list"),
        ("{}", "needs a model_type such as llama, got None"),
        ('{"model_type": 3}', "needs a model_type such as llama, got 3"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        model_config_from_json(text)


def with_value(value: object) -> ModelConfig:
    return ModelConfig(values={"model_type": "toy", "x": value})


@pytest.mark.parametrize("value", [None, True, 0, -1, 2.0, "3"])
def test_a_size_is_an_integer_of_at_least_one(value: object) -> None:
    with pytest.raises(ContractError, match="model type 'toy': x must be"):
        with_value(value).integer("x")


def test_null_is_no_value() -> None:
    config = with_value(None)

    assert not config.has("x")
    assert config.integer("x", default=7) == 7
    assert config.flag("x", default=True)
    assert config.integers("x") is None
    assert config.names("x", count=2) is None
    assert config.letters("x") is None


def test_lists_are_read_as_what_they_hold() -> None:
    assert with_value([0, 4, 128]).integers("x") == (0, 4, 128)
    assert with_value(["full", "shared"]).names("x", count=2) == ("full", "shared")
    assert with_value(["full", "shared"]).letters("x") == ("full", "shared")
    assert with_value("FS").letters("x") == ("F", "S")
    assert with_value(False).flag("x", default=True) is False


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("0, 4", "x must be a list"),
        (3, "x must be a list"),
        ([0, -4], "a value of x must be at least 0"),
        ([0, 4.0], "a value of x must be an integer"),
    ],
)
def test_what_is_no_list_of_integers_is_refused(value: object, problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        with_value(value).integers("x")


@pytest.mark.parametrize("value", ["full", ["full"], ["full", 1], 3])
def test_what_is_not_one_name_for_each_layer_is_refused(value: object) -> None:
    with pytest.raises(ContractError, match="x must be a list"):
        with_value(value).names("x", count=2)


def test_a_flag_is_true_or_false() -> None:
    with pytest.raises(ContractError, match="x must be true or false, got 1"):
        with_value(1).flag("x", default=True)


def test_a_size_that_is_not_laid_out_is_refused_with_both_numbers() -> None:
    with_value(512).require("x", 512)

    with pytest.raises(UnsupportedKVCacheError, match="x 256 is not laid out here; known is 512"):
        with_value(256).require("x", 512)


@pytest.mark.parametrize(
    ("values", "value_format"),
    [
        ({}, "bf16"),
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "float16"}, "fp16"),
        ({"torch_dtype": "float16", "dtype": "float32"}, "fp32"),
    ],
)
def test_a_cache_has_the_models_dtype(values: dict[str, object], value_format: str) -> None:
    assert ModelConfig(values={"model_type": "toy", **values}).value_format() == value_format


def test_an_unknown_dtype_is_refused() -> None:
    config = ModelConfig(values={"model_type": "toy", "torch_dtype": "int4"})

    with pytest.raises(ContractError, match=r"torch_dtype must be one of bfloat16.*got 'int4'"):
        config.value_format()


# ---- requests ---------------------------------------------------------------------------------


def test_a_requests_facts_take_the_place_of_the_usual_ones() -> None:
    request = ModelConfigRequest(facts={"kv_format": "fp8", "rows": 16})

    assert request.over({"kv_format": "bf16", "rows": 8, "other": 0}) == {
        "kv_format": "fp8",
        "rows": 16,
        "other": 0,
    }
    assert request.format_of("kv_format", "bf16", known=("bf16", "fp8")) == "fp8"
    assert request.format_of("index_format", "bf16", known=("bf16", "fp8")) == "bf16"
    assert (request.number_of("rows", 8), request.number_of("columns", 8)) == (16, 8)


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"kv_fromat": "fp8"}, "no fact 'kv_fromat'.*did you mean 'kv_format'"),
        ({"zzz": 1}, "no fact 'zzz'.*known: kv_format"),
        ({"kv_format": 8}, "fact 'kv_format' must be like 'bf16', got 8"),
    ],
)
def test_a_fact_that_such_a_cache_does_not_have_is_refused(
    facts: dict[str, str | int], problem: str
) -> None:
    with pytest.raises(ContractError, match=problem):
        ModelConfigRequest(facts=facts).over({"kv_format": "bf16"})


def test_a_format_that_is_not_laid_out_is_refused() -> None:
    request = ModelConfigRequest(facts={"kv_format": "int4"})

    with pytest.raises(UnsupportedKVCacheError, match=r"kv_format 'int4'.*known are 'bf16', 'fp8'"):
        request.format_of("kv_format", "bf16", known=("bf16", "fp8"))


def test_more_layers_than_any_model_has_are_refused_at_once() -> None:
    most = ModelConfig(values={"model_type": "toy", "num_hidden_layers": 16384})
    more = ModelConfig(values={"model_type": "toy", "num_hidden_layers": 10**9})

    assert most.layers() == 16384
    with pytest.raises(ContractError, match="'toy': num_hidden_layers must be at most 16384"):
        more.layers()


def test_a_request_refuses_numbers_that_are_none() -> None:
    plain = ModelConfigRequest()

    with pytest.raises(ContractError, match="page_size must be at least 1"):
        replace(plain, page_size=0)
    with pytest.raises(ContractError, match="draft_layers must be at least 0"):
        replace(plain, draft_layers=-1)
    with pytest.raises(ContractError, match="draft_layers must be at most 16384"):
        replace(plain, draft_layers=10**9)
    with pytest.raises(ContractError, match="fact 'rows' must be an integer"):
        ModelConfigRequest(facts={"rows": "8"}).number_of("rows", 8)


def test_a_configuration_inside_another_is_read_alike_and_names_the_model() -> None:
    outer = ModelConfig(values={"model_type": "toy", "inner": {"heads": 4, "layers": [1, 2]}})

    inner = outer.section("inner")

    assert inner is not None
    assert (inner.integer("heads"), inner.integers("layers")) == (4, (1, 2))
    with pytest.raises(ContractError, match="model type 'toy': width"):
        inner.integer("width")
    assert outer.section("none") is None


def test_what_is_no_configuration_inside_another_is_refused() -> None:
    config = ModelConfig(values={"model_type": "toy", "inner": [1]})

    with pytest.raises(ContractError, match=r"inner must be an object, got \[1\]"):
        config.section("inner")


def test_an_offset_may_be_zero_where_a_size_may_not() -> None:
    config = ModelConfig(values={"model_type": "toy", "offset": 0})

    assert config.integer("offset", at_least=0) == 0
    with pytest.raises(ContractError, match="offset must be at least 1"):
        config.integer("offset")


def test_a_dtype_under_any_name_has_a_value_format() -> None:
    config = ModelConfig(values={"model_type": "toy", "state_dtype": "float16"})

    assert config.format_of_dtype("state_dtype") == "fp16"
    assert config.format_of_dtype("other_dtype", default="float32") == "fp32"
    with pytest.raises(ContractError, match="model_type must be one of bfloat16, float16, float32"):
        config.format_of_dtype("model_type")
