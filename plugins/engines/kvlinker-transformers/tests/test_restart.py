"""Restart: a new process with empty pools continues every prompt bit for bit from what the first one stored.

The tests run as the first process; this file, run as a program, is the second one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import kvlinker_transformers
from kvlinker.description import DescribeRequest
from kvlinker.description_json import description_to_json
from kvlinker.discovery import load_plugins
from kvlinker.linker import LinkerOptions
from kvlinker_transformers.engine import PagedEngine, pools_for_config
from kvlinker_transformers.models import tiny_model

NEW_TOKENS = 4
PATIENT = LinkerOptions(lookup_seconds=60)
"""Enough to close a group of 4 tokens, and to cross a boundary next to a prompt's end."""
CAPACITY = 512 << 20
FIRST, SECOND = 1, 2
"""Processes; each hands its pages out in another order."""

Results = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model on pools of one format, and prompt lengths on both sides of every boundary."""

    model_type: str
    page_size: int
    lengths: tuple[int, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16


PAGES_OF_16 = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
# 48 index keys are chosen.
PAGES_OF_64 = (47, 48, 49, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
# Entries of 4 and of 128 tokens, windows of 128, pages of 256.
PAGES_OF_256 = (
    *(3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 258, 259, 260, 261),
    *(383, 384, 385, 511, 512, 513, 516, 640, 767, 768, 769),
)
FEW_OF_16 = (16, 17, 33, 65)
FEW_WINDOWS_OF_16 = (17, 40, 41, 65, 129)
# On both sides of every page up to four of them, and of windows of 40 and 128.
WINDOWS_OF_16 = (15, 16, 17, 31, 32, 33, 39, 40, 41, 47, 48, 49, 63, 64, 65, 127, 128, 129)
FEW_OF_64 = (64, 65, 128, 129, 193)
STATES_OF_64 = (63, 64, 65, 127, 128, 129, 192, 193)
HEAD_MAJOR = {"head_major": True}
FP8 = {"kv_format": "fp8_e4m3fn"}
PACKED = {"kv_format": "fp8_packed_656"}

CASES: Mapping[str, Case] = {
    "mha_token_major_bf16": Case("llama", 16, PAGES_OF_16),
    "mha_head_major_bf16": Case("qwen3", 16, PAGES_OF_16, HEAD_MAJOR),
    "mha_token_major_fp8": Case("qwen3", 16, FEW_OF_16, FP8),
    "mha_head_major_fp8": Case("llama", 16, FEW_OF_16, {**HEAD_MAJOR, **FP8}),
    # A window of 40 in three pages, and one of 128 in eight.
    "swa_bf16": Case("gemma3_text", 16, WINDOWS_OF_16),
    "swa_sinks_bf16": Case("gpt_oss", 16, WINDOWS_OF_16),
    "swa_fp32": Case("gemma3_text", 16, WINDOWS_OF_16, dtype=torch.float32),
    "swa_sinks_fp32": Case("gpt_oss", 16, WINDOWS_OF_16, dtype=torch.float32),
    "swa_window_within_a_page": Case("gemma3_text", 64, FEW_OF_64),
    "swa_whole_pages_head_major_fp8": Case("gpt_oss", 16, FEW_WINDOWS_OF_16, {**HEAD_MAJOR, **FP8}),
    "mla_bf16": Case("deepseek_v3", 64, PAGES_OF_64),
    "mla_fp8": Case("deepseek_v3", 64, FEW_OF_64, FP8),
    "mla_fp8_packed": Case("deepseek_v3", 64, PAGES_OF_64, PACKED),
    "dsa_bf16": Case("deepseek_v32", 64, PAGES_OF_64),
    "dsa_fp8": Case("deepseek_v32", 64, FEW_OF_64, FP8),
    "dsa_fp8_packed": Case("deepseek_v32", 64, PAGES_OF_64, PACKED),
    "dsa_shared_index_bf16": Case("glm_moe_dsa", 64, PAGES_OF_64),
    "dsa_shared_index_fp8_packed": Case("glm_moe_dsa", 64, PAGES_OF_64, PACKED),
    "v4_fp8": Case("deepseek_v4", 256, PAGES_OF_256),
    # Gated DeltaNet folds 64 tokens at a time.
    "states_gdn_bf16": Case("qwen3_next", 16, PAGES_OF_16),
    "states_gdn_fp32": Case("qwen3_next", 16, FEW_OF_16, dtype=torch.float32),
    "states_gdn_head_major_fp8": Case("qwen3_next", 16, FEW_OF_16, {**HEAD_MAJOR, **FP8}),
    "states_kda_bf16": Case("kimi_linear", 64, STATES_OF_64),
    "states_kda_fp8_packed": Case("kimi_linear", 64, FEW_OF_64, PACKED),
    "states_mamba_bf16": Case("jamba", 16, PAGES_OF_16),
    "states_conv_bf16": Case("lfm2", 16, PAGES_OF_16),
}
LENGTHS = [(name, length) for name, case in CASES.items() for length in case.lengths]


def generate_all(folder: Path, process: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield for each prompt its logits and how many of its tokens were restored."""
    registry = load_plugins()
    model_of = cache(tiny_model)
    store = registry.store("file").open({"path": folder, "capacity": CAPACITY})
    for name, case in CASES.items():
        model = model_of(case.model_type, dtype=case.dtype)
        pools = pools_for_config(
            model.config,
            pages=12,
            page_size=case.page_size,
            **case.options,  # type: ignore[arg-type]  # any option
        )
        with PagedEngine(model, pools, shuffle_seed=process) as engine:
            engine.attach(store, registry=registry, options=PATIENT)
            for length in case.lengths:
                prompt = torch.randint(
                    3, 500, (length,), generator=torch.Generator().manual_seed(length)
                )
                result = engine.generate(
                    prompt.tolist(), max_new_tokens=NEW_TOKENS, keep_logits=True
                )
                assert not result.restore_failed
                yield f"{name} {length} logits", result.logits
                yield f"{name} {length} cached", torch.tensor(result.cached_tokens)
            assert engine.wait_for_offloads()
    store.close()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    """Return what the first process computed and what the second one made of its pages."""
    folder = tmp_path_factory.mktemp("restart")
    computed = dict(generate_all(folder / "store", FIRST))
    restored = folder / "restored.safetensors"
    subprocess.run([sys.executable, __file__, folder / "store", restored], check=True)
    return computed, load_file(restored)


@pytest.fixture(scope="module")
def descriptions(make_model: Callable[..., PreTrainedModel]) -> Mapping[str, str]:
    """Return what is said of the pools of each case."""
    found = {}
    for name, case in CASES.items():
        pools = pools_for_config(
            make_model(case.model_type, dtype=case.dtype).config,
            pages=12,
            page_size=case.page_size,
            **case.options,  # type: ignore[arg-type]  # any option
        )
        request = DescribeRequest(page_size=case.page_size)
        description = kvlinker_transformers.describe_kv_cache("transformers", pools, request)
        assert description is not None
        found[name] = description_to_json(description)
    return found


@pytest.mark.supports(engine="transformers", level="model", case="name")
@pytest.mark.parametrize(("name", "length"), LENGTHS)
def test_b02_b17_a_new_process_continues_bit_for_bit_at_every_boundary(
    results: tuple[Results, Results],
    descriptions: Mapping[str, str],
    name: str,
    length: int,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("description", descriptions[name])
    computed, restored = results
    page_size = CASES[name].page_size

    assert computed[f"{name} {length} cached"] == 0
    assert restored[f"{name} {length} cached"] == (length - 1) // page_size * page_size
    logits = restored[f"{name} {length} logits"]
    assert not logits.isnan().any()
    assert torch.equal(logits, computed[f"{name} {length} logits"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    save_file(dict(generate_all(Path(sys.argv[1]), SECOND)), sys.argv[2])
