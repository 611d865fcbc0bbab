"""Every variable of SGLang's is in the namespace that is not known to change no value."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlinker.errors import ContractError
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
        "SGLANG_SKIP_P2P_CHECK",
        "SGLANG_CPU_OMP_THREADS_BIND",
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_MIN_NCHANNELS",
        "NCCL_MAX_NCHANNELS",
        "NCCL_NVLS_ENABLE",
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
        "SGLANG_QWEN4_PLE_FILE_DIR",
        "SGL_FORCE_SHUTDOWN",
        "NCCL_DEBUG",
        "FLASHINFER_WORKSPACE_BASE",
        "ONEDNN_VERBOSE",
        "TORCHINDUCTOR_CACHE_DIR",
        "CUDA_VISIBLE_DEVICES",
        "PATH",
    ],
)
def test_a_variable_that_changes_no_value_is_out(name: str) -> None:
    assert value_variables({name: "1"}) == {}


def test_k2_a_variable_that_sglang_read_under_its_old_name_does_not_hide_what_was_set_since() -> (
    None
):
    renamed = {"SGL_INT4_WEIGHT": "1", "SGLANG_INT4_WEIGHT": "1"}

    later = value_variables(renamed | {"SGLANG_INT4_WEIGHT": "0"})

    assert later == {"SGLANG_INT4_WEIGHT": "0"} != value_variables(renamed)


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


def make_folder(place: Path) -> Path:
    (place / "triton").mkdir(parents=True)
    (place / "triton" / "H200.json").write_text('{"BLOCK_M": 16}', encoding="utf-8")
    (place / "empty.json").write_text("", encoding="utf-8")
    return place


FOLDER_NAME = "SGLANG_LORA_MOE_CONFIG_DIR"


def test_k2_a_folder_that_a_variable_names_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    one, two = make_folder(tmp_path / "one"), make_folder(tmp_path / "two" / "there")
    texts = [value_variables({FOLDER_NAME: str(one)})]
    assert value_variables({FOLDER_NAME: str(two)}) == texts[0]

    (one / "triton" / "H200.json").write_text('{"BLOCK_M": 32}', encoding="utf-8")
    texts.append(value_variables({FOLDER_NAME: str(one)}))
    (one / "triton" / "H200.json").rename(one / "triton" / "H100.json")
    texts.append(value_variables({FOLDER_NAME: str(one)}))

    assert len({str(text) for text in texts}) == 3


def test_k2_what_a_link_in_a_folder_leads_to_is_in_it(tmp_path: Path) -> None:
    elsewhere, folder = make_folder(tmp_path / "elsewhere"), tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(elsewhere)
    before = value_variables({FOLDER_NAME: str(folder)})

    (elsewhere / "triton" / "H200.json").write_text("{}", encoding="utf-8")

    assert value_variables({FOLDER_NAME: str(folder)}) != before


def test_k2_a_folder_of_more_than_a_server_reads_is_refused_with_its_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(tmp_path)

    with pytest.raises(ContractError, match=rf"{FOLDER_NAME} names .*{tmp_path}.* 4096 .*unset it"):
        value_variables({FOLDER_NAME: str(tmp_path)})


def test_k2_words_that_are_names_of_like_folders_by_chance_stay_different(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("fa3", "triton"):
        (tmp_path / name).mkdir()

    texts = {str(value_variables({"SGLANG_X": name})) for name in ("fa3", "triton", "", "x")}

    assert len(texts) == 4
    assert value_variables({"SGLANG_X": ""}) == {"SGLANG_X": ""}


@pytest.mark.parametrize("named", [{}, {"SGLANG_CACHE_DIR": "elsewhere"}])
def test_k2_the_kernels_that_sglangs_caches_lock_are_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / (named.get("SGLANG_CACHE_DIR") or ".cache/sglang")
    folder.mkdir(parents=True)
    environment = dict.fromkeys(named, str(folder))
    texts = [value_variables(environment)]
    for lock in ("[1]", "[2]"):
        (folder / "kernels.lock").write_text(lock, encoding="utf-8")
        texts.append(value_variables(environment))

    assert texts[0] == {}
    assert len({str(text) for text in texts}) == 3


@pytest.mark.parametrize("value", ["[" * 5000, "a\0b"])
def test_a_text_that_is_no_path_stands_for_itself(value: str) -> None:
    assert value_variables({"SGLANG_X": value}) == {"SGLANG_X": value}


def test_k1_what_may_be_a_secret_is_in_by_a_digest() -> None:
    texts = [
        value_variables({"SGLANG_X_API_KEY": value}) for value in ("s3cret", "other", "\udc80")
    ]

    assert len({str(text) for text in texts}) == 3
    assert "s3cret" not in str(texts)
