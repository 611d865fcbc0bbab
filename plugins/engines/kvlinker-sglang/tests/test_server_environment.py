"""Every variable of SGLang's is in the namespace that is not known to change no value."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlinker_sglang.server_environment import value_variables


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_USE_AITER",
        "SGLANG_MAMBA_SSM_DTYPE",
        "SGLANG_KV_CANARY_PERTURB_REAL_KV_USED_PROB",
        "SGLANG_A_VARIABLE_OF_TOMORROW",
        "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
        "ROCM_QUICK_REDUCE_QUANTIZATION",
        "NVIDIA_TF32_OVERRIDE",
    ],
)
def test_k2_a_variable_that_is_not_known_to_be_harmless_is_in(name: str) -> None:
    assert value_variables({name: "1"}) == {name: "1"}


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_RUN_ID",
        "SGLANG_DP_RANK",
        "SGLANG_LOG_MS",
        "SGLANG_PORT",
        "SGLANG_CACHE_DIR",
        "SGL_FORCE_SHUTDOWN",
        "FLASHINFER_WORKSPACE_BASE",
        "TORCHINDUCTOR_CACHE_DIR",
        "CUDA_VISIBLE_DEVICES",
        "PATH",
    ],
)
def test_a_variable_that_changes_no_value_is_out(name: str) -> None:
    assert value_variables({name: "1"}) == {}


def test_k2_a_variable_under_its_old_name_is_the_same() -> None:
    new, old = ({name: "1"} for name in ("SGLANG_INT4_WEIGHT", "SGL_INT4_WEIGHT"))

    assert value_variables(old) == value_variables(new) == new


def test_k2_the_order_of_the_environment_changes_nothing() -> None:
    pairs = [("SGLANG_B", "1"), ("SGLANG_A", "2")]

    assert list(value_variables(dict(pairs))) == list(value_variables(dict(pairs[::-1])))


def test_k2_a_file_that_a_variable_names_is_known_by_its_content(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text("[1]", encoding="utf-8")
    two.write_text("[1]", encoding="utf-8")
    name = "SGLANG_HUMMING_ONLINE_QUANT_CONFIG"
    before = value_variables({name: str(one)})
    assert value_variables({name: str(two)}) == before

    one.write_text("[2]", encoding="utf-8")

    assert value_variables({name: str(one)}) != before


@pytest.mark.parametrize("value", ["[" * 5000, "a\0b"])
def test_a_text_that_is_no_path_stands_for_itself(value: str) -> None:
    assert value_variables({"SGLANG_X": value}) == {"SGLANG_X": value}


def test_k1_what_may_be_a_secret_is_in_by_a_digest() -> None:
    texts = [
        value_variables({"SGLANG_X_API_KEY": value}) for value in ("s3cret", "other", "\udc80")
    ]

    assert len({str(text) for text in texts}) == 3
    assert "s3cret" not in str(texts)
