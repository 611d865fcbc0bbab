"""The installed SGLang is the one that the linker was written for, and what it says of its model is read whole."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang
import torch
from engine_frame.server import LinkerOptions
from engine_frame.trees import Tree
from faulty_store import PATIENT, install
from real_pools import MODEL_CONFIG
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from weight_updaters import Bucket, Check, Session, Update, Worker, flush, update, updater_of

import kvlinker_sglang
from kvlinker.errors import (
    ContractError,
    KVLinkerError,
    UnsupportedKVCacheError,
    UnsupportedOperationError,
)
from kvlinker.metrics import TokenOutcome
from kvlinker_sglang.compatibility import TESTED_VERSIONS, check_host, differences
from kvlinker_sglang.engine import host, parameters
from kvlinker_sglang.engine.host import installed_host, model_facts
from kvlinker_sglang.engine.linker import KVLinker
from kvlinker_sglang.identity import Checkpoint
from kvlinker_sglang.page_keys import check_page_keys
from kvlinker_sglang.server_arguments import known_names
from kvlinker_sglang.server_environment import known_variables
from kvlinker_sglang.transfers import EngineTransfer

Attach = Callable[..., tuple[Tree, KVLinker]]
VALUE_ARGUMENTS = {
    "context_length",
    "custom_weight_loader",
    "dtype",
    "flashinfer_mxfp4_moe_precision",
    "forward_hooks",
    "json_model_override_args",
    "kv_cache_dtype",
    "load_format",
    "lora_backend",
    "mamba_ssm_dtype",
    "mm_process_config",
    "model_impl",
    "model_loader_extra_config",
    "modelopt_quant",
    "quantization",
    "quantization_param_path",
    "quantize_and_serve",
    "rl_quant_profile",
    "speculative_algorithm",
}
"""Arguments of which each changes values."""


@pytest.fixture
def attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attach]:
    """Return a function that attaches a linker to a tree, by default an MHA one, with some of its options."""
    monkeypatch.syspath_prepend(install(tmp_path / "plugins"))
    linkers: list[KVLinker] = []

    def attach(name: str = "mha", **options: object) -> tuple[Tree, KVLinker]:
        tree = Tree(name=name)
        store = {"plugin": "faulty", "options": {"control": str(tmp_path / "control")}}
        linker = tree.attach(
            LinkerOptions(
                extra_config={
                    "store": store,
                    "min_hit_tokens": 1,
                    "limits": dict(PATIENT),
                    **options,
                }
            )
        )
        assert isinstance(linker, KVLinker)
        linkers.append(linker)
        return tree, linker

    yield attach
    for linker in linkers:
        linker.close()


def test_the_installed_sglang_is_the_tested_one_and_has_no_differences() -> None:
    installed = installed_host()

    assert installed.version in TESTED_VERSIONS
    assert differences(installed) == ()
    check_host(installed)


def test_b35_the_page_keys_of_the_installed_sglang_hold_salt_and_extra_key() -> None:
    check_page_keys(installed_host())


def test_b35_a_lora_adapter_is_in_the_extra_key_of_its_requests() -> None:
    ids = [LoRARef.deterministic_id("a", "/a"), LoRARef.deterministic_id("a", "/b"), None]
    requests = [
        Req("r", "", [1, 2], SamplingParams(max_new_tokens=1), lora_id=lora_id, extra_key="x")
        for lora_id in ids
    ]

    assert len({request.extra_key for request in requests}) == 3


def test_sglang_finds_the_linker_where_the_documentation_says() -> None:
    assert kvlinker_sglang.KVLinker is KVLinker
    assert issubclass(KVLinker, UnifiedCacheLinker)
    assert not KVLinker.__abstractmethods__


def test_a_module_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="KVLinkers"):
        kvlinker_sglang.KVLinkers  # noqa: B018  # what is tested


def test_k2_what_the_server_says_of_its_model_is_read(attach: Attach) -> None:
    attach()

    facts = model_facts()

    assert facts.engine_version in TESTED_VERSIONS
    assert facts.weights_version == "default"
    assert facts.values.keys() >= VALUE_ARGUMENTS
    assert not facts.values.keys() & {"model_path", "port", "tp_size", "cuda_graph_config"}


def test_k2_drafts_and_adapters_that_the_server_starts_with_are_read(attach: Attach) -> None:
    attach()
    adapter = LoRARef(lora_name="a", lora_path="/adapters/a")

    with (
        get_context()
        .config_bag("spec")
        .override(
            speculative_draft_model_path="org/draft", speculative_draft_model_revision="main"
        ),
        get_context().config_bag("lora").override(lora_paths=[adapter]),
    ):
        facts = model_facts()

    assert facts.draft == Checkpoint(path="org/draft", revision="main")
    assert facts.adapters == {"a": Checkpoint(path="/adapters/a")}


@pytest.mark.parametrize(
    ("group", "argument", "are_in_files"),
    [
        ("model", {"load_format": "safetensors"}, True),
        ("model", {"load_format": "dummy"}, False),
        ("model", {"weight_cache_mode": "client"}, False),
        ("spec", {"speculative_draft_load_format": "safetensors"}, True),
        ("spec", {"speculative_draft_load_format": "dummy"}, False),
    ],
)
def test_k2_weights_are_in_files_where_those_of_target_and_draft_are(
    attach: Attach, group: str, argument: dict[str, str], *, are_in_files: bool
) -> None:
    attach()

    with get_context().config_bag(group).override(**argument):
        assert model_facts().weights_in_files is are_in_files


def test_k2_arguments_have_a_text_that_no_start_changes(attach: Attach) -> None:
    attach()

    # The name of an object's place in memory would make every start another server.
    assert not [name for name, text in model_facts().values.items() if " at 0x" in text]


def test_k2_arguments_that_are_known_to_be_harmless_are_sglangs() -> None:
    assert known_names() <= namespace_of(ServerArgs).keys()


def test_k2_a_variable_that_chooses_a_kernel_makes_another_server(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"weights_version": "7"}
    before = attach(namespace=named)[1].weights.namespace
    monkeypatch.setenv("SGLANG_RUN_ID", "another start")
    assert attach(namespace=named)[1].weights.namespace == before

    monkeypatch.setenv("SGLANG_FLASHINFER_USE_PAGED", "1")

    assert attach(namespace=named)[1].weights.namespace != before


def test_k2_variables_that_are_known_to_be_harmless_are_sglangs() -> None:
    folder = Path(sglang.__file__).parent
    text = "".join(file.read_text(encoding="utf-8") for file in (folder / "srt").rglob("*.py"))
    words = set(re.findall(r"SGLANG_\w+", text))

    assert known_variables() <= words


def test_k2_random_weights_are_an_epoch_of_their_start(attach: Attach) -> None:
    attach()

    with get_context().config_bag("model").override(load_format="dummy"):
        starts = [attach()[1].weights.namespace for _ in range(2)]

    assert starts[0] != starts[1]


def test_b106_arguments_that_are_not_published_as_they_were_are_refused(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach()

    def config_bag(name: str) -> object:
        raise AttributeError(name)

    monkeypatch.setattr(type(get_context()), "config_bag", lambda _, name: config_bag(name))

    with pytest.raises(UnsupportedOperationError, match=TESTED_VERSIONS[0]):
        model_facts()


def test_b106_a_keyword_that_the_linker_does_not_know_is_refused(attach: Attach) -> None:
    tree, _ = attach()
    store = {"plugin": "faulty", "options": {}}

    with pytest.raises(UnsupportedOperationError, match="a linker is given backup_stream"):
        KVLinker(
            None, tree.params, components=(), extra_config={"store": store}, backup_stream=None
        )


def test_a_configuration_that_is_wrong_ends_the_start(attach: Attach) -> None:
    with pytest.raises(ContractError, match="metric is unknown; did you mean metrics"):
        attach(metric={})


def test_a_store_that_is_not_installed_ends_the_start(attach: Attach) -> None:
    with pytest.raises(KVLinkerError, match="faulti"):
        attach(store={"plugin": "faulti"})


def test_plugins_that_are_not_listed_are_not_loaded(attach: Attach) -> None:
    with pytest.raises(KVLinkerError, match="mha"):
        attach(plugins=["dsa"])


def test_c10_memory_that_is_given_away_under_its_addresses_is_refused(attach: Attach) -> None:
    attach()
    features = get_context().config_bag("exec").features

    with (
        features.override(enable_memory_saver=True),
        pytest.raises(UnsupportedOperationError, match="--enable-memory-saver"),
    ):
        attach()


def test_l1_a_pipeline_of_stages_that_decide_alone_is_refused(attach: Attach) -> None:
    attach()

    with (
        get_parallel().override(pp_size=2),
        pytest.raises(UnsupportedOperationError, match="--pp-size 2 with a linker"),
    ):
        attach()


def test_windows_that_are_chunks_are_refused(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(hf_config=MODEL_CONFIG, attention_chunk_size=40)
    monkeypatch.setattr(host, "process_model_config", lambda: config)

    with pytest.raises(UnsupportedKVCacheError, match="attend within chunks"):
        attach("swa")


def stored(tree: Tree) -> list[int]:
    tokens = list(range(100, 148))
    tree.insert(tokens, tree.allocate(3))
    tree.settle()
    tree.forget()
    return tokens


def test_k2_a_flush_alone_keeps_what_is_stored(attach: Attach) -> None:
    tree, _ = attach()
    tokens = stored(tree)

    tree.forget()

    assert tree.match(tokens, "again").host_tokens == len(tokens)


@pytest.mark.parametrize("version", [None, "step 7"])
def test_b34_pages_of_the_weights_before_an_update_are_not_found_after_it(
    attach: Attach, version: str | None
) -> None:
    tree, linker = attach()
    tokens = stored(tree)
    before = linker.weights.namespace

    update(tree, Update(version))

    assert tree.match(tokens, "again").host_tokens == 0
    assert linker.weights.namespace != before
    assert stored(tree) == tokens
    assert tree.match(tokens, "of the new weights").host_tokens == len(tokens)


def test_k2_an_update_that_failed_for_a_draft_names_no_weights(attach: Attach) -> None:
    tree, linker = attach()
    updater = updater_of(tree)
    updater.draft_worker = Worker(succeeds=False)

    assert not updater.update_weights_from_disk(Update("step 7")).success

    assert not linker.weights.is_mixed
    assert str(linker.weights.namespace.weights_version).startswith("epoch ")


@pytest.mark.parametrize("succeeds", [True, False])
def test_b34_nothing_is_stored_or_found_between_an_update_and_its_flush(
    attach: Attach, *, succeeds: bool
) -> None:
    tree, _ = attach()
    tokens = stored(tree)

    update(tree, Update("step 7", flush_cache=False), succeeds=succeeds)
    found = tree.match(tokens, "again").host_tokens
    tree.insert([*tokens, *range(900, 916)], tree.allocate(4))

    assert found == 0
    assert tree.pending_offloads == 0


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Let SGLang's updater wait for the one rank that there is."""
    place = f"file://{tmp_path / 'ranks'}"
    torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def can_store(tree: Tree) -> bool:
    """Compute a prompt that nobody computed before, and say whether its pages are offered."""
    tree.insert([*range(700, 748)], tree.allocate(3))
    offered = tree.pending_offloads > 0
    tree.settle()
    return offered


@pytest.mark.usefixtures("group")
def test_b34_pages_of_weights_of_which_some_are_replaced_are_never_stored(attach: Attach) -> None:
    tree, linker = attach()
    before = linker.weights.namespace
    updater = updater_of(tree)

    assert updater.begin_weight_update(Session()).success
    for _ in range(2):
        assert updater.update_weights_from_tensor(Bucket("step 7")).success
        assert not can_store(tree)
    flush(tree, None)
    assert updater.end_weight_update(Session()).success

    assert linker.weights.namespace != before
    assert can_store(tree)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("idle", [True, False])
def test_b34_pages_computed_before_a_session_ends_keep_the_store_off_until_a_flush(
    attach: Attach, *, idle: bool
) -> None:
    tree, linker = attach()
    updater = updater_of(tree, idle=idle)

    updater.begin_weight_update(Session())
    updater.update_weights_from_tensor(Bucket("step 7"))
    if idle:
        tree.insert([*range(100, 148)], tree.allocate(3))
    updater.end_weight_update(Session())

    assert linker.weights.is_mixed
    flush(tree, None)
    assert can_store(tree)


@pytest.mark.usefixtures("group")
def test_b34_weights_that_are_written_past_sglang_are_new_ones(attach: Attach) -> None:
    tree, linker = attach()
    tokens = stored(tree)
    before = linker.weights.namespace
    updater = updater_of(tree)

    updater.begin_weight_update(Session())
    updater.end_weight_update(Session())
    flush(tree, None)

    assert tree.match(tokens, "again").host_tokens == 0
    assert linker.weights.namespace != before


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("action", ["checksum", "compare", "reset_tensors", "snapshot"])
def test_b34_pages_of_weights_that_sglangs_checker_made_random_are_never_those_of_the_server(
    attach: Attach, action: str
) -> None:
    tree, linker = attach()
    before = linker.weights.namespace
    resets = action == "reset_tensors"

    assert updater_of(tree).check_weights(Check(action)).success

    assert can_store(tree) is not resets
    flush(tree, None)
    assert (linker.weights.namespace != before) is resets
    assert can_store(tree)


@pytest.mark.usefixtures("group")
def test_b34_a_begin_or_an_end_that_sglang_refuses_changes_no_session(attach: Attach) -> None:
    tree, linker = attach()
    updater = updater_of(tree)

    assert not updater.end_weight_update(Session()).success
    assert not linker.weights.is_mixed
    updater.begin_weight_update(Session())
    updater.update_weights_from_tensor(Bucket("step 7"))
    assert not updater.begin_weight_update(Session()).success
    updater.end_weight_update(Session())

    assert "update 'step 7'" in str(linker.weights.namespace.weights_version)


def test_l11_what_is_declined_while_weights_change_is_counted_and_logged_once(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    tree, linker = attach()
    tokens = stored(tree)
    assert not updater_of(tree).update_weights_from_tensor(Bucket("step 7")).success  # no session

    with caplog.at_level(logging.WARNING):
        for rid in "ab":
            assert tree.match(tokens, rid).host_tokens == 0
        assert not can_store(tree)

    counted = linker.metrics.snapshot()
    assert counted.misses_by_pool["weights"] == counted.tokens[TokenOutcome.MISS] > 0
    assert counted.closes
    assert counted.events["lookups_of_mixed_weights"] == 2
    assert counted.events["offloads_of_mixed_weights"] >= 1
    assert caplog.text.count("/flush_cache") == 1
    flush(tree, None)
    updater_of(tree).update_weights_from_tensor(Bucket("step 8"))
    with caplog.at_level(logging.WARNING):
        tree.match(tokens, "c")
    assert caplog.text.count("/flush_cache") == 2


def test_l1_a_transfer_that_makes_no_sense_raises_nothing(attach: Attach) -> None:
    _, linker = attach()
    nonsense: list[EngineTransfer] = [torch.zeros(1)]  # type: ignore[list-item]  # what is tested

    assert linker.lookup("a", nonsense) == []
    assert not linker.load("a", nonsense)
    assert not linker.offload(nonsense)
    assert linker.metrics.snapshot().events["lookup_errors"] == 1


def test_every_pool_that_sglang_tells_a_linker_of_is_described(attach: Attach) -> None:
    tree, _ = attach()
    drafts = {
        "mtp_draft_device_pools": ("packed",),
        "mtp_draft_mamba_pools": ("states",),
        "sidecar_draft_device_pools": ("beside",),
    }

    request = parameters.describe_request(replace(tree.params, **drafts))

    assert request.extras == {"req_to_token_pool": tree.params.req_to_token_pool, **drafts}


@pytest.mark.parametrize(
    ("widths", "rank", "number", "label"),
    [
        ({"dp_size": 2, "dp_rank": 1}, 3, 7, "dp1-pp0-tp3"),
        ({"attn_dp_size": 4, "attn_dp_rank": 2}, 2, 2, "dp2-pp0-tp2"),
    ],
)
def test_each_worker_of_a_server_has_a_place_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    widths: dict[str, int],
    rank: int,
    number: int,
    label: str,
) -> None:
    parallel = SimpleNamespace(
        **{"tp_size": 4, "tp_rank": rank, "dp_size": 1, "attn_dp_size": 1, **widths}
    )
    monkeypatch.setattr(parameters, "get_parallel", lambda: parallel)

    place = parameters.place_of(Tree(name="mha").params)

    assert (place.number, place.label) == (number, label)
