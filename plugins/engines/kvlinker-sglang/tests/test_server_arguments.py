"""Every argument of a server is in its namespace that is not known to change no value."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import pytest

from kvlinker_sglang.server_arguments import ServerArgument, is_loaded_from_files, value_arguments


class Mode(Enum):
    FAST = "fast"


def texts_of(group: str, **values: object) -> dict[str, str]:
    return value_arguments(
        {name: ServerArgument(group=group, value=value) for name, value in values.items()}
    )


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("model", "load_format"),
        ("model", "context_length"),
        ("exec.moe", "flashinfer_mxfp4_moe_precision"),
        ("observability", "forward_hooks"),
        ("exec.comm", "disable_custom_all_reduce"),
        ("exec.comm", "enable_nccl_nvls"),
        ("exec.comm", "enable_symm_mem"),
        ("model", "an_argument_of_tomorrow"),
        ("a_group_of_tomorrow", "x"),
    ],
)
def test_k2_an_argument_that_is_not_known_to_be_harmless_is_in(group: str, name: str) -> None:
    assert texts_of(group, **{name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("model", "model_path"),
        ("model", "weight_loader_disable_mmap"),
        ("exec.graph", "cuda_graph_bs_decode"),
        ("serving", "port"),
        ("parallel", "tp_size"),
    ],
)
def test_an_argument_that_changes_no_value_is_out(group: str, name: str) -> None:
    assert texts_of(group, **{name: "x"}) == {}


def test_k2_scales_in_a_file_are_known_by_its_content(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text("[1]", encoding="utf-8")
    two.write_text("[1]", encoding="utf-8")
    before = texts_of("model", quantization_param_path=str(one))
    assert texts_of("model", quantization_param_path=str(two)) == before

    one.write_text("[2]", encoding="utf-8")

    assert texts_of("model", quantization_param_path=str(one)) != before


def test_k2_weights_in_a_folder_are_known_by_what_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "experts.safetensors"
    file.write_bytes(b"1")
    before = texts_of("exec.moe", kt_weight_path=str(tmp_path))

    file.write_bytes(b"2")

    assert texts_of("exec.moe", kt_weight_path=str(tmp_path)) != before


def test_a_text_that_is_too_long_for_a_path_stands_for_itself() -> None:
    text = "{" * 5000

    assert texts_of("model", modelexpress_config=text) == {"modelexpress_config": text}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        ({"b": 1, "a": 2}, '{"a": 2, "b": 1}'),
        ({"q", "k"}, '["k", "q"]'),
        (Mode.FAST, '"fast"'),
    ],
)
def test_a_value_has_one_text(value: object, text: str) -> None:
    assert texts_of("model", modelopt_quant=value) == {"modelopt_quant": text}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("model_loader_extra_config", '{{"access_key": "{}"}}'),
        ("json_model_override_args", "s3://user:{}@host/bucket"),
        ("an_api_key", "{}"),
    ],
)
def test_k1_what_may_be_a_secret_is_in_by_a_digest(name: str, form: str) -> None:
    texts = [texts_of("model", **{name: form.format(value)}) for value in ("s3cret", "other")]

    assert texts[0] != texts[1]
    assert "s3cret" not in str(texts)


@pytest.mark.parametrize(
    "name",
    [
        "dummy",
        "flash_rl",
        "ipc_cache",
        "local_cached",
        "private",
        "rdma",
        "remote",
        "remote_instance",
        "of_tomorrow",
        None,
    ],
)
def test_k2_weights_of_these_formats_are_unknown(name: str | None) -> None:
    assert not is_loaded_from_files(name)


@pytest.mark.parametrize("name", ["auto", "safetensors", "gguf"])
def test_weights_of_these_formats_are_in_files(name: str) -> None:
    assert is_loaded_from_files(name)
